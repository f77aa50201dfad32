"""Log lines: one for each record, without texts and paths."""

import logging

from paceline.log import OneLine

SECRET = "xyzzy-plugh"


def shown(message: str, error: BaseException | None) -> str:
    info = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("uvicorn.error", logging.ERROR, __file__, 1, message, (), info)
    return OneLine("%(levelname)s %(name)s: %(message)s").format(record)


def fails() -> None:
    raise MemoryError(SECRET)


def test_a_traceback_of_any_library_is_one_line_that_quotes_nothing() -> None:
    try:
        fails()
    except MemoryError as error:
        line = shown("Exception in ASGI application\n", error)
    start = "ERROR uvicorn.error: Exception in ASGI application: MemoryError in fails (test_log.py:"
    assert line.startswith(start)
    assert "\n" not in line
    assert SECRET not in line
    assert shown("a\nb", None) == "ERROR uvicorn.error: a b"
