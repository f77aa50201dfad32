from array import array
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters.suffix import vote
from paceline.drafters.suffix.vote import SEPARATOR, Match
from paceline.testing import ToyCursor
from paceline.types import ROOT, Draft
from support.grammars import VOCAB, permits, random_rules, sentence


def elect(
    past: list[Match], budget: int, width: int, min_chance: float
) -> tuple[list[int], list[int], list[float]]:
    nodes = vote.elect(past, budget, width, min_chance)
    return [node[0] for node in nodes], [node[1] for node in nodes], [node[2] for node in nodes]


def matches(*continuations: list[int], length: int = 8) -> list[Match]:
    """Each in a log of its own, all with as much in common."""
    return [(length, 0, 0, array("I", [*tokens, SEPARATOR])) for tokens in continuations]


def test_one_precedent_is_copied_to_its_end() -> None:
    tokens, parents, chances = elect(matches([5, 6, 7]), 8, 1, 0.1)
    assert tokens == [5, 6, 7]
    assert parents == [ROOT, 0, 1]
    assert all(a < b < 1 for a, b in pairwise(chances))


def test_budget_and_doubt_end_a_draft() -> None:
    assert elect(matches([5, 6, 7]), 2, 1, 0.1)[0] == [5, 6]
    assert elect(matches([5, 6, 7], length=1), 8, 1, 0.3)[0] == [5]
    assert elect(matches([5, 6, 7], length=1), 8, 1, 0.9)[0] == []


def test_the_first_is_believed_until_three_others_contradict() -> None:
    assert elect(matches([5], [6]), 1, 1, 0.0)[0] == [5]
    assert elect(matches([5], [6], [6]), 1, 1, 0.0)[0] == [5]
    assert elect(matches([5], [6], [6], [6]), 1, 1, 0.0)[0] == [6]


def test_a_longer_past_weighs_more() -> None:
    long, short = matches([5], length=9), matches([6], [6], length=2)
    even = matches([5], [6], [6], length=9)
    assert elect([*long, *short], 1, 1, 0.0)[2][0] > elect(even, 1, 1, 0.0)[2][0]


def test_agreement_makes_sure() -> None:
    alone = elect(matches([5]), 1, 1, 0.0)[2][0]
    together = elect(matches([5], [5]), 1, 1, 0.0)[2][0]
    apart = elect(matches([5], [6]), 1, 1, 0.0)[2][0]
    assert apart < alone < together


def test_what_was_followed_so_far_counts_as_in_common() -> None:
    split_later = elect(matches([5, 6], [5, 7], length=1), 2, 1, 0.0)[2][1]
    split_at_once = elect(matches([6], [7], length=1), 1, 1, 0.0)[2][0]
    assert split_later > split_at_once


def test_matches_that_disagreed_vote_no_more() -> None:
    assert elect(matches([5, 6, 9], [5, 7, 8], [5, 7, 9], [5, 7, 9]), 3, 1, 0.0)[0] == [5, 7, 8]
    assert elect(matches([1, 2], [3, 4, 5]), 4, 1, 0.0)[0] == [1, 2]


def test_those_who_end_leave_the_word_to_the_others() -> None:
    assert elect(matches([5], [5, 6], [5, 6, 7]), 8, 1, 0.0)[0] == [5, 6, 7]


def test_a_tree_holds_both_opinions() -> None:
    tokens, parents, _ = elect(matches([5, 6, 6], [7, 8, 8]), 6, 2, 0.0)
    draft = Draft(tuple(tokens), tuple(parents))
    said = {tuple(draft.tokens[i] for i in path) for path in draft.paths()}
    assert said == {(5, 6, 6), (7, 8, 8)}


@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 3), max_size=6)), min_size=1, max_size=6),
    st.integers(1, 12),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.1, 0.4]),
)
def test_the_shape_of_a_draft(
    past: list[tuple[int, list[int]]], budget: int, width: int, min_chance: float
) -> None:
    past = sorted(past, key=lambda match: match[0], reverse=True)
    tokens, parents, chances = elect(
        [match for length, text in past for match in matches(text, length=length)], budget, width, min_chance
    )
    assert len(tokens) == len(parents) == len(chances) <= budget
    assert all(parent < node for node, parent in enumerate(parents))
    paths = path_chances(parents, chances)
    assert all(min_chance <= b <= a for a, b in pairwise([1.0, *paths]))
    for node in {ROOT, *parents}:
        siblings = [tokens[i] for i, parent in enumerate(parents) if parent == node]
        assert len(set(siblings)) == len(siblings) <= width
        assert sum(chances[i] for i, parent in enumerate(parents) if parent == node) <= 1


def path_chances(parents: list[int], chances: list[float]) -> list[float]:
    paths: list[float] = []
    for parent, chance in zip(parents, chances, strict=True):
        paths.append(chance * (1.0 if parent == ROOT else paths[parent]))
    return paths


def paths(
    past: list[Match], cursor: ToyCursor | None, budget: int = 8, width: int = 1
) -> set[tuple[int, ...]]:
    nodes = vote.elect(past, budget, width, 0.0, cursor)
    draft = Draft(tuple(node[0] for node in nodes), tuple(node[1] for node in nodes))
    return {tuple(draft.tokens[i] for i in path) for path in draft.paths()}


def test_the_heaviest_legal_opinion_wins() -> None:
    past = matches([5, 6], [5, 7], [4, 3])
    assert paths(past, None) == {(5, 6)}
    assert paths(past, sentence({4, 5}, {3, 7})) == {(5, 7)}
    assert paths(past, sentence({3, 4}, {3, 7})) == {(4, 3)}
    assert paths(past, sentence({1}, {2})) == set()


def test_what_all_say_is_cut_where_it_becomes_illegal() -> None:
    past = matches([1, 2, 3, 4], [1, 2, 3, 4])
    assert paths(past, sentence({1, 9}, {2, 9}, {4, 9}, {4, 9})) == {(1, 2)}
    assert paths(past, sentence({1}, {2})) == {(1, 2)}
    assert paths(past, sentence({1}, {2}, {3}, {4}, eos=3)) == {(1, 2, 3)}


def test_a_tree_of_legal_opinions() -> None:
    past = matches([5, 6, 6], [7, 8, 8], [4, 1, 1])
    assert paths(past, sentence({5, 4}, {6, 1}, {1}), width=2) == {(5, 6), (4, 1, 1)}


def test_an_illegal_opinion_takes_no_weight_from_the_others() -> None:
    past = matches([5], [6], [7])
    alone = vote.elect(matches([5]), 1, 1, 0.0)
    assert vote.elect(past, 1, 1, 0.0, sentence({5}))[0][2] == alone[0][2]


@given(
    st.integers(0, 100),
    st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=6), min_size=1, max_size=4),
    st.integers(1, 8),
    st.integers(1, 3),
)
def test_only_legal_paths_and_all_of_what_was_legal_anyway(
    seed: int, past: list[list[int]], budget: int, width: int
) -> None:
    rules, cursor = random_rules(seed), ToyCursor(random_rules(seed))
    found = paths(matches(*past), cursor, budget, width)
    assert all(permits(rules, path) for path in found)
    assert cursor.tokens == ()
    anything = ToyCursor(lambda _: None)
    assert paths(matches(*past), anything, budget, width) == paths(matches(*past), None, budget, width)
    if any(text and text[0] in rules(()) for text in past):
        assert found
