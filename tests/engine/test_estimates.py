"""The gain of drafts over long times, and what a file keeps of it."""

import pytest

from paceline.engine.estimates import CHANCES, Gain


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
