"""Log lines for errors: their type and position in the code; no text of a request, no path of the machine.

The one exception is a drafter that fails: its message is logged too (drafters/drafter_list.py).
"""

import logging
from traceback import extract_tb


def log_error(log: logging.Logger, what: str, error: BaseException) -> None:
    """One line. The error's own text, which may quote anything, and its stack go to the debug level."""
    log.error("%s: %s", what, origin(error))
    log.debug("%s", what, exc_info=error)


class OneLine(logging.Formatter):
    """Every record is one line: of an exception its type and frames, as in `log_error`, for libraries too."""

    def format(self, record: logging.LogRecord) -> str:
        message = " ".join(record.getMessage().split("\n")).strip()
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            message = f"{message}: {origin(error)}"
        plain = logging.makeLogRecord({**record.__dict__, "msg": message, "args": None, "exc_info": None})
        plain.exc_text = plain.stack_info = None
        return super().format(plain)


def origin(error: BaseException) -> str:
    """The error's type and its frames, innermost first: function, file name, line."""
    frames = reversed(extract_tb(error.__traceback__))
    return f"{type(error).__name__} in " + " < ".join(
        f"{f.name} ({f.filename.rpartition('/')[2]}:{f.lineno})" for f in frames
    )
