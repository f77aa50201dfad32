"""Confidence sequence for a mean: Robbins' normal mixture with an estimated variance.

Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas, "Time-uniform central limit theory" (arXiv 2103.06476). Its
coverage holds at all sample sizes at once, asymptotically: nothing is reported below MIN_SAMPLES.
"""

from math import ceil, exp, inf, log, sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.gate.stats.interval import Interval

MIN_SAMPLES: Final = 30
TUNED_AT: Final = 200  # samples at which the interval is narrowest relative to one of a fixed size
MAX_SAMPLES: Final = 10_000_000  # of a sample size that is still reported

Floats = NDArray[np.float64]


def radius(n: int, spread: float, alpha: float, tuned_at: int = TUNED_AT) -> float:
    """Half the width of the two-sided sequence at n samples.

    spread: standard deviation of one sample. alpha: the chance that the sequence ever leaves out the mean.
    """
    if n < 1:
        return inf
    rho = _rho(alpha, tuned_at)
    return spread * sqrt((n + rho) / n**2 * log((n + rho) / (rho * alpha**2)))


def running_radius(n: Floats, spread: Floats, alpha: float, tuned_at: int = TUNED_AT) -> Floats:
    """`radius`, elementwise: a whole history at once."""
    rho = _rho(alpha, tuned_at)
    return spread * np.sqrt((n + rho) / n**2 * np.log((n + rho) / (rho * alpha**2)))


def _rho(alpha: float, tuned_at: int) -> float:
    return tuned_at / (-2 * log(alpha) + log(1 - 2 * log(alpha)))


def spread(values: Floats, clusters: NDArray[np.int64] | None = None) -> float:
    """Standard deviation of one sample; of clustered samples, the larger one that their mean implies.

    clusters: equal for the samples of one conversation, whose errors may go together.
    """
    n = len(values)
    if n < 2:
        return inf
    single = float(values.std(ddof=1))
    if clusters is None:
        return single
    residuals = values - values.mean()
    sums = np.bincount(np.unique(clusters, return_inverse=True)[1], weights=residuals)
    k = len(sums)
    return single if k < 2 or k == n else max(single, sqrt(float((sums**2).sum()) / n * k / (k - 1)))


def mean_interval(values: Floats, alpha: float, clusters: NDArray[np.int64] | None = None) -> Interval:
    """Two-sided; unbounded below MIN_SAMPLES."""
    n = len(values)
    if n < MIN_SAMPLES:
        return Interval()
    half = radius(n, spread(values, clusters), alpha)
    mean = float(values.mean())
    return Interval(mean - half, mean + half)


def samples_for_radius(target: float, spread: float, alpha: float) -> int | None:
    """The samples after which the radius is at most `target`; None: more than MAX_SAMPLES."""
    if target <= 0 or radius(MAX_SAMPLES, spread, alpha) > target:
        return None
    low, high = log(MIN_SAMPLES), log(MAX_SAMPLES)
    if radius(MIN_SAMPLES, spread, alpha) <= target:
        return MIN_SAMPLES
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if radius(ceil(exp(middle)), spread, alpha) <= target else (middle, high)
    return ceil(exp(high))
