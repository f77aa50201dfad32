"""The vote of the best matches: each votes for the token that followed it.

Special here: SuffixDecoding (arXiv 2411.04975) counts all occurrences; a weighted vote of the few longest
matches gives chances that are calibrated on recorded agent traffic.
"""

from array import array
from collections.abc import Sequence
from functools import reduce
from heapq import heappop, heappush
from operator import add, itemgetter
from typing import Final, TypeAlias

from paceline.types import ROOT, Cursor, common_prefix

SEPARATOR: Final = 0xFFFFFFFF  # stands before and behind every document; never a token
WINDOW: Final = 6  # neighbours in the index compared on each side of the context
VOTERS: Final = 4  # matches that vote
# Fitted on recorded agent traffic, so that chances are calibrated.
FADE: Final = 0.6  # weight of a match as a share of the one before it
REACH: Final = 1.5  # factor on the weight for one more matching token
DOUBT: Final = 0.8  # weight of all of them being wrong, divided by the matching tokens

Match: TypeAlias = "tuple[int, int, int, array[int]]"  # length, rank, position of what followed, its log
Voter: TypeAlias = "tuple[float, int, array[int]]"  # weight, position of its first vote, its log
Camp: TypeAlias = tuple[float, int, list[Voter], Cursor | None]  # weight, token, voters, state after it
Node: TypeAlias = tuple[int, int, float]  # token, parent, chance given the parent
Nodes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]  # tokens, parents, chances


def elect(
    matches: Sequence[Match], budget: int, width: int, min_chance: float, cursor: Cursor | None = None
) -> list[Node]:
    """A tree, most likely path first; with a width of 1, a chain. `matches` are best first.

    Each match votes for the token that followed it. Votes for tokens that are not grammar-valid do not count.
    """
    nodes: list[Node] = []
    waiting: list[tuple[float, int, int, float, int, Camp]] = []  # by -chance of the path, then by age
    longest = matches[0][0]
    voters, node, path, depth, age = _weigh(matches), ROOT, 1.0, 0, 0
    at = None if cursor is None else cursor.fork()  # the grammar state after `node`
    while True:
        if not waiting:  # no other path competes: unanimous votes are taken in one go
            weight = _sum([voter[0] for voter in voters])
            agreed = _unanimous(voters, depth, budget - len(nodes))
            for token in agreed if at is None else _valid_prefix(agreed, at):
                share = weight / (weight + DOUBT / (longest + depth))
                chance = share * share
                path *= chance
                if path < min_chance or token == SEPARATOR:
                    return nodes
                nodes.append((token, node, chance))
                node, depth = len(nodes) - 1, depth + 1
        if len(nodes) == budget:
            return nodes
        camps = _camps(voters, depth)
        if at is not None:
            camps = _valid(camps, at)
        total = DOUBT / (longest + depth) + _sum([camp[0] for camp in camps])
        for camp in camps[:width]:
            chance = (camp[0] / total) * (camp[0] / total)
            if path * chance < min_chance:
                break
            age += 1
            heappush(waiting, (-path * chance, age, node, chance, depth, camp))
        if not waiting:
            return nodes
        minus_path, _, parent, chance, depth, (_, token, voters, at) = heappop(waiting)
        nodes.append((token, parent, chance))
        node, path, depth = len(nodes) - 1, -minus_path, depth + 1


def columns(nodes: Sequence[Node]) -> Nodes | None:
    if not nodes:
        return None
    tokens, parents, chances = zip(*nodes, strict=True)
    return tokens, parents, chances


def _sum(weights: list[float]) -> float:
    """From left to right, as in C++. (The built-in sum of later Pythons compensates.)"""
    return reduce(add, weights, 0.0)


def _weigh(matches: Sequence[Match]) -> list[Voter]:
    voters, weight, before = [], 1.0, matches[0][0]
    for length, _, position, log in matches:
        if length != before:
            weight *= REACH ** (length - before)
            before = length
        voters.append((weight, position, log))
        weight *= FADE
    return voters


def _unanimous(voters: list[Voter], step: int, limit: int) -> "array[int]":
    """The tokens that all of them vote for from `step` positions on."""
    _, position, log = voters[0]
    tokens = log[position + step : position + step + limit]
    for _, position, log in voters[1:]:
        others = log[position + step : position + step + limit]
        if others != tokens:
            tokens = tokens[: common_prefix(tokens, others)]
    return tokens


def _camps(voters: list[Voter], step: int) -> list[Camp]:
    """The tokens voted for `step` positions on, heaviest first; equals in the order of their voters."""
    camps: dict[int, list[Voter]] = {}
    for voter in voters:
        _, position, log = voter
        token = log[position + step]
        if token != SEPARATOR:
            camps.setdefault(token, []).append(voter)
    with_chances = [(_sum([voter[0] for voter in camp]), token, camp, None) for token, camp in camps.items()]
    return sorted(with_chances, key=itemgetter(0), reverse=True)


def _valid_prefix(tokens: "array[int]", at: Cursor) -> "array[int]":
    """The tokens up to the first that is not grammar-valid; moves the cursor past them."""
    for i, token in enumerate(tokens):
        if at.finished or token == SEPARATOR or not at.advance(token):
            return tokens[:i]
    return tokens


def _valid(camps: list[Camp], at: Cursor) -> list[Camp]:
    """Those whose token is grammar-valid, each with a cursor of its own after it."""
    if at.finished:
        return []
    forks = [at.fork() for _ in camps]
    return [
        (weight, token, camp, fork)
        for (weight, token, camp, _), fork in zip(camps, forks, strict=True)
        if fork.advance(token)
    ]
