"""Confidence sequence for the mean of bounded values, by betting.

Waudby-Smith, Ramdas, "Estimating means of bounded random variables by betting" (arXiv 2010.09686). Against
each mean m somebody bets that the true one is smaller (or larger) and stakes fixed shares of the greatest
stake that cannot ruin them; a mixture over these shares is their wealth. By Ville's inequality wealth against
the true mean ever reaches 1/alpha with a chance of at most alpha, at every sample size. Means whose wealth is
there are left out. The bets do not adapt, so that only the counts of distinct values matter.
"""

from dataclasses import dataclass
from math import ceil, log
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.gate.stats.interval import Interval
from paceline.gate.stats.mean import MAX_SAMPLES, Floats

# Shares of the greatest stake, each with the same weight. Large ones pay while nothing differs, small ones
# where much does.
STAKES: Final = np.array([0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.95])
_BISECTIONS: Final = 40


@dataclass(frozen=True, slots=True)
class Counts:
    """Distinct values between `low` and `high`, and how often each came."""

    values: Floats
    counts: Floats
    low: float = -1.0
    high: float = 1.0

    @classmethod
    def of(cls, samples: Floats, low: float = -1.0, high: float = 1.0) -> "Counts":
        values, counts = np.unique(np.clip(samples, low, high), return_counts=True)
        return cls(values, counts.astype(float), low, high)

    @property
    def n(self) -> float:
        return float(self.counts.sum())

    @property
    def mean(self) -> float:
        return float(self.values @ self.counts / self.n)

    def scaled(self, factor: float) -> "Counts":
        return Counts(self.values, self.counts * factor, self.low, self.high)

    def mirrored(self) -> "Counts":
        return Counts(-self.values, self.counts, -self.high, -self.low)


def log_wealth_below(counts: Counts, mean: float) -> float:
    """Of the bet that the true mean is smaller than `mean`."""
    stakes = STAKES / (counts.high - mean)
    gains = np.log1p(stakes[:, None] * (mean - counts.values))
    return float(np.logaddexp.reduce(gains @ counts.counts) - log(len(STAKES)))


def running_log_wealth_below(samples: NDArray[np.float64], mean: float, high: float = 1.0) -> Floats:
    """`log_wealth_below` after each sample of the last axis."""
    wealth = np.full(samples.shape, -np.inf)
    for stake in STAKES / (high - mean):
        np.logaddexp(wealth, np.log1p(stake * (mean - samples)).cumsum(axis=-1), out=wealth)
    return wealth - log(len(STAKES))


def upper_bound(counts: Counts, alpha: float) -> float:
    """One-sided: the true mean is ever above it with a chance of at most alpha."""
    if counts.n == 0:
        return counts.high
    low, high = counts.mean, counts.high
    width = high - counts.low
    if log_wealth_below(counts, high - 1e-9 * width) < log(1 / alpha):
        return high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if log_wealth_below(counts, middle) >= log(1 / alpha) else (middle, high)
    return high


def bounded_mean_interval(counts: Counts, alpha: float) -> Interval:
    """Two-sided: alpha / 2 on either side."""
    return Interval(-upper_bound(counts.mirrored(), alpha / 2), upper_bound(counts, alpha / 2))


def samples_for_upper_bound(counts: Counts, margin: float, alpha: float) -> int | None:
    """The samples after which the upper bound is below `margin` if they go on as before; None: never.

    Before the first sample nothing is assumed to differ.
    """
    known = counts if counts.n else Counts(np.zeros(1), np.ones(1), counts.low, counts.high)
    if known.mean >= margin or margin >= known.high:
        return None
    per_sample = known.scaled(1 / known.n)
    low, high = 1.0, float(MAX_SAMPLES)
    if log_wealth_below(per_sample.scaled(high), margin) < log(1 / alpha):
        return None
    while high - low > 0.5:
        middle = (low * high) ** 0.5 if high > 2 * low else (low + high) / 2
        reached = log_wealth_below(per_sample.scaled(middle), margin) >= log(1 / alpha)
        low, high = (low, middle) if reached else (middle, high)
    return ceil(high)
