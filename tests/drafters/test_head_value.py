"""A trained head beside a drafter that has a draft: asked where its gain exceeds its cost, and only there."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.config import Accept, SpecConfig
from paceline.drafters.drafter_list import DrafterList
from paceline.engine.control import Rate
from paceline.types import Ask, Draft, Drafter, Round, Seq

PASS_US = 1000
LIST = ("a", "b")


class Clock:
    """In nanoseconds; moves when a drafter works."""

    now = 1

    def __call__(self) -> int:
        return self.now


class Says(Drafter):
    def __init__(
        self, clock: Clock, name: str, scores: tuple[float, ...], cost_us: int = 1, head: bool = False
    ):
        self.clock, self.name, self.scores, self.cost_us = clock, name, scores, cost_us
        self.taps = (1,) if head else ()
        self.asked: list[Ask] = []
        self.has_read = True

    def ready(self, seq: Seq) -> bool:
        return self.has_read

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        self.clock.now += 1000 * self.cost_us
        self.asked += asks
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: Ask) -> Draft:
        scores = self.scores[len(ask.after) if self.taps else 0 :][: ask.budget]
        return Draft(tuple(range(len(scores))), None, (self.name,) * len(scores), scores)


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Lists:
    """A list of drafters and the controller that learns about it, as the engine has them."""

    def __init__(self, *drafters: Says) -> None:
        self.rate = Rate()
        self.drafters = DrafterList(drafters, self.rate, timer=drafters[0].clock)

    def rounds(self, count: int, right: float = 1.0, accept: Accept = "match", budget: int = 8) -> Draft:
        """The last of so many drafts; of each, the first tokens are accepted, up to that share."""
        seq = Seq("s", [1], 0, spec=SpecConfig(LIST, accept=accept))
        for _ in range(count):
            self.rate.plan([seq], 1)
            (draft,) = self.drafters.draft([Ask(seq, budget)])
            self.rate.trim([seq], [draft], 1)
            path = tuple(range(int(right * len(draft))))
            by_drafter = {name: ns // 1000 for name, ns in self.drafters.draft_ns.items()}
            us, rows, tokens = sum(by_drafter.values()), 1 + len(draft), (*path, 999)
            r = Round("s", 1, LIST, draft, path, tokens, budget, 1, rows, us, PASS_US, draft_us_by=by_drafter)
            asked = tuple(self.drafters.asked.get("s", ()))
            self.rate.learn([replace(r, uncut=draft, asked=asked)])
        return draft


def test_an_unsure_draft_is_replaced_by_a_better_one(clock: Clock) -> None:
    first, head = Says(clock, "a", (0.3,)), Says(clock, "b", (0.9,) * 4, 100, head=True)
    assert Lists(first, head).rounds(1).sources == ("b",) * 4


def test_a_head_that_has_nothing_to_say_replaces_nothing(clock: Clock) -> None:
    """As one does that has read no hidden states yet."""
    first, head = Says(clock, "a", (0.3,)), Says(clock, "b", (), 100, head=True)
    assert Lists(first, head).rounds(1).sources == ("a",)
    assert head.asked


def test_a_sure_and_long_draft_stays(clock: Clock) -> None:
    first, head = Says(clock, "a", (0.95,) * 8), Says(clock, "b", (0.9,) * 8, 100, head=True)
    lists = Lists(first, head)
    lists.rounds(8)  # some are short, to learn what they cost
    head.asked.clear()
    assert lists.rounds(20).sources == ("a",) * 8
    assert not head.asked


def test_a_short_draft_is_continued(clock: Clock) -> None:
    first, head = Says(clock, "a", (0.98,)), Says(clock, "b", (0.9,) * 6, 100, head=True)
    draft = Lists(first, head).rounds(1)
    assert draft.sources == ("a", *("b",) * 5)
    assert head.asked[-1].after == (0,)
    assert head.asked[-1].budget == 7


@pytest.mark.parametrize(("cost_us", "asked"), [(100, True), (5000, False)])
def test_its_cost_against_a_pass_decides(clock: Clock, cost_us: int, asked: bool) -> None:
    first, head = Says(clock, "a", (0.6,)), Says(clock, "b", (0.9,) * 4, cost_us, head=True)
    lists = Lists(first, head)
    lists.rounds(3)
    head.asked.clear()
    lists.rounds(3)
    assert bool(head.asked) == asked


def test_a_drafter_that_claims_too_much_is_replaced(clock: Clock) -> None:
    first, head = Says(clock, "a", (0.95,) * 8), Says(clock, "b", (0.5,) * 4, 50, head=True)
    lists = Lists(first, head)
    assert lists.rounds(1).sources[0] == "a"
    assert not head.asked
    lists.rounds(60, right=0.0)
    assert len(head.asked) > 10


def test_a_sampled_draft_stays(clock: Clock) -> None:
    first, head = Says(clock, "a", (0.1,)), Says(clock, "b", (0.9,) * 4, 1, head=True)
    assert Lists(first, head).rounds(2, accept="residual").sources == ("a",)
    assert not head.asked


def test_a_continued_draft_stays_within_the_budget(clock: Clock) -> None:
    first, head = Says(clock, "a", (0.99,) * 3), Says(clock, "b", (0.9,) * 8, 1, head=True)
    assert len(Lists(first, head).rounds(3, budget=3)) == 3
    assert len(Lists(first, head).rounds(3, budget=4)) == 4


@pytest.mark.parametrize(("cost_us", "asked"), [(100, 64), (5000, 0)])
def test_a_head_that_does_not_pay_is_asked_as_seldom_as_it_is_dear(
    clock: Clock, cost_us: int, asked: int
) -> None:
    first, head = Says(clock, "a", ()), Says(clock, "b", (0.6,) * 4, cost_us, head=True)
    lists = Lists(first, head)
    lists.rounds(30, right=0.5)
    head.asked.clear()
    lists.rounds(64, right=0.5)
    assert asked <= len(head.asked) <= 2 * asked


@pytest.mark.parametrize("scores", [(), (0.3,)])
def test_a_head_that_has_not_read_the_last_pass_is_not_asked(clock: Clock, scores: tuple[float, ...]) -> None:
    """Neither where no other has a draft nor beside one; and nothing is learned about it."""
    first, head = Says(clock, "a", scores), Says(clock, "b", (0.9,) * 4, 100, head=True)
    lists = Lists(first, head)
    head.has_read = False
    assert lists.rounds(8).sources == ("a",) * len(scores)
    assert not head.asked
    assert "b" not in lists.rate.estimates.draft_us
    head.has_read = True
    assert "b" in lists.rounds(1).sources
