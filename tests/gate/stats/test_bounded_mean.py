"""The betting confidence sequence of a bounded mean."""

from math import log

import numpy as np
import pytest

from paceline.gate.stats.bounded_mean import (
    Counts,
    bounded_mean_interval,
    log_wealth_below,
    running_log_wealth_below,
    samples_for_upper_bound,
    upper_bound,
)


def test_no_difference_in_n_pairs_bounds_it_by_less_than_six_over_n() -> None:
    """A fixed size gives 3 / n; watching costs less than twice that."""
    for n in (100, 300, 1000):
        assert 3 / n < upper_bound(Counts(np.zeros(1), np.array([float(n)])), 0.05) < 6 / n


def test_wealth_against_the_true_mean_does_not_grow() -> None:
    """A bet on a fair game: its expectation is 1, by enumeration of all sequences of three values."""
    values, chances = np.array([-1.0, 0.0, 1.0]), np.array([0.2, 0.5, 0.3])
    expected = sum(
        chances[i] * chances[j] * np.exp(log_wealth_below(Counts.of(values[[i, j]]), 0.1))
        for i in range(3)
        for j in range(3)
    )
    assert expected == pytest.approx(1.0)


def test_the_running_wealth_is_the_wealth_after_each_sample() -> None:
    samples = np.array([0.0, 1.0, 0.0, -1.0, 0.0])
    running = running_log_wealth_below(samples, 0.02)
    single = [log_wealth_below(Counts.of(samples[: n + 1]), 0.02) for n in range(5)]
    assert running == pytest.approx(single)


def test_a_true_harm_of_the_margin_is_rarely_proven_harmless() -> None:
    rng = np.random.default_rng(2)
    harm = (rng.random((400, 1500)) < 0.02).astype(float)
    proven = (running_log_wealth_below(harm, 0.02) >= log(20)).any(axis=-1).mean()
    assert proven <= 0.05


def test_the_interval_has_the_mean_inside_and_is_symmetric() -> None:
    counts = Counts.of(np.array([-1.0] * 5 + [0.0] * 190 + [1.0] * 5))
    interval = bounded_mean_interval(counts, 0.05)
    assert interval.lower == pytest.approx(-interval.upper)
    assert interval.lower < counts.mean < interval.upper


def test_the_sample_size_is_the_first_that_proves_it() -> None:
    n = samples_for_upper_bound(Counts.of(np.zeros(0)), 0.02, 0.05)
    assert n is not None
    assert upper_bound(Counts(np.zeros(1), np.array([float(n)])), 0.05) < 0.02
    assert upper_bound(Counts(np.zeros(1), np.array([n - 1.0])), 0.05) > 0.0199


def test_a_mean_beyond_the_margin_needs_more_than_any_number_of_samples() -> None:
    assert samples_for_upper_bound(Counts.of(np.array([0.0, 1.0])), 0.02, 0.05) is None
