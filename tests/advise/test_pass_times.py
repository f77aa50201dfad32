"""Times of passes: relative to passes of one row right beside them, since a machine changes its speed."""

from collections.abc import Sequence

import pytest

from paceline.advise.pass_times import PassTimes, TimedPass, beside, corrected, decoding_passes
from support.traces import a_round


def flat(rows: int, context: int) -> float:
    return 10.0


def passes(rows: int, ms: float, count: int = 7, sequences: int = 1) -> list[TimedPass]:
    return [TimedPass(rows, 100, ms, sequences)] * count


def test_the_cost_curve_is_corrected_by_what_passes_took() -> None:
    real = corrected(flat, [[*passes(1, 30.0), *passes(5, 40.0), *passes(9, 900.0, 3)]])
    assert [real(rows, 100) for rows in (1, 3, 5, 16)] == pytest.approx([30, 35, 40, 40])
    rising = corrected(flat, [[*passes(1, 30.0), *passes(5, 20.0)]])
    assert rising(5, 100) == 30
    assert corrected(flat, [passes(9, 900.0, 3)])(9, 100) == 10


def test_an_output_counts_relative_to_its_own_passes_of_one_row() -> None:
    """The machine was twice as slow while most of the drafts were verified."""
    fast = [[*passes(1, 20.0), *passes(5, 25.0, 1)]] * 3
    slow = [[*passes(1, 40.0), *passes(5, 50.0)]] * 2
    real = corrected(flat, [*fast, *slow])
    assert [real(rows, 100) for rows in (1, 5)] == pytest.approx([20, 25])
    few = corrected(flat, [[*passes(1, 20.0), *passes(5, 25.0)], passes(5, 50.0, 20)])
    assert few(5, 100) == 50  # without passes of one row there is nothing to relate it to


def test_passes_of_prompts_of_others_and_of_first_tokens_are_left_out() -> None:
    rounds = [
        a_round("r", 0, rows=5, drafted=4, target_us=1_000),  # gives the first token
        a_round("r", 1, rows=5, drafted=4, target_us=40_000),
        a_round("r", 2, rows=200, drafted=4, target_us=900_000),
        a_round("r", 3, rows=5, drafted=4, batch=2, target_us=80_000),
        a_round("r", 4, rows=5, drafted=4, target_us=0),
    ]
    (one,) = decoding_passes(rounds)
    assert (one.rows, one.ms, one.sequences) == (5, 40.0, 1)


def curve(rows: int, context: int) -> float:
    return 9.0 + rows


def together(counts: Sequence[int], extra_ms: float, speed: float = 1.0) -> list[TimedPass]:
    return [
        TimedPass(n, 100, speed * (curve(n, 100) + (n - 1) * extra_ms), n) for n in counts for _ in range(5)
    ]


def test_sequences_in_a_pass_take_more_than_their_rows() -> None:
    found = beside(curve, passes(1, 10.0), together((2, 4), 3.0))
    assert found == [(2, pytest.approx(0.3)), (4, pytest.approx(0.9))]
    times = PassTimes(curve, beside=found)
    assert times(1, 1, 0, 100) == 10
    assert times(4, 4, 0, 100) == pytest.approx(13 + 9)
    assert times(3, 3, 0, 100) == pytest.approx(12 + 6)
    assert times(12, 4, 0, 100) == pytest.approx(21 + 9)  # drafts add their rows
    assert times(16, 16, 0, 100) == pytest.approx(25 + 45)  # beyond what was measured
    assert PassTimes(curve)(16, 16, 0, 100) == 25


def test_the_speed_of_the_machine_cancels_out() -> None:
    slow = beside(curve, passes(1, 20.0), together((4,), 3.0, speed=2.0))
    assert slow == [(4, pytest.approx(0.9))]
    assert beside(curve, passes(1, 20.0, 2), together((4,), 3.0)) == []
    assert beside(curve, passes(1, 10.0), passes(4, 50.0, 2, sequences=4)) == []
    assert beside(curve, passes(1, 10.0), together((4,), -1.0)) == [(4, 0.0)]  # noise


def test_rows_of_prompts_add_their_own_time() -> None:
    times = PassTimes(curve, prompt_row_ms=0.5)
    assert times(0, 0, 40, 100) == 10 + 20
    assert times(2, 2, 40, 100) == 11 + 20
    assert times.row_ms(100) == 0.5
    assert PassTimes(curve)(2, 2, 40, 100) == curve(42, 100)
    assert PassTimes(curve).row_ms(100) == 1


def test_a_curve_that_falls_where_it_is_extrapolated_makes_no_pass_cheaper_than_a_plain_one() -> None:
    times = PassTimes(lambda rows, context: 20.0 - rows)
    assert times(9, 2, 0, 100) == times(2, 2, 0, 100) == 18
