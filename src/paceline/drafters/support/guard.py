"""The guard around drafters: one that fails costs its draft, and nothing else."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from weakref import WeakKeyDictionary

from paceline.log import origin
from paceline.types import Drafter

log: Final = logging.getLogger("paceline")

_failures: Final[WeakKeyDictionary[Drafter, set[str]]] = WeakKeyDictionary()  # drafter -> failures logged


@contextmanager
def guarded(drafter: Drafter, consequence: str) -> Iterator[None]:
    """Swallows what a drafter raises. Each kind of failure is logged once for a drafter, with its message."""
    try:
        yield
    except Exception as problem:
        where = origin(problem)
        logged = _failures.setdefault(drafter, set())
        if where not in logged:
            logged.add(where)
            log.error("drafter %s failed; %s: %s (%s)", drafter.name, consequence, _message(problem), where)
        log.debug("drafter %s failed", drafter.name, exc_info=problem)


def _message(problem: Exception, max_chars: int = 200) -> str:
    """The first line of its message, which may be long or missing."""
    lines = str(problem).splitlines() or [type(problem).__name__]
    return lines[0] if len(lines[0]) <= max_chars else f"{lines[0][: max_chars - 3]}..."
