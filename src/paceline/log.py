"""What may be written to logs: where something failed; no text of a request, no path of the machine."""

import logging
from traceback import extract_tb


def log_problem(log: logging.Logger, what: str, problem: BaseException) -> None:
    """One line. The exception's own text, which may quote anything, and its stack are for the debug level."""
    log.error("%s: %s", what, place_of(problem))
    log.debug("%s", what, exc_info=problem)


def place_of(problem: BaseException) -> str:
    """Its type, then innermost first: function, file without its folder, line."""
    frames = reversed(extract_tb(problem.__traceback__))
    return f"{type(problem).__name__} in " + " < ".join(
        f"{f.name} ({f.filename.rpartition('/')[2]}:{f.lineno})" for f in frames
    )
