"""Cursors whose time is counted, and the memory that a piece of work takes at its peak."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from paceline.constraints import Compiler, Constraint, StructuralTag
from paceline.types import Bits, Cursor

T = TypeVar("T")


@dataclass
class Clock:
    seconds: float = 0.0
    longest: float = 0.0  # single call

    def timed(self, work: Callable[[], T]) -> T:
        started = time.perf_counter()
        try:
            return work()
        finally:
            spent = time.perf_counter() - started
            self.seconds += spent
            self.longest = max(self.longest, spent)


class TimedCursor(Cursor):
    """A cursor that tells a clock how long it takes; so do its forks."""

    def __init__(self, inner: Cursor, clock: Clock) -> None:
        self._inner, self._clock = inner, clock

    @property
    def finished(self) -> bool:
        return self._inner.finished

    def fill(self, row: Bits) -> bool:
        return self._clock.timed(lambda: self._inner.fill(row))

    def advance(self, token: int) -> bool:
        return self._clock.timed(lambda: self._inner.advance(token))

    def forced(self) -> list[int]:
        return self._clock.timed(self._inner.forced)

    def canonical(self) -> list[int]:
        return self._clock.timed(self._inner.canonical)

    def fork(self) -> "TimedCursor":
        return TimedCursor(self._inner.fork(), self._clock)


class TimedCompiler(Compiler):
    """Counts the time of all cursors that it made since it was given a new clock."""

    clock = Clock()

    def cursor(self, constraint: Constraint | StructuralTag, ignore_eos: bool = False) -> Cursor:
        return TimedCursor(
            self.clock.timed(lambda: super(TimedCompiler, self).cursor(constraint, ignore_eos)), self.clock
        )


@contextmanager
def peak_growth() -> Iterator[Callable[[], float]]:
    """Inside, a function that says how many MB more than at the start were in use at once."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is in use now
    before = _kilobytes("VmRSS")
    yield lambda: (_kilobytes("VmHWM") - before) / 1024


def _kilobytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0])
