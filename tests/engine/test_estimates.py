"""The gain of drafts over long times, what a file keeps of it, and what drafters add to passes."""

from random import Random

import pytest

from paceline.engine.estimates import CHANCES, Gain, Slowdown, SlowdownFit


def seldom() -> Gain:
    """Of a route whose drafter finds something at one of three asks."""
    route = Gain()
    for _ in range(60):
        for chances in ((), (), (0.95,) * 6):
            route.learn(chances)
    return route


@pytest.mark.parametrize("of_text", [False, True])
def test_a_drafter_that_finds_nothing_for_very_long_still_has_a_mean_length(of_text: bool) -> None:
    route = seldom()
    learner = Gain(route) if of_text else route
    before = route.nodes_above(0.2)
    for _ in range(30_000):
        learner.learn(())
    assert route(0.2) < 0.01
    assert route.nodes_above(0.2) == pytest.approx(before)
    assert Gain.of_state(route.state()).nodes_above(0.2) == pytest.approx(before)


def test_a_file_keeps_how_many_drafts_had_nodes() -> None:
    route = seldom()
    again = Gain.of_state(route.state())
    assert again.nodes_above(0.2) == pytest.approx(route.nodes_above(0.2))
    assert again.nodes_above(0.2) > 5
    assert again(0.2) == pytest.approx(route(0.2))


def test_a_state_has_one_of_two_lengths() -> None:
    """Those of before 0.2 do not tell drafts without nodes: all of them count as made."""
    state, bins = seldom().state(), len(CHANCES) + 1
    assert len(state) == 2 + 2 * bins
    older = Gain.of_state(state[:-1])
    assert older.nodes_above(0) == pytest.approx(sum(state[1 : 1 + bins]) / state[0])
    for wrong in (state[:-2], [*state, 1.0], [*state[:-1], 0.0], []):
        with pytest.raises(ValueError, match="out of its range"):
            Gain.of_state(wrong)


def fitted(
    ask_us: float, read_us: float, row_us: float, always: bool = False, passes: int = 4000
) -> Slowdown:
    """Of passes of 2000 us and so much for each row and for what a head does; drafts add rows."""
    slowdowns: dict[str, Slowdown] = {}
    fit, random, reads = SlowdownFit(slowdowns), Random(0), False
    for number in range(passes):
        if number % 20 == 0:
            reads = always or random.random() < 0.5
        asks = reads and random.random() < 0.6
        rows = 1 + (random.randrange(4) if asks or random.random() < 0.5 else 0)
        drift = 1 + 0.1 * (number // 500 % 2)  # of the machine
        us = drift * (2000 + row_us * rows + ask_us * asks + read_us * reads) * random.uniform(0.9, 1.1)
        fit.learn((1, rows), us / 2000, us, {"head": (int(asks), int(reads))} if reads else {})
    return slowdowns.get("head", Slowdown())


def test_what_an_ask_and_a_reading_add_is_told_from_the_price_of_rows() -> None:
    both = fitted(300, 150, row_us=100)
    assert both.ask_us == pytest.approx(300, abs=60)
    assert both.read_us == pytest.approx(150, abs=60)
    neither = fitted(0, 0, row_us=300)
    assert max(neither.ask_us, neither.read_us) < 40


def test_what_is_in_all_passes_is_no_slowdown() -> None:
    """Nothing tells it from the pass, and decisions on single passes need not know."""
    found = fitted(0, 400, row_us=100, always=True)
    assert max(found.ask_us, found.read_us) < 40


def test_a_head_that_is_forgotten_is_fitted_anew() -> None:
    slowdowns: dict[str, Slowdown] = {}
    fit = SlowdownFit(slowdowns)
    for number in range(200):
        asked = number % 2
        fit.learn((1, 1), 1 + 0.1 * asked, 2000 + 200 * asked, {"head": (asked, asked)} if asked else {})
    assert slowdowns["head"](1, 1) > 100
    del slowdowns["head"]
    fit.forget("head")
    fit.learn((1, 1), 1.0, 2000, {})
    assert not slowdowns


def test_one_pass_that_was_held_up_says_little() -> None:
    slowdowns: dict[str, Slowdown] = {}
    fit = SlowdownFit(slowdowns)
    for _ in range(100):
        fit.learn((1, 1), 1.0, 2000, {})
    fit.learn((1, 1), 50.0, 100_000, {"head": (1, 1)})
    assert slowdowns["head"](1, 1) < 40


def test_a_slowdown_is_kept_in_a_file() -> None:
    slowdown = Slowdown(ask_us=120.0, read_us=30.0, observed=500.0)
    again = Slowdown.of_state(slowdown.state())
    assert (again.ask_us, again.read_us, again.observed) == (120.0, 30.0, 500.0)
    for wrong in ([1.0], [1.0, -1.0, 2.0], [1.0, 2.0, 3.0, 4.0]):
        with pytest.raises(ValueError, match="out of its range"):
            Slowdown.of_state(wrong)
