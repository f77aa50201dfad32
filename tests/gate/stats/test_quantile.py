"""Quantile bounds by order statistics."""

from math import inf

import numpy as np

from paceline.gate.stats.quantile import quantile_interval, samples_for_upper


def test_the_p99_has_no_upper_bound_before_hundreds_of_samples() -> None:
    least = samples_for_upper(0.99, 0.05)
    assert 299 < least < 500  # 299 at a fixed size
    values = np.arange(1.0, least + 1)
    assert quantile_interval(values, 0.99, 0.05).upper == least
    assert quantile_interval(values[:-1], 0.99, 0.05).upper == inf


def test_the_true_quantile_stays_inside_while_somebody_watches() -> None:
    rng = np.random.default_rng(3)
    left = 0
    for _ in range(100):
        values = rng.random(600)
        looks = (quantile_interval(values[:n], 0.9, 0.05) for n in range(10, 600, 20))
        left += any(not look.lower <= 0.9 <= look.upper for look in looks)
    assert left <= 5


def test_bounds_are_samples_around_the_quantile() -> None:
    values = np.random.default_rng(4).permutation(1000) / 1000
    interval = quantile_interval(values, 0.5, 0.05)
    assert 0.4 < interval.lower < 0.5 < interval.upper < 0.6
