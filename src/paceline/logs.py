"""What may be written to logs: where something failed; no text of a request, no path of the machine."""

import logging
from traceback import extract_tb


def log_problem(log: logging.Logger, what: str, problem: BaseException) -> None:
    """One line. The exception's own text, which may quote anything, and its stack are for the debug level."""
    log.error("%s: %s in %s", what, type(problem).__name__, _trail(problem))
    log.debug("%s", what, exc_info=problem)


def _trail(problem: BaseException) -> str:
    """Innermost first: function, file without its folder, line."""
    frames = reversed(extract_tb(problem.__traceback__))
    return " < ".join(f"{f.name} ({f.filename.rpartition('/')[2]}:{f.lineno})" for f in frames)
