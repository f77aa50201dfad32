from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters import model_free
from paceline.drafters.grammar import CANONICAL, Grammar
from paceline.drafters.support.grammar_filter import FORCED, unforced
from paceline.testing import ToyCursor
from paceline.types import NO_DRAFT, Ask, Cursor, Draft, Seq
from support.grammars import permits, random_rules, sentence


def draft_of(cursor: Cursor | None, budget: int = 8, forced_budget: int = 8) -> Draft:
    return Grammar().draft([Ask(Seq("a", [1], 1), budget, (), cursor, forced_budget)])[0]


def test_nothing_without_a_grammar_or_after_its_end() -> None:
    assert draft_of(None) == NO_DRAFT
    assert not draft_of(sentence())
    assert not draft_of(sentence({1, 2}))


def test_what_must_come() -> None:
    draft = draft_of(sentence({1}, {2}, {3, 4}, {5}))
    assert draft == Draft((1, 2), None, ("grammar",) * 2, (FORCED,) * 2)


def test_the_cap_on_what_is_certain() -> None:
    assert draft_of(sentence({1}, {2}, {3}), forced_budget=2).tokens == (1, 2)
    assert not draft_of(sentence({1}, {2}, {3}), forced_budget=0)
    assert draft_of(sentence({1}, {2}, {3}), budget=0).tokens == (1, 2, 3)


def spelling(tokens: tuple[int, ...]) -> list[int]:
    """After 1, other tokens may write what 3, 4 write."""
    return [3, 4] if tokens == (1,) else []


def spelled(last: set[int]) -> ToyCursor:
    places = [{1}, {3, 5}, {4, 5}, {6}, last]
    return ToyCursor(lambda t: places[len(t)] if len(t) < 5 else set(), canonical=spelling)


def test_spelled_tokens_are_likely_and_lead_to_the_next_forced_ones() -> None:
    draft = draft_of(spelled({7, 8}))
    assert draft.tokens == (1, 3, 4, 6)
    assert draft.scores == (FORCED, CANONICAL, CANONICAL, FORCED)


def test_each_kind_has_its_own_cap() -> None:
    assert draft_of(spelled({7}), budget=1).tokens == (1, 3)
    assert draft_of(spelled({7}), budget=0).tokens == (1,)
    assert draft_of(spelled({7}), forced_budget=1).tokens == (1, 3, 4)
    assert draft_of(spelled({7}), forced_budget=2).tokens == (1, 3, 4, 6)
    assert draft_of(spelled({7})).tokens == (1, 3, 4, 6, 7)


def test_a_spelling_the_grammar_refuses_ends_there() -> None:
    cursor = ToyCursor(lambda t: {1, 2} if len(t) < 3 else set(), canonical=lambda t: [1, 9, 2])
    assert draft_of(cursor).tokens == (1,)


def test_a_forced_end_is_the_last_node() -> None:
    assert draft_of(sentence({1}, {9}, {2}, eos=9)).tokens == (1, 9)


def test_the_cursor_stays_where_it_is() -> None:
    cursor = sentence({1}, {2}, {3, 4})
    draft_of(cursor)
    assert cursor.tokens == ()


@given(st.integers(0, 500), st.integers(0, 4), st.integers(0, 4))
def test_certain_nodes_are_the_only_legal_ones(seed: int, budget: int, forced_budget: int) -> None:
    rules = random_rules(seed)
    cursor = ToyCursor(rules, canonical=lambda t: sorted(rules(t))[:1])
    draft = draft_of(cursor, budget, forced_budget)
    assert permits(rules, draft.tokens)
    assert len(draft) == len(draft.scores) == len(draft.sources)
    assert sum(score == FORCED for score in draft.scores) <= forced_budget
    assert sum(score != FORCED for score in draft.scores) <= budget
    for i, score in enumerate(draft.scores):
        assert (score == FORCED) == (len(rules(draft.tokens[:i])) == 1)


def test_it_is_there_without_a_model() -> None:
    assert isinstance(model_free()["grammar"], Grammar)


def test_no_draft_is_certain() -> None:
    assert unforced(1.0) < FORCED
    assert unforced(0.5) == 0.5
