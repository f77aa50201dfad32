"""A trained head beside a drafter that has a guess: asked where that is worth its time, and only there."""

from collections.abc import Sequence

import pytest
import torch

from paceline.config import Accept, SpecConfig
from paceline.drafters.drafter_list import DrafterList
from paceline.drafters.support import worth
from paceline.types import Ask, Draft, Drafter, Scores, Seq, Verdict

PASS, NOTHING = 1000, Scores(torch.empty(0, 0), ())


class Clock:
    """Moves when somebody works."""

    now = 1

    def __call__(self) -> int:
        return self.now


class Says(Drafter):
    def __init__(
        self, clock: Clock, name: str, scores: tuple[float, ...], costs: int = 1, head: bool = False
    ):
        self.clock, self.name, self.scores, self.costs = clock, name, scores, costs
        self.taps = (1,) if head else ()
        self.asked: list[Ask] = []

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        self.clock.now += self.costs
        self.asked += asks
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: Ask) -> Draft:
        scores = self.scores[len(ask.after) if self.taps else 0 :][: ask.budget]
        return Draft(tuple(range(len(scores))), None, (self.name,) * len(scores), scores)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in ("support.worth", "drafter_list"):
        monkeypatch.setattr(f"paceline.drafters.{module}.perf_counter_ns", made)
    return made


def rounds(
    relay: DrafterList,
    clock: Clock,
    count: int,
    right: float = 1.0,
    accept: Accept = "match",
    budget: int = 8,
) -> Draft:
    """The last of so many drafts; of each, the first guesses come true, up to that share."""
    seq = Seq("s", [1], 1, spec=SpecConfig(("a", "b"), accept=accept))
    for _ in range(count):
        (draft,) = relay.draft([Ask(seq, budget)])
        clock.now += PASS
        relay.observe([seq], [Verdict(tuple(range(int(right * len(draft)))), 0, draft)], NOTHING)
    return draft


def test_an_unsure_guess_gives_way_to_a_better_one(clock: Clock) -> None:
    first, head = Says(clock, "a", (0.3,)), Says(clock, "b", (0.9,) * 4, 100, head=True)
    assert rounds(DrafterList([first, head]), clock, 1).sources == ("b",) * 4


def test_a_sure_and_long_guess_is_not_questioned(clock: Clock) -> None:
    first, head = Says(clock, "a", (0.95,) * 8), Says(clock, "b", (0.9,) * 8, 100, head=True)
    assert rounds(DrafterList([first, head]), clock, 20).sources == ("a",) * 8
    assert not head.asked


def test_a_short_guess_is_gone_on_with(clock: Clock) -> None:
    first, head = Says(clock, "a", (0.98,)), Says(clock, "b", (0.9,) * 6, 100, head=True)
    draft = rounds(DrafterList([first, head]), clock, 1)
    assert draft.sources == ("a", *("b",) * 5)
    assert head.asked[-1].after == (0,)
    assert head.asked[-1].budget == 7


@pytest.mark.parametrize(("costs", "asked"), [(100, True), (5000, False)])
def test_what_it_costs_beside_a_pass_decides(clock: Clock, costs: int, asked: bool) -> None:
    first, head = Says(clock, "a", (0.6,)), Says(clock, "b", (0.9,) * 4, costs, head=True)
    relay = DrafterList([first, head])
    rounds(relay, clock, 3)
    head.asked.clear()
    rounds(relay, clock, 3)
    assert bool(head.asked) == asked


def test_a_boaster_loses_its_place(clock: Clock) -> None:
    first, head = Says(clock, "a", (0.95,) * 8), Says(clock, "b", (0.5,) * 4, 50, head=True)
    relay = DrafterList([first, head])
    assert rounds(relay, clock, 1).sources[0] == "a"
    assert not head.asked
    rounds(relay, clock, 60, right=0.0)
    assert len(head.asked) > 10


def test_what_was_drawn_or_is_a_tree_stays(clock: Clock) -> None:
    first, head = Says(clock, "a", (0.1,)), Says(clock, "b", (0.9,) * 4, 1, head=True)
    assert rounds(DrafterList([first, head]), clock, 2, accept="residual").sources == ("a",)
    assert not head.asked


def test_there_is_room_for_no_more_than_was_asked_for(clock: Clock) -> None:
    first, head = Says(clock, "a", (0.99,) * 3), Says(clock, "b", (0.9,) * 8, 1, head=True)
    assert len(rounds(DrafterList([first, head]), clock, 3, budget=3)) == 3
    assert len(rounds(DrafterList([first, head]), clock, 3, budget=4)) == 4


def test_what_a_chain_is_expected_to_bring() -> None:
    known = worth.Worth()
    draft = Draft((1, 2, 3), None, ("a",) * 3, (0.5, 0.5, 0.01))
    assert known.expects(draft) == pytest.approx((0.75 - 2 * worth.ROW, 0.0025))


@pytest.mark.parametrize(("costs", "asked"), [(100, 64), (5000, 2)])
def test_a_head_that_does_not_pay_is_passed_over_but_for_a_try(clock: Clock, costs: int, asked: int) -> None:
    first, head = Says(clock, "a", ()), Says(clock, "b", (0.6,) * 4, costs, head=True)
    relay = DrafterList([first, head])
    rounds(relay, clock, 30, right=0.5)
    head.asked.clear()
    rounds(relay, clock, 64, right=0.5)
    assert asked <= len(head.asked) <= 2 * asked
