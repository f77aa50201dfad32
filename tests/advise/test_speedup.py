"""The formula of speculative decoding, against enumeration, simulation and known figures."""

import json
import math
import random
from itertools import product

import pytest

from paceline.advise.speedup import (
    MAX_MS,
    MIN_MS,
    Costs,
    DraftCost,
    Roofline,
    best_length,
    break_even,
    crossover_rows,
    estimate,
    expected_tokens,
    tokens_by_length,
)
from paceline.errors import SettingError


def enumerated(acceptance: float, length: int) -> float:
    """Tokens per pass, over every outcome of every position."""
    total = 0.0
    for outcome in product((True, False), repeat=length):
        chance = 1.0
        for accepted in outcome:
            chance *= acceptance if accepted else 1 - acceptance
        first_rejected = outcome.index(False) if False in outcome else length
        total += chance * (first_rejected + 1)
    return total


@pytest.mark.parametrize("length", [0, 1, 5, 8])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.75, 1.0])
def test_expected_tokens_are_those_of_the_enumeration(acceptance: float, length: int) -> None:
    assert expected_tokens(acceptance, length) == pytest.approx(enumerated(acceptance, length))


def test_expected_tokens_have_the_closed_form() -> None:
    assert expected_tokens(0.75, 5) == pytest.approx((1 - 0.75**6) / (1 - 0.75))


def test_positions_may_differ_in_acceptance() -> None:
    assert tokens_by_length([0.5, 0.8]) == pytest.approx([1, 1.5, 1.9])


def test_the_textbook_example_is_3_and_the_exact_figure_2_63() -> None:
    made = estimate(0.75, 5, Costs(Roofline(100), DraftCost(5)))
    assert made.textbook.accepted == pytest.approx(3.75)
    assert made.textbook.speedup == pytest.approx(3.0)
    assert made.chosen.tokens_per_pass == pytest.approx(3.29, abs=0.005)
    assert made.accepted == pytest.approx(2.29, abs=0.005)
    assert made.chosen.speedup == pytest.approx(2.63, abs=0.005)
    assert made.best.draft_length == 7


def test_a_simulated_run_takes_the_estimated_time() -> None:
    rng, costs = random.Random(0), Costs(Roofline(10, 0.5), DraftCost(0.2, 1.0))
    tokens, spent = 0, 0.0
    for _ in range(20_000):
        accepted = next((i for i in range(4) if rng.random() > 0.7), 4)
        tokens, spent = tokens + accepted + 1, spent + costs.round_ms(4)
    assert estimate(0.7, 4, costs).chosen.speedup == pytest.approx(tokens * 10 / spent, rel=0.02)


def test_the_best_length_is_found_behind_a_step_of_the_cost() -> None:
    """A kernel that pads to 8 rows makes lengths 1 to 7 cost the same."""
    costs = Costs(lambda rows, _: 10.0 if rows == 1 else 25.0 if rows <= 8 else 80.0)
    assert best_length(tokens_by_length([0.9] * 12), costs) == 7
    assert costs.speedup(expected_tokens(0.9, 1), 1) < 1


def test_at_the_break_even_acceptance_nothing_is_gained() -> None:
    costs = Costs(Roofline(10, 2), DraftCost(1))
    acceptance = break_even(costs, 3)
    assert acceptance is not None
    assert costs.speedup(expected_tokens(acceptance, 3), 3) == pytest.approx(1)


def test_drafts_that_cost_more_than_they_can_bring_have_no_break_even() -> None:
    assert break_even(Costs(Roofline(10), DraftCost(20)), 2) is None


@pytest.mark.parametrize(
    ("row_ms", "compute_ms", "rows"),
    [(0, 5, 20), (1, 2, 99), (0, 0, None), (10, 0, None), (3, 2, None), (0, 200, 1)],
)
def test_the_crossover_is_where_the_pass_begins_to_follow_its_arithmetic(
    row_ms: float, compute_ms: float, rows: float | None
) -> None:
    target = Roofline(100, row_ms, compute_ms)
    assert crossover_rows(target) == (None if rows is None else pytest.approx(rows))
    if rows is not None and rows > 1:
        assert target(int(rows) - 1) > compute_ms * (rows - 1)
        assert target(int(rows) + 1) == compute_ms * (rows + 1)


def test_a_measured_curve_crosses_over_where_its_rows_take_as_long_as_the_weights() -> None:
    assert crossover_rows(lambda rows, _: max(100.0, 5.0 * rows)) == pytest.approx(20)
    assert crossover_rows(lambda rows, _: 100.0) is None
    assert estimate(0.5, 4, Costs(Roofline(100, compute_ms=5))).crossover_batch == pytest.approx(4)


def test_drafts_may_have_a_measured_time_for_each_length() -> None:
    draft = DraftCost(curve=((2, 6.0), (4, 8.0), (8, 20.0)))
    assert [draft(k) for k in (0, 1, 2, 3, 4, 6, 8, 10)] == [0, 6, 6, 7, 8, 14, 20, 26]
    assert DraftCost(curve=((4, 8.0), (8, 20.0)))(1) == 8
    falling = DraftCost(curve=((1, 20.0), (3, 10.0)))
    assert [falling(k) for k in (2, 3, 9)] == [15, 10, 10]
    made = estimate(0.75, 5, Costs(Roofline(100), draft))
    assert [at.draft_ms for at in made.lengths[:6]] == [0, 6, 6, 7, 8, 11]


@pytest.mark.parametrize(
    "curve",
    [
        ((1, 1.0),),
        ((2, 1.0), (1, 2.0)),
        ((1, 1.0), (1, 2.0)),
        ((0, 1.0), (1, 2.0)),
        ((1, 1.0), (65, 2.0)),
        ((1, -1.0), (2, 1.0)),
        ((1, 1.0), (2, math.inf)),
        ((1, math.nan), (2, 1.0)),
    ],
)
def test_a_curve_of_drafts_rises_and_has_usable_times(curve: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(SettingError):
        DraftCost(curve=curve)


def test_drafts_of_more_sequences_may_cost_more() -> None:
    costs = Costs(Roofline(100), DraftCost(5, draft_row_ms=1), batch=3)
    assert costs.draft_ms(4) == 4 * 5 + 4 * 2 * 1
    made = estimate(0.75, 5, costs)
    speedups = [at.chosen_speedup for at in made.batches]
    assert speedups == sorted(speedups, reverse=True)
    assert next(at for at in made.batches if at.batch == 3).chosen_speedup == made.chosen.speedup


def test_each_sequence_of_a_pass_brings_its_own_context() -> None:
    """As in a measured curve: what a context adds is added for each, with drafts and without."""
    costs = Costs(lambda rows, sequences: rows + 10.0 * sequences, batch=4)
    assert (costs.verify_ms(0), costs.verify_ms(2)) == (44, 52)
    assert costs.speedup(3, 2) == pytest.approx(3 * 44 / 52)
    made = estimate(1, 2, costs)
    assert [at.chosen_speedup for at in made.batches[:3]] == [pytest.approx(3 * 11 / 13)] * 3
    assert made.textbook.speedup == 2


@pytest.mark.parametrize("extreme", [MIN_MS, MAX_MS])
@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_every_figure_is_finite(acceptance: float, extreme: float) -> None:
    for target in (Roofline(extreme, MAX_MS, MAX_MS), Roofline(extreme)):
        for draft in (DraftCost(), DraftCost(MAX_MS, MAX_MS, MAX_MS)):
            made = estimate(acceptance, 64, Costs(target, draft, 4096))
            json.dumps(made.as_dict(), allow_nan=False)


def test_the_longest_draft_is_never_below_the_chosen_one() -> None:
    assert len(estimate(0.5, 20, Costs(Roofline(100))).lengths) == 21
    assert len(estimate(0.5, 5, Costs(Roofline(100)), 5).lengths) == 6
    with pytest.raises(SettingError, match="max_draft=4"):
        estimate(0.5, 5, Costs(Roofline(100)), 4)


def test_speculation_fades_out_as_the_batch_grows() -> None:
    made = estimate(0.75, 5, Costs(Roofline(100, compute_ms=6), DraftCost(5)))
    lengths = [at.draft_length for at in made.batches]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 7
    assert lengths[-1] == 0
    assert made.batches[-1].speedup == 1


@pytest.mark.parametrize(("acceptance", "length"), [(1.5, 5), (-0.1, 5), (0.5, 0), (0.5, 65)])
def test_what_is_out_of_bounds_is_refused(acceptance: float, length: int) -> None:
    with pytest.raises(SettingError):
        estimate(acceptance, length, Costs(Roofline(100)))


def test_costs_below_nothing_are_refused() -> None:
    for wrong in (0, math.inf, math.nan):
        with pytest.raises(SettingError):
            Roofline(wrong)
    for wrong in (-1, math.inf, math.nan):
        with pytest.raises(SettingError):
            DraftCost(wrong)
    with pytest.raises(SettingError):
        Costs(Roofline(1), batch=0)
