"""Best-first search for the tree with the most expected accepted tokens for its nodes."""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple, TypeAlias

from paceline.types import ROOT

Children: TypeAlias = Callable[[tuple[int, ...]], Sequence[tuple[int, float]]]


class Tree(NamedTuple):
    """The parts of a `Draft`; scores are P(node | its parent)."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()


def best_first(children: Children, budget: int, width: int, min_chance: float = 0.0) -> Tree:
    """The `budget` nodes most likely to be accepted, most likely first.

    children: from a path of tokens to the tokens that may follow, each once, with probabilities. It is called
    for nodes in the tree only, in their order, and not once the tree is full. width: the largest number of
    children; 1 makes a chain. min_chance: a node less likely to be accepted is not added. Of equally likely
    nodes the one whose parent came first is first, then the one its parent listed first.
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
            if chance > 0 and reach * chance >= min_chance:
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
