from collections.abc import Sequence

import torch

from paceline.drafters.none import NoDrafter
from paceline.drafters.relay import Relay
from paceline.types import NO_DRAFT, Ask, Draft, Drafter, Scores, Seq, Verdict


class Knows(Drafter):
    """Answers for the sequences it knows."""

    def __init__(self, name: str, *known: str, taps: tuple[int, ...] = ()) -> None:
        self.name, self.known, self.taps = name, known, taps
        self.asked: list[str] = []
        self.heard: list[str] = []

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        self.asked += [ask.seq.id for ask in asks]
        return [Draft((1,), None, (self.name,)) if ask.seq.id in self.known else NO_DRAFT for ask in asks]

    def begin(self, seq: Seq) -> None:
        self.heard.append("begin")

    def observe(self, seqs: Sequence[Seq], verdicts: Sequence[Verdict], scores: Scores) -> None:
        self.heard.append("observe")

    def end(self, seq: Seq) -> None:
        self.heard.append("end")


def asks(*names: str) -> list[Ask]:
    return [Ask(Seq(name, [1], 1), 4) for name in names]


def test_the_first_answer_counts() -> None:
    one, two, three = Knows("one", "a"), Knows("two", "a", "b"), Knows("three", "b")
    drafts = Relay([one, two, three]).draft(asks("a", "b"))
    assert [draft.sources for draft in drafts] == [("one",), ("two",)]
    assert (one.asked, two.asked, three.asked) == (["a", "b"], ["b"], [])


def test_nobody_knows() -> None:
    assert Relay([Knows("one"), NoDrafter()]).draft(asks("a", "b")) == [NO_DRAFT, NO_DRAFT]
    assert Relay([]).draft(asks("a")) == [NO_DRAFT]


def test_all_of_them_hear_everything() -> None:
    members = [Knows("one", "a"), Knows("two")]
    drafter, seq = Relay(members), Seq("a", [1], 1)
    drafter.begin(seq)
    drafter.observe([seq], [Verdict((), 1)], Scores(torch.empty(0, 0), ()))
    drafter.end(seq)
    assert [member.heard for member in members] == [["begin", "observe", "end"]] * 2


def test_it_is_named_after_its_members_and_sees_what_they_see() -> None:
    drafter = Relay([Knows("suffix", taps=(3, 1)), Knows("ngram"), Knows("head", taps=(1, 7))])
    assert drafter.name == "suffix+ngram+head"
    assert drafter.taps == (1, 3, 7)


def test_none_guesses_nothing() -> None:
    assert NoDrafter().draft(asks("a", "b")) == [NO_DRAFT, NO_DRAFT]
    assert NoDrafter().name == "none"
