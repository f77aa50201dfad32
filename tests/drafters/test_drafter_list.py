from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters.drafter_list import DrafterList, Failure
from paceline.drafters.grammar import Grammar
from paceline.drafters.none import NoDrafter
from paceline.types import NO_DRAFT, ROOT, Ask, Draft, Drafter, HiddenRows, Scores, Seq, Verdict


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

    def on_hidden(self, hidden_rows: Sequence[HiddenRows]) -> None:
        assert self.taps, "shown to one who has no taps"
        self.heard.append("read")

    def observe(self, seqs: Sequence[Seq], verdicts: Sequence[Verdict], scores: Scores) -> None:
        self.heard.append("observe")

    def end(self, seq: Seq) -> None:
        self.heard.append("end")


def asks(*names: str) -> list[Ask]:
    return [Ask(Seq(name, [1], 1), 4) for name in names]


def test_the_first_answer_counts() -> None:
    one, two, three = Knows("one", "a"), Knows("two", "a", "b"), Knows("three", "b")
    drafts = DrafterList([one, two, three]).draft(asks("a", "b"))
    assert [draft.sources for draft in drafts] == [("one",), ("two",)]
    assert (one.asked, two.asked, three.asked) == (["a", "b"], ["b"], [])


def test_nobody_knows() -> None:
    assert DrafterList([Knows("one"), NoDrafter()]).draft(asks("a", "b")) == [NO_DRAFT, NO_DRAFT]
    assert DrafterList([]).draft(asks("a")) == [NO_DRAFT]


def test_all_of_them_hear_everything() -> None:
    members = [Knows("one", "a"), Knows("two")]
    drafter, seq = DrafterList(members), Seq("a", [1], 1)
    drafter.begin(seq)
    drafter.observe([seq], [Verdict((), 1)], Scores(torch.empty(0, 0), ()))
    drafter.end(seq)
    assert [member.heard for member in members] == [["begin", "observe", "end"]] * 2


def test_those_who_have_taps_read() -> None:
    members = [Knows("one", taps=(1,)), Knows("two"), Knows("three", taps=(2,))]
    DrafterList([members[0], DrafterList(members[1:])]).on_hidden([HiddenRows(Seq("a", [1], 1), 0, {})])
    assert [member.heard for member in members] == [["read"], [], ["read"]]


def test_sequences_are_shown_to_those_who_read_them_in_this_pass() -> None:
    class Lists(Knows):
        def on_hidden(self, hidden_rows: Sequence[HiddenRows]) -> None:
            self.heard += [rows.seq.id for rows in hidden_rows]

    members = [Lists("one", taps=(1,)), Lists("two", taps=(2,))]
    rows = [HiddenRows(Seq(name, [1], 1), 0, {}) for name in "ab"]
    DrafterList(members).show_hidden(rows, {"a": ["one"], "b": ["one", "two"]})
    assert [member.heard for member in members] == [["a", "b"], ["b"]]


def test_it_is_named_after_its_members_and_sees_what_they_see() -> None:
    drafter = DrafterList([Knows("suffix", taps=(3, 1)), Knows("ngram"), Knows("head", taps=(1, 7))])
    assert drafter.name == "suffix+ngram+head"
    assert drafter.taps == (1, 3, 7)


def test_none_drafts_nothing() -> None:
    assert NoDrafter().draft(asks("a", "b")) == [NO_DRAFT, NO_DRAFT]
    assert NoDrafter().name == "none"


class Random(Drafter):
    """Any draft or none, the same for the same sequence."""

    def __init__(self, name: str, drafts: dict[str, Draft]) -> None:
        self.name, self.drafts = name, drafts
        self.calls: list[list[str]] = []

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        self.calls.append([ask.seq.id for ask in asks])
        return [self.drafts[ask.seq.id] for ask in asks]


def first_of(drafters: Sequence[Drafter], asks: Sequence[Ask]) -> list[Draft]:
    """The definition of a list of drafters, without a grammar."""
    drafts = [NO_DRAFT] * len(asks)
    for drafter in drafters:
        open_asks = [i for i, draft in enumerate(drafts) if not draft]
        if not open_asks:
            break
        for i, draft in zip(open_asks, drafter.draft([asks[i] for i in open_asks]), strict=True):
            named = draft.sources or (drafter.name,) * len(draft)
            drafts[i] = replace(draft, sources=named)
    return drafts


@st.composite
def any_draft(draw: st.DrawFn) -> Draft:
    n = draw(st.integers(0, 5))
    tokens = tuple(draw(st.integers(0, 9)) for _ in range(n))
    if not n:
        return NO_DRAFT
    parents = tuple(draw(st.integers(ROOT, i - 1)) for i in range(n)) if draw(st.booleans()) else None
    scores = tuple(draw(st.sampled_from([0.2, 1.0])) for _ in range(n)) if draw(st.booleans()) else ()
    return Draft(tokens, parents, ("x",) * n if draw(st.booleans()) else (), scores)


@given(st.data())
def test_without_a_grammar_the_first_that_has_a_draft_answers(data: st.DataObject) -> None:
    names = [f"s{i}" for i in range(data.draw(st.integers(0, 3)))]
    made = [{name: data.draw(any_draft()) for name in names} for _ in range(data.draw(st.integers(0, 3)))]
    lists = [[Random(str(i), drafts) for i, drafts in enumerate(made)] + [Grammar()] for _ in range(2)]
    questions = [Ask(Seq(name, [1], 1), 4, (), None, 3) for name in names]
    assert DrafterList(lists[0]).draft(questions) == first_of(lists[1], questions)
    assert [vars(a) for a in lists[0]] == [vars(b) for b in lists[1]]  # and the same were asked the same


class Fails(Knows):
    """Whatever it is asked or told."""

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        raise ValueError("draft")

    def begin(self, seq: Seq) -> None:
        raise ValueError("begin")

    def on_hidden(self, hidden_rows: Sequence[HiddenRows]) -> None:
        raise ValueError("read")

    def observe(self, seqs: Sequence[Seq], verdicts: Sequence[Verdict], scores: Scores) -> None:
        raise ValueError("observe")

    def end(self, seq: Seq) -> None:
        raise ValueError("end")


def test_one_that_fails_takes_nothing_from_the_others() -> None:
    other = Knows("other", "a", taps=(1,))
    drafter, seq = DrafterList([Fails("fails", taps=(1,)), other]), Seq("a", [1], 1)
    drafter.begin(seq)
    assert [draft.sources for draft in drafter.draft(asks("a"))] == [("other",)]
    drafter.on_hidden([HiddenRows(seq, 0, {})])
    drafter.observe([seq], [Verdict((), 1)], Scores(torch.empty(0, 0), ()))
    drafter.end(seq)
    assert other.heard == ["begin", "read", "observe", "end"]


def test_one_that_fails_is_logged_once_with_the_message(caplog: pytest.LogCaptureFixture) -> None:
    fails = Fails("fails")
    failures: set[Failure] = set()
    lists = DrafterList([fails], None, failures), DrafterList([NoDrafter(), fails], None, failures)
    for drafter in lists:
        for _ in range(3):
            assert drafter.draft(asks("a")) == [NO_DRAFT]
    (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert record.message.startswith(
        "drafter fails failed; this round has none of its drafts: draft (ValueError"
    )
    DrafterList([fails], None, failures).end(Seq("a", [1], 1))  # another failure is logged too
    assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 2
    caplog.clear()


@dataclass(slots=True)
class Unhashable:
    """Not a subclass of Drafter, and without weak references."""

    name: str
    taps: tuple[int, ...] = ()
    interleaves: bool = False
    private: bool = False
    fingerprint: str = ""
    calls: int = 0

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        self.calls += 1
        raise ValueError("no draft")

    def begin(self, seq: Seq) -> None: ...
    def prepare(self, seq: Seq) -> None: ...
    def idle(self) -> None: ...
    def ready(self, seq: Seq) -> bool:
        return True

    def observe(self, seqs: Sequence[Seq], verdicts: Sequence[Verdict], scores: Scores) -> None: ...
    def on_hidden(self, hidden_rows: Sequence[HiddenRows]) -> None: ...
    def end(self, seq: Seq) -> None: ...


def test_one_that_cannot_be_hashed_may_fail_too(caplog: pytest.LogCaptureFixture) -> None:
    fails = Unhashable("fails")
    drafter = DrafterList([fails, Knows("other", "a")])
    for _ in range(2):
        assert [draft.sources for draft in drafter.draft(asks("a"))] == [("other",)]
    assert fails.calls == 2
    assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 1
    caplog.clear()


class WrittenForOldNames(Drafter):
    name, taps, takes_turns = "old", (1,), True
    positions: list[int]

    def __init__(self) -> None:
        self.positions = []

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft((1,)) for _ in asks]

    def read(self, seen: Sequence[HiddenRows]) -> None:
        self.positions += [rows.start for rows in seen]


def test_drafters_written_for_the_old_names_work_with_a_warning() -> None:
    old = WrittenForOldNames()
    with pytest.warns(DeprecationWarning, match="on_hidden|interleaves") as warned:
        drafter = DrafterList([old])
    assert len(warned) == 2
    drafter.on_hidden([HiddenRows(Seq("a", [1], 1), 7, {})])
    assert old.positions == [7]
    assert drafter.drafters[0].interleaves
    assert drafter.draft(asks("a"))[0].tokens == (1,)


class OldAndMalformed(WrittenForOldNames):
    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft((1, 2), (1, ROOT)) for _ in asks]


def test_drafts_under_the_old_names_are_checked_too(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.warns(DeprecationWarning, match="on_hidden|interleaves"):
        drafter = DrafterList([OldAndMalformed()])
    assert drafter.draft(asks("a")) == [NO_DRAFT]
    assert "comes before its parent" in caplog.text
    caplog.clear()


class Miscounts(Drafter):
    name = "miscounts"

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft((1,), None, ("miscounts",), (0.5,))] * (len(asks) + 1)


def test_one_that_miscounts_has_no_draft(caplog: pytest.LogCaptureFixture) -> None:
    drafter = DrafterList([Miscounts(), Knows("other", "a")])
    assert [draft.sources for draft in drafter.draft(asks("a"))] == [("other",)]
    assert "2 drafts for 1 asks" in caplog.text
    caplog.clear()


class Headless(Drafter):
    """A head whose drafts have no scores."""

    name, taps = "headless", (1,)

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft((7,)) for _ in asks]


def test_a_head_without_scores_replaces_nothing() -> None:
    first = Random("first", {"a": Draft((1,), None, ("first",), (0.01,))})
    (draft,) = DrafterList([first, Headless()]).draft([Ask(Seq("a", [1], 1), 1)])
    assert draft.tokens == (1,)
