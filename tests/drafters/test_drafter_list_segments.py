"""Drafters taking turns under a grammar."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters.drafter_list import DrafterList
from paceline.drafters.grammar import Grammar
from paceline.drafters.ngram import Ngram
from paceline.drafters.prediction import Prediction
from paceline.drafters.support.grammar_filter import FORCED
from paceline.testing import ToyCursor
from paceline.types import NO_DRAFT, ROOT, Ask, Cursor, Draft, Drafter, Seq
from support.grammars import VOCAB, permits, random_rules, sentence

FREE = {1, 2, 3, 4}


class Says(Drafter):
    """Answers as it is told, and remembers what it was asked."""

    def __init__(self, name: str, answer: Callable[[Ask], Draft]) -> None:
        self.name, self.answer = name, answer
        self.calls: list[list[Ask]] = []

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        self.calls.append(list(asks))
        return [self.answer(ask) for ask in asks]


def always(*tokens: int, scores: tuple[float, ...] = (), name: str = "free") -> Says:
    return Says(name, lambda ask: Draft(tokens, None, (), scores))


def ask(cursor: Cursor | None, budget: int = 8, forced_budget: int = 8, name: str = "a") -> Ask:
    return Ask(Seq(name, [1], 1), budget, (), cursor, forced_budget)


def draft_of(drafters: Sequence[Drafter], cursor: Cursor, budget: int = 8, forced_budget: int = 8) -> Draft:
    return DrafterList(drafters).draft([ask(cursor, budget, forced_budget)])[0]


def form() -> ToyCursor:
    """Two forced, two free, one forced, one free, one forced."""
    return sentence({7}, {8}, FREE, FREE, {9}, FREE, {7})


def test_forced_then_free_then_forced() -> None:
    free = always(1, scores=(0.5,))
    draft = draft_of([Grammar(), free], form())
    assert draft.tokens == (7, 8, 1)  # after a guess only those who are certain go on
    two = Says(
        "free", lambda a: Draft((1, 2)[: 2 - len(a.after) % 2], None, (), (0.5, 0.4)[: 2 - len(a.after) % 2])
    )
    draft = draft_of([Grammar(), two], form())
    assert draft.tokens == (7, 8, 1, 2, 9, 1, 7)
    assert draft.sources == ("grammar",) * 2 + ("free",) * 2 + ("grammar", "free", "grammar")
    assert draft.scores == (1, 1, 0.5, 0.4, 1, 0.5, 1)
    assert draft.parents is None
    assert draft.q is None


def test_the_order_of_the_list_says_who_answers_first() -> None:
    free = always(7, 8, 1, 2, scores=(0.5,) * 4)
    assert draft_of([free, Grammar()], form()).sources[:2] == ("free", "grammar")
    assert draft_of([Grammar(), free], form()).sources[:2] == ("grammar", "grammar")


def test_after_a_draft_no_other_drafter_is_called() -> None:
    other = always(2, scores=(0.5,), name="other")
    drafters = [Grammar(), always(1, scores=(0.5,)), other]
    assert draft_of(drafters, sentence({7}, FREE, FREE, FREE)).sources == ("grammar", "free")
    assert other.calls == []


def test_each_segment_gets_its_start() -> None:
    seen: list[tuple[tuple[int, ...], int, int, list[int]]] = []

    def answer(a: Ask) -> Draft:
        assert isinstance(a.cursor, ToyCursor)
        assert a.cursor.tokens == a.after
        seen.append((a.after, a.budget, a.forced_budget, a.cursor.forced()))
        return Draft((1, 2), None, (), (0.5, 0.5))

    first = ask(form(), budget=5, forced_budget=9)
    DrafterList([Grammar(), Says("free", answer)]).draft([first])
    assert seen == [((7, 8), 5, 7, []), ((7, 8, 1, 2, 9), 3, 6, [])]
    assert first.after == ()
    assert isinstance(first.cursor, ToyCursor)
    assert first.cursor.tokens == ()


def test_each_kind_of_node_has_its_budget() -> None:
    free = always(1, 2, scores=(0.5, 0.5))
    lengths = {(b, c): len(draft_of([Grammar(), free], form(), b, c)) for b in range(4) for c in range(5)}
    assert [lengths[3, c] for c in range(5)] == [0, 1, 4, 6, 7]
    assert [lengths[b, 4] for b in range(4)] == [2, 3, 5, 7]


def test_without_a_budget_no_drafter_is_called() -> None:
    free = always(1, 2)
    assert draft_of([Grammar(), free], form(), budget=0).tokens == (7, 8)
    assert free.calls == []


def test_a_leg_hands_over_where_tokens_are_forced() -> None:
    said = (1, 2, 9, 3, 7)
    told = Says("free", lambda a: Draft(said[len(a.after) - 2 :], None, (), (0.5,) * (7 - len(a.after))))
    draft = draft_of([Grammar(), told], form(), budget=3)
    assert draft.tokens == (7, 8, 1, 2, 9, 3, 7)
    assert draft.sources[4] == draft.sources[6] == "grammar"
    alone = draft_of([always(1, 9, 2, scores=(0.5,) * 3)], sentence(FREE, {9}, FREE))
    assert (alone.tokens, alone.sources) == ((1, 9, 2), ("free",) * 3)


def test_scores_are_given_by_all_or_none() -> None:
    assert draft_of([Grammar(), always(1, 2)], form()).scores == ()
    assert draft_of([Grammar(), always(1, 2, scores=(0.5, 0.25))], form()).scores[:4] == (1, 1, 0.5, 0.25)


def test_only_those_who_take_turns_are_certain() -> None:
    draft = draft_of([Grammar(), always(1, 2, scores=(1.0, 1.0))], form(), budget=2)
    assert [score == FORCED for score in draft.scores] == [True, True, False, False, True]
    assert draft_of([always(7, 8, scores=(1.0, 1.0))], form(), forced_budget=0).tokens == (7, 8)


@pytest.mark.parametrize("drafters", [lambda d: [d], lambda d: [d, Grammar()]])
def test_invalid_drafts_are_cut(drafters: Callable[[Drafter], list[Drafter]]) -> None:
    cursor = sentence(FREE, FREE, FREE)
    assert draft_of(drafters(always(1, 9, 2)), cursor).tokens == (1,)
    assert not draft_of(drafters(always(9)), cursor)


def test_a_drafter_without_a_valid_draft_leaves_it_to_the_next() -> None:
    assert draft_of([always(9), always(1, name="next")], sentence(FREE, FREE)).sources == ("next",)


def test_drafts_from_the_prompt_and_the_prediction_are_cut_too() -> None:
    copied = Seq("a", [1, 2, 3, 9, 1, 2], 6)
    assert DrafterList([Ngram()]).draft([Ask(copied, 4, (), sentence(FREE, FREE, FREE))])[0].tokens == (3,)
    foretold = Seq("a", [5], 1, prediction=(1, 2, 9, 4))
    assert DrafterList([Prediction()]).draft([Ask(foretold, 4, (), sentence(FREE, FREE, FREE))])[
        0
    ].tokens == (1, 2)


def test_a_tree_is_the_last_leg() -> None:
    tree = Says(
        "tree", lambda a: Draft((1, 2, 9, 3, 9), (ROOT, ROOT, 0, 1, 3), (), (0.5, 0.4, 0.3, 0.2, 0.1))
    )
    draft = draft_of([Grammar(), tree], form())
    assert draft.tokens == (7, 8, 1, 2, 3, 9)
    assert draft.parents == (ROOT, 0, 1, 1, 3, 4)
    assert draft.scores == (1, 1, 0.5, 0.4, 0.2, 0.1)
    assert draft.sources == ("grammar",) * 2 + ("tree",) * 4
    assert draft_of([Grammar(), tree], form(), budget=3).tokens == (7, 8, 1, 2, 3)


def test_a_tree_of_one_branch_is_a_chain() -> None:
    line = Says("line", lambda a: Draft((1, 2), (ROOT, 0), (), (0.5, 0.4)))
    assert draft_of([Grammar(), line], form(), budget=2).tokens == (7, 8, 1, 2, 9)


def drawn(*tokens: int) -> Says:
    q = torch.full((len(tokens), 10), 0.1, dtype=torch.float64)
    return Says("drawn", lambda a: Draft(tokens, None, (), (0.5,) * len(tokens), q))


def test_bare_nodes_beside_sampled_ones_have_a_one_hot_q() -> None:
    draft = draft_of([Grammar(), drawn(1, 2)], form())
    assert draft.tokens == (7, 8, 1, 2, 9, 1, 2)  # drawn against the grammar: whole, and the end
    assert draft.q is not None
    assert draft.q.dtype == torch.float64
    for node, source in enumerate(draft.sources):
        bare = torch.nn.functional.one_hot(torch.tensor(draft.tokens[node]), 10).double()
        assert torch.equal(draft.q[node], bare if source == "grammar" else torch.full_like(bare, 0.1))


def test_sampled_tokens_are_cut_by_number_alone() -> None:
    assert draft_of([drawn(9, 9, 9)], form(), budget=2).tokens == (9, 9)
    assert draft_of([drawn(9), always(7)], form()).sources == ("drawn",)


def test_nothing_follows_an_end() -> None:
    free = always(1)
    assert not draft_of([Grammar(), free], sentence())
    assert draft_of([Grammar(), free], sentence({7}, {9}, {1}, eos=9)).tokens == (7, 9)
    assert free.calls == []
    assert draft_of([always(1, 9, 1), Grammar()], sentence(FREE, FREE | {9}, FREE, eos=9)).tokens == (1, 9)


def test_a_leg_asks_each_drafter_once_for_all_sequences() -> None:
    free, last = always(1, 2, scores=(0.5, 0.5)), always(3, scores=(0.1,), name="last")
    cursors = [form(), sentence(FREE, FREE, {9}, FREE), None, sentence({7}, {8}, {9}, {9})]
    drafts = DrafterList([Grammar(), free, last]).draft([ask(c, name=str(i)) for i, c in enumerate(cursors)])
    assert [[a.seq.id for a in call] for call in free.calls] == [["1", "2"], ["0"], ["1"], ["0"]]
    assert [d.tokens for d in drafts] == [(7, 8, 1, 2, 9, 1, 7), (1, 2, 9, 1), (1, 2), (7, 8, 9, 9)]
    assert last.calls == []


class Anything(Drafter):
    """Random legal and illegal chains and trees."""

    def __init__(self, name: str, data: st.DataObject, interleaves: bool) -> None:
        self.name, self.data, self.interleaves = name, data, interleaves

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._one() for _ in asks]

    def _one(self) -> Draft:
        draw = self.data.draw
        n = draw(st.integers(0, 3))
        tokens = tuple(draw(st.integers(0, VOCAB - 1)) for _ in range(n))
        tree = draw(st.sampled_from([False, False, True]))
        parents = tuple(draw(st.integers(ROOT, i - 1)) for i in range(n)) if tree else None
        scores = tuple(draw(st.sampled_from([0.3, 1.0])) for _ in range(n)) if draw(st.booleans()) else ()
        return Draft(tokens, parents, (), scores)


@given(st.integers(0, 500), st.integers(0, 5), st.integers(0, 5), st.data())
def test_whoever_takes_turns_the_draft_is_legal_and_within_its_budgets(
    seed: int, budget: int, forced_budget: int, data: st.DataObject
) -> None:
    rules = random_rules(seed, longest=8)
    drafters: list[Drafter] = [
        Grammar(), *(Anything(str(i), data, data.draw(st.booleans())) for i in range(2))
    ]  # fmt: skip
    draft = draft_of(data.draw(st.permutations(drafters)), ToyCursor(rules), budget, forced_budget)
    assert len(draft) <= budget + forced_budget
    assert len(draft.sources) == len(draft)
    assert len(draft.scores) in (0, len(draft))
    assert sum(score == FORCED for score in draft.scores) <= forced_budget
    assert sum(score != FORCED for score in draft.scores) <= budget
    for node in range(len(draft)):
        assert draft.parent(node) < node
        assert permits(rules, tuple(draft.tokens[i] for i in draft.path(node)))


def test_no_drafter_has_a_draft() -> None:
    assert draft_of([Says("none", lambda a: NO_DRAFT), Grammar()], sentence(FREE)) == NO_DRAFT


def test_what_the_grammar_refuses_is_counted() -> None:
    cursor = ToyCursor(lambda tokens: {1, 2} if len(tokens) < 6 else set())
    draft = draft_of([always(1, 2, 9, 1)], cursor)
    assert draft.tokens == (1, 2)
    assert draft.rejected_sources == (always().name,) * 2
    assert draft.first(1).rejected_sources == draft.rejected_sources
