"""The tree is the best there is for its rows: checked against every tree of a small world."""

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters.recycle.drafter import Children, Tree, best_first
from paceline.types import ROOT, Draft

DEPTH, WORDS = 3, 3
Paths = dict[tuple[int, ...], float]  # each path of tokens with its chance of being reached and right


def world(seed: Sequence[int]) -> Children:
    """Chances that are tenths, so that many are equal; nothing follows a path of DEPTH tokens."""

    def children(path: tuple[int, ...]) -> list[tuple[int, float]]:
        if len(path) == DEPTH:
            return []
        place = sum((t + 1) * 7**i for i, t in enumerate(path))
        return [(t, seed[(place + t) % len(seed)] / 10) for t in range(WORDS)]

    return children


def reached(tree: Tree) -> Paths:
    draft = Draft(tree.tokens, tree.parents)
    found: Paths = {(): 1.0}
    for node, score in enumerate(tree.scores):
        path = tuple(draft.tokens[i] for i in draft.path(node))
        found[path] = found[path[:-1]] * score
    return found


def everything(children: Children, width: int) -> Paths:
    """All nodes of the unbounded tree, those of chance 0 apart."""
    found: Paths = {(): 1.0}
    new: list[tuple[int, ...]] = [()]
    while new:
        grown: list[tuple[int, ...]] = []
        for path in new:
            best = sorted(children(path), key=lambda c: -c[1])[:width]
            for token, chance in best:
                if chance:
                    found[(*path, token)] = found[path] * chance
                    grown.append((*path, token))
        new = grown
    return found


seeds = st.lists(st.integers(0, 10), min_size=1, max_size=40)


@given(seed=seeds, budget=st.integers(0, 45), width=st.integers(1, 4))
def test_a_tree_is_whole_within_its_budget_and_likeliest_first(
    seed: list[int], budget: int, width: int
) -> None:
    tree = best_first(world(seed), budget, width)
    assert len(tree.tokens) == len(tree.parents) == len(tree.scores) <= budget
    assert all(ROOT <= parent < node for node, parent in enumerate(tree.parents))
    assert all(tree.parents.count(node) <= width for node in range(ROOT, len(tree.tokens)))
    chances = list(reached(tree).values())
    assert len(chances) == len(tree.tokens) + 1, "two siblings guess the same"
    assert chances == sorted(chances, reverse=True)
    assert min(chances) > 0


@given(seed=seeds, budget=st.integers(0, 45), width=st.integers(1, 4))
def test_it_is_as_long_as_the_budget_allows_and_has_the_most_expected_tokens(
    seed: list[int], budget: int, width: int
) -> None:
    found = list(reached(best_first(world(seed), budget, width)).values())
    best = sorted(everything(world(seed), width).values(), reverse=True)[: budget + 1]
    assert found == pytest.approx(best)


@given(seed=seeds, budget=st.integers(1, 4))
def test_no_other_tree_of_its_size_has_more_expected_tokens(seed: list[int], budget: int) -> None:
    every = everything(world(seed), 2)
    tree = reached(best_first(world(seed), budget, 2))
    others = (
        chosen
        for chosen in combinations([p for p in every if p], len(tree) - 1)
        if all(p[:-1] in chosen or len(p) == 1 for p in chosen)
    )
    worth = [sum(every[p] for p in chosen) for chosen in others]
    assert sum(tree.values()) - 1 == pytest.approx(max(worth))


@given(seed=seeds, budget=st.integers(1, 30), width=st.integers(1, 3))
def test_a_smaller_budget_gives_the_beginning_of_the_same_tree(
    seed: list[int], budget: int, width: int
) -> None:
    small, large = (best_first(world(seed), n, width) for n in (budget, 45))
    assert small.tokens == large.tokens[:budget]
    assert small.parents == large.parents[:budget]


@given(seed=seeds, least=st.floats(0, 1))
def test_nothing_less_likely_than_min_chance(seed: list[int], least: float) -> None:
    every = everything(world(seed), WORDS)
    found = reached(best_first(world(seed), 60, WORDS, least))
    assert found.keys() == {path for path, chance in every.items() if chance >= least or not path}


def test_a_width_of_one_is_a_chain() -> None:
    tree = best_first(lambda path: [(5, 0.2), (6, 0.7)], 3, 1)
    assert tree == Tree((6, 6, 6), (ROOT, 0, 1), (0.7, 0.7, 0.7))


def test_equals_come_in_the_order_of_their_parents_then_as_named() -> None:
    tree = best_first(lambda path: [(3, 1.0), (1, 1.0)] if len(path) < 2 else [], 9, 2)
    assert tree.tokens == (3, 1, 3, 1, 3, 1)
    assert tree.parents == (ROOT, ROOT, 0, 0, 1, 1)


def test_children_are_read_only_of_nodes_in_the_tree() -> None:
    asked: list[tuple[int, ...]] = []

    def children(path: tuple[int, ...]) -> list[tuple[int, float]]:
        asked.append(path)
        return [(1, 0.9), (2, 0.1)]

    best_first(children, 3, 2)
    assert asked == [(), (1,), (1, 1)]
