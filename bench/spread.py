"""Interleaved, repeated runs, and their ratio with its spread."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    low: float
    high: float

    @staticmethod
    def of(values: list[float]) -> "Spread":
        return Spread(median(values), min(values), max(values))

    def text(self, digits: int = 1) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def interleaved(
    runs: Mapping[str, Callable[[], float]], repeats: int, seed: int = 0
) -> dict[str, list[float]]:
    """Each run once for warming, then `repeats` times in shuffled order."""
    order = random.Random(seed)
    for run in runs.values():
        run()
    values: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name in order.sample(list(runs), len(runs)):
            values[name].append(runs[name]())
    return values


def ratio(slow: list[float], fast: list[float]) -> Spread:
    """How many times longer `slow` takes, pair by pair."""
    return Spread.of([a / b for a, b in zip(slow, fast, strict=True)])
