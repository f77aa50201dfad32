import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters.support.grammar_filter import grammar_valid, valid_prefix
from paceline.testing import ToyCursor
from paceline.types import ROOT, Draft
from support.grammars import VOCAB, permits, random_rules, sentence

token_lists = st.lists(st.integers(0, VOCAB - 1), max_size=12)


def random_tree(tokens: list[int], data: st.DataObject) -> Draft:
    n = len(tokens)
    parents = tuple(data.draw(st.integers(ROOT, i - 1)) for i in range(n))
    return Draft(tuple(tokens), parents, tuple(f"by {i}" for i in range(n)), tuple(i / 16 for i in range(n)))


def path_tokens(draft: Draft, node: int) -> tuple[int, ...]:
    return tuple(draft.tokens[i] for i in draft.path(node))


@given(st.integers(0, 200), token_lists)
def test_a_chain_is_cut_at_the_first_illegal_token(seed: int, tokens: list[int]) -> None:
    rules = random_rules(seed)
    draft = Draft(tuple(tokens), None, ("a",) * len(tokens))
    right = max(n for n in range(len(tokens) + 1) if permits(rules, draft.tokens[:n]))
    assert grammar_valid(ToyCursor(rules), draft) == draft.first(right)


@given(st.integers(0, 200), token_lists, st.data())
def test_a_tree_keeps_the_nodes_whose_path_is_legal(
    seed: int, tokens: list[int], data: st.DataObject
) -> None:
    rules = random_rules(seed)
    draft = random_tree(tokens, data)
    kept = [i for i in range(len(draft)) if permits(rules, path_tokens(draft, i))]
    left = grammar_valid(ToyCursor(rules), draft)
    assert [path_tokens(left, i) for i in range(len(left))] == [path_tokens(draft, i) for i in kept]
    assert left.sources == tuple(draft.sources[i] for i in kept)
    assert left.scores == tuple(draft.scores[i] for i in kept)


def test_the_cursor_is_not_moved() -> None:
    cursor = sentence({1}, {2, 3}, {4})
    grammar_valid(cursor, Draft((1, 2, 4)))
    grammar_valid(cursor, Draft((1, 2, 3), (ROOT, 0, 0)))
    valid_prefix(cursor, [1, 2])
    assert cursor.tokens == ()


def test_nothing_follows_an_end() -> None:
    assert grammar_valid(sentence({1}, {9}, {2}, eos=9), Draft((1, 9, 2))).tokens == (1, 9)
    tree = Draft((1, 9, 2, 9), (ROOT, 0, 1, 0))
    assert grammar_valid(sentence({1}, {9}, {2}, eos=9), tree).tokens == (1, 9, 9)
    assert not grammar_valid(sentence(), Draft((1,)))


@pytest.mark.parametrize("parents", [None, (ROOT, ROOT)])
def test_sampled_tokens_are_never_dropped_for_their_value(parents: tuple[int, ...] | None) -> None:
    draft = Draft((5, 6), parents, q=torch.full((2, 8), 1 / 8))
    assert grammar_valid(sentence({1}), draft) is draft


def test_a_walk_can_stop_where_the_grammar_leaves_no_choice() -> None:
    cursor = sentence({1, 2}, {1, 2}, {3}, {1, 2})
    assert valid_prefix(cursor, [1, 2, 3, 1])[0] == 4
    taken, at = valid_prefix(cursor, [1, 2, 3, 1], until_forced=True)
    assert (taken, at.forced()) == (2, [3])
    assert valid_prefix(at, [3, 1], until_forced=True)[0] == 2  # where it starts it may be forced
