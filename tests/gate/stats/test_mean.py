"""The confidence sequence of a mean."""

from math import inf

import numpy as np
import pytest

from paceline.gate.stats.mean import mean_interval, radius, samples_for_radius, spread


def test_the_radius_is_the_published_one() -> None:
    """sigma sqrt((n + rho) / n^2 ln((n + rho) / (rho alpha^2))), 1.55 x that of a fixed size where tuned."""
    assert radius(200, 1.0, 0.05) == pytest.approx(1.55 * 1.96 / 200**0.5, rel=0.01)


def test_few_samples_bound_nothing() -> None:
    interval = mean_interval(np.zeros(29), 0.05)
    assert (interval.lower, interval.upper) == (-inf, inf)


def test_the_sample_size_for_a_radius_is_the_first_that_reaches_it() -> None:
    n = samples_for_radius(0.05, 0.3, 0.1)
    assert n is not None
    assert radius(n, 0.3, 0.1) <= 0.05 < radius(n - 1, 0.3, 0.1)
    assert samples_for_radius(0.0, 0.3, 0.1) is None


def test_samples_of_one_conversation_count_as_less_than_independent_ones() -> None:
    rng = np.random.default_rng(0)
    clusters = np.repeat(np.arange(20), 10)
    values = np.repeat(rng.normal(size=20), 10)
    assert spread(values, clusters) > 2.5 * spread(values)
    alone = rng.normal(size=200)
    assert spread(alone, np.arange(200)) == spread(alone)


def test_the_true_mean_stays_inside_while_somebody_watches() -> None:
    rng = np.random.default_rng(1)
    left = 0
    for _ in range(100):
        values = rng.normal(0.2, 0.3, 400)
        looks = (mean_interval(values[:n], 0.05) for n in range(30, 400, 10))
        left += any(not look.lower <= 0.2 <= look.upper for look in looks)
    assert left <= 5
