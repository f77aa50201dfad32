from collections.abc import Sequence

import pytest

from paceline.advise.replay import ReplayStats, follow, replay
from paceline.drafters.none import NoDrafter
from paceline.types import NO_DRAFT, Ask, Draft, Drafter, Scores, Seq, Verdict

OUTPUT = [5, 6, 7, 8, 9]


class Scripted(Drafter):
    """Gives the drafts it was made with, and writes down what it is told."""

    name = "scripted"

    def __init__(self, *drafts: Draft) -> None:
        self.drafts = list(drafts)
        self.asked: list[list[int]] = []
        self.told: list[Verdict] = []
        self.heard: list[str] = []

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        self.asked.append(list(asks[0].seq.tokens))
        return [self.drafts.pop(0) if self.drafts else NO_DRAFT]

    def begin(self, seq: Seq) -> None:
        self.heard.append(f"begin {seq.tenant} {list(seq.prediction)}")

    def observe(self, seqs: Sequence[Seq], verdicts: Sequence[Verdict], scores: Scores) -> None:
        self.told += verdicts

    def end(self, seq: Seq) -> None:
        self.heard.append(f"end {seq.output}")


def test_a_drafter_that_is_silent_costs_a_pass_per_token() -> None:
    stats = replay(NoDrafter(), [1, 2], OUTPUT)
    assert stats == ReplayStats(tokens=5, passes=5, drafted=0, accepted=0)
    assert stats.tokens_per_pass == 1


def test_agreement_ends_at_the_first_wrong_token() -> None:
    drafter = Scripted(Draft((5, 6, 1)), Draft((8, 9)))
    stats = replay(drafter, [1], OUTPUT)
    assert stats == ReplayStats(tokens=5, passes=2, drafted=5, accepted=3)
    assert drafter.asked == [[1], [1, 5, 6, 7]]
    assert drafter.told == [Verdict((0, 1), 7), Verdict((0,), 9)]


def test_a_tree_is_followed() -> None:
    tree = Draft((4, 5, 6, 7), parents=(-1, -1, 1, 2))
    assert follow(tree, OUTPUT) == (1, 2, 3)
    assert replay(Scripted(tree), [1], OUTPUT).passes == 2


def test_the_life_of_a_sequence() -> None:
    drafter = Scripted()
    replay(drafter, [1], [2, 3], tenant="acme", prediction=[2])
    assert drafter.heard == ["begin acme [2]", "end [2, 3]"]


def test_stats_add_up() -> None:
    assert ReplayStats(4, 2, 3, 2) + ReplayStats(2, 2, 1, 0) == ReplayStats(6, 4, 4, 2)
    assert ReplayStats().tokens_per_pass == pytest.approx(0)
