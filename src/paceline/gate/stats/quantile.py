"""Confidence sequence for a quantile, by order statistics: no assumption on the distribution.

Howard, Ramdas, "Sequential estimation of quantiles" (arXiv 1906.09947): the number of samples at or below the
p-quantile is a sum of coins with chance p. A mixture over a Beta prior tests that chance at all sample sizes
at once; the ranks it does not reject are those of the bounds.
"""

from math import inf, lgamma, log

import numpy as np

from paceline.gate.stats.interval import Interval
from paceline.gate.stats.mean import MAX_SAMPLES, Floats

_PRIOR = 20.0  # strength, in samples


def quantile_interval(values: Floats, p: float, alpha: float) -> Interval:
    """Two-sided. Unbounded above while the largest sample may still be below the quantile."""
    n = len(values)
    if n == 0:
        return Interval()
    ordered = np.sort(values)
    middle = min(n, max(0, round(n * p)))
    if not _plausible(middle, n, p, alpha):
        return Interval()
    lower = _edge(middle, 0, n, p, alpha)  # the least plausible number of samples below the quantile
    upper = _edge(middle, n, n, p, alpha)
    return Interval(
        float(ordered[lower - 1]) if lower > 0 else -inf, float(ordered[upper]) if upper < n else inf
    )


def samples_for_upper(p: float, alpha: float) -> int:
    """The samples from which a quantile has an upper bound at all."""
    low, high = 1, MAX_SAMPLES
    while low < high:
        n = (low + high) // 2
        low, high = (n + 1, high) if _plausible(n, n, p, alpha) else (low, n)
    return low


def _edge(inside: int, end: int, n: int, p: float, alpha: float) -> int:
    """The last plausible count from `inside` towards `end`: plausible counts are an interval."""
    if _plausible(end, n, p, alpha):
        return end
    outside = end
    while abs(outside - inside) > 1:
        middle = (inside + outside) // 2
        inside, outside = (middle, outside) if _plausible(middle, n, p, alpha) else (inside, middle)
    return inside


def _plausible(k: int, n: int, p: float, alpha: float) -> bool:
    """True where the mixture's evidence against k of n is below 1 / alpha."""
    a, b = _PRIOR * p, _PRIOR * (1 - p)
    evidence = _log_beta(k + a, n - k + b) - _log_beta(a, b) - k * log(p) - (n - k) * log(1 - p)
    return evidence < log(1 / alpha)


def _log_beta(a: float, b: float) -> float:
    return lgamma(a) + lgamma(b) - lgamma(a + b)
