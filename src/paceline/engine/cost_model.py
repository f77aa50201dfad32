"""The time of a target pass: a curve measured beforehand, corrected by the passes of this process."""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Final

DEFAULT_SLOPE: Final = 0.04  # of one more row, in passes of one row, where nothing was measured
MAX_AGE: Final = 128  # passes after which the correction of a row count is dropped

Prior = Callable[[int, int], float]  # rows and context to the cost of a pass, in any unit


def _default_prior(rows: int, context: int) -> float:
    return 1 + DEFAULT_SLOPE * rows


class CostCurve:
    """Microseconds of a target pass by its rows and the tokens before them.

    The prior curve is corrected by the times of decoding passes. The machine's speed drifts for all row
    counts together, so it is a factor of its own. Corrections that are not renewed expire: a row count that
    looked expensive in a slow moment is not chosen, so its correction would never be renewed.
    """

    def __init__(self, prior: Prior | None = None) -> None:
        self._prior = prior or _default_prior
        self._speed = 1000.0 if prior else 1.0  # microseconds per unit of the prior, until measured
        self._fresh = True
        self._correction: dict[int, float] = {}
        self._learned: dict[int, int] = {}  # row count -> the pass of its last correction, oldest first
        self._passes = 0
        self._known: list[int] = []  # the row counts with a correction, ascending

    def learn(self, rows: int, us: float, context: int = 0) -> None:
        expected = self._prior(rows, context)
        self._forget(rows)
        if self._fresh:
            self._speed, self._fresh = us / expected, False
        if rows not in self._correction:
            seen = us / (self._speed * expected)
            near = self._corrected(rows)
            self._correction[rows] = min(max(seen, near / 2), near * 2)
            insort(self._known, rows)
            return
        drift = us / (self._speed * self._correction[rows] * expected)
        drift = min(max(drift, 1 / 3), 3.0)  # outliers count for little
        self._speed *= drift**0.3
        self._correction[rows] *= drift**0.1

    def _forget(self, rows: int) -> None:
        """Drops the oldest correction if it is stale; that of `rows` is renewed."""
        self._passes += 1
        self._learned.pop(rows, None)
        self._learned[rows] = self._passes
        oldest = next(iter(self._learned))
        if self._learned[oldest] < self._passes - MAX_AGE:
            del self._learned[oldest], self._correction[oldest]
            self._known.remove(oldest)

    def __call__(self, rows: int, context: int = 0) -> float:
        return self._speed * self._prior(rows, context) * self._corrected(rows)

    def _corrected(self, rows: int) -> float:
        """Linear between measured row counts, constant beyond."""
        known = self._known
        at = bisect_left(known, rows)
        if not known:
            return 1.0
        if at == len(known) or at == 0 or known[at] == rows:
            return self._correction[known[min(at, len(known) - 1)]]
        low, high = known[at - 1], known[at]
        share = (rows - low) / (high - low)
        return self._correction[low] + share * (self._correction[high] - self._correction[low])
