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

    A curve measured beforehand is corrected by what passes take while decoding. The machine's speed drifts
    for all row counts together, so it is kept apart from the corrections. Those that are not renewed are
    forgotten: a row count that looked dear in a slow moment is not chosen, so it would never look otherwise.
    """

    def __init__(self, prior: Prior | None = None) -> None:
        self._prior = prior or _default_prior
        self._speed = 1000.0 if prior else 1.0  # microseconds for a unit of the prior, until measured
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
        drift = min(max(drift, 1 / 3), 3.0)  # one hiccup of the machine must not count for much
        self._speed *= drift**0.3
        self._correction[rows] *= drift**0.1

    def _forget(self, rows: int) -> None:
        """Whatever is stale, now that `rows` are learned of again."""
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
        """Linear between what was measured, level beyond."""
        known = self._known
        at = bisect_left(known, rows)
        if not known:
            return 1.0
        if at == len(known) or at == 0 or known[at] == rows:
            return self._correction[known[min(at, len(known) - 1)]]
        low, high = known[at - 1], known[at]
        share = (rows - low) / (high - low)
        return self._correction[low] + share * (self._correction[high] - self._correction[low])
