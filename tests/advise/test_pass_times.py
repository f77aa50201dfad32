"""Times of passes: relative to passes of one row right beside them, since a machine changes its speed."""

from dataclasses import replace

import pytest

from paceline.advise.pass_times import PassTimes, TimedPass, corrected, decoding_passes
from support.traces import a_round


def flat(rows: int, context: int) -> float:
    return 10.0


def passes(rows: int, ms: float, count: int = 7) -> list[TimedPass]:
    return [TimedPass(rows, 100, ms)] * count


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
    assert (one.rows, one.ms) == (5, 40.0)


def curve(rows: int, context: int) -> float:
    return 9.0 + rows + context * (2 + rows) / 100


def test_a_pass_of_one_sequence_costs_what_the_curve_says() -> None:
    times = PassTimes(curve)
    assert times([(1, 100)]) == curve(1, 100)
    assert times([(7, 250)]) == pytest.approx(curve(7, 250))


def test_sequences_share_the_weights_and_not_their_contexts() -> None:
    """As if all rows were one sequence's, plus what the context of each adds for its rows."""
    times = PassTimes(curve)
    assert times([(1, 100), (1, 300), (1, 0), (1, 0)]) == pytest.approx(9 + 4 + 3 + 9)
    assert times([(4, 100), (1, 300)]) == pytest.approx(9 + 5 + 6 + 9)
    assert times([(1, 100)] * 4) > curve(4, 100)


def test_rows_of_prompts_add_their_own_time() -> None:
    times = PassTimes(flat, prompt_row_ms=0.5)
    assert times([], 40) == 10 + 20
    assert times([(1, 100), (1, 100)], 40) == 10 + 20
    assert replace(times, beside_ms=3.0)([(1, 100)], 40) == 10 + 20 + 3
    assert times.row_ms(100) == 0.5
    assert PassTimes(curve).row_ms(0) == 1


def test_a_curve_that_falls_where_it_is_extrapolated_makes_no_pass_cheaper_than_a_plain_one() -> None:
    times = PassTimes(lambda rows, context: 20.0 - rows)
    assert times([(5, 0), (4, 0)]) == times([(1, 0), (1, 0)]) == 18
