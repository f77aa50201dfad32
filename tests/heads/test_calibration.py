"""Confidence as a chance, and intervals of acceptance rates."""

import pytest

from paceline.heads.calibration import (
    Calibration,
    calibration_error,
    identity_calibration,
    logit,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("share", "n", "low", "high"),
    [
        (0.5, 10, 0.2366, 0.7634),
        (0.0, 10, 0.0, 0.2775),
        (1.0, 10, 0.7225, 1.0),
        (0.81, 100, 0.7222, 0.8749),
        (0.77, 100_000, 0.7674, 0.7726),
    ],
)
def test_intervals_are_wilsons(share: float, n: int, low: float, high: float) -> None:
    assert wilson_interval(share, n) == pytest.approx((low, high), abs=5e-5)
    for p in wilson_interval(share, n):  # the bounds of the score test
        assert abs(share - p) == pytest.approx(1.959964 * (p * (1 - p) / n) ** 0.5, abs=1e-7)


def test_nothing_measured_says_nothing() -> None:
    assert wilson_interval(0.0, 0) == (0.0, 1.0)


def test_the_identity_gives_the_chance_that_the_head_gave() -> None:
    for chance in (0.01, 0.5, 0.99):
        assert identity_calibration(3).chance(2, logit(chance)) == pytest.approx(chance)
    assert Calibration((2.0,), (0.0,)).chance(0, logit(0.9)) > 0.95
    assert Calibration((1.0,), (-1000.0,)).chance(0, 0.0) == pytest.approx(0.0)


def test_the_calibration_error_is_the_distance_between_prediction_and_outcome() -> None:
    assert calibration_error([0.75] * 4, [True, True, True, False]) == pytest.approx(0.0)
    assert calibration_error([0.75] * 4, [False] * 4) == pytest.approx(0.75)
    assert calibration_error([], []) == 0.0
