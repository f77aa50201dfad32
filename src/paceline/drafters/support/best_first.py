"""From the chances of single guesses to the tree of guesses that is worth most for its rows."""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple, TypeAlias

from paceline.types import ROOT

Children: TypeAlias = Callable[[tuple[int, ...]], Sequence[tuple[int, float]]]


class Tree(NamedTuple):
    """What a `Draft` is made of; scores are the chances of nodes given their parents."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()


def best_first(children: Children, budget: int, width: int, least: float = 0.0) -> Tree:
    """The `budget` nodes that are likeliest to be reached and right, likeliest first.

    children: from the tokens guessed so far to the tokens that may follow, each once, with their chances of 0
    to 1. It is asked about nodes that are in the tree only, in their order, and not once the tree is full.
    width: most guesses after one node; 1 makes a chain. least: a node less likely to be reached is not made.
    Of nodes equally likely the one whose parent came first is first, then the one its parent named first.
    """
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    # -chance of the path, parent, rank among its siblings, chance, path
    waiting: list[tuple[float, int, int, float, tuple[int, ...]]] = []
    path: tuple[int, ...] = ()
    node, reach = ROOT, 1.0
    while len(tokens) < budget:
        ranked = sorted(children(path), key=_chance, reverse=True)
        for rank, (token, chance) in enumerate(ranked[:width]):
            if chance > 0 and reach * chance >= least:
                heappush(waiting, (-reach * chance, node, rank, chance, (*path, token)))
        if not waiting:
            break
        minus_reach, parent, _, chance, path = heappop(waiting)
        node, reach = len(tokens), -minus_reach
        tokens.append(path[-1])
        parents.append(parent)
        scores.append(chance)
    return Tree(tuple(tokens), tuple(parents), tuple(scores))


def _chance(child: tuple[int, float]) -> float:
    return child[1]
