"""From places that look like this one to guesses: each votes for the token that followed it."""

from array import array
from collections.abc import Sequence
from heapq import heappop, heappush
from operator import itemgetter
from typing import Final, TypeAlias

from paceline.drafters.suffix.index import SEPARATOR, Match
from paceline.types import ROOT, Cursor, common_prefix

# Fitted on recorded agent traffic, where of the tokens given a chance of x about a share of x came true.
FADE: Final = 0.6  # a voter's weight as a share of the one before it
REACH: Final = 1.5  # how many times more weight one more token in common gives
DOUBT: Final = 0.8  # the weight of all of them being wrong, divided by the tokens in common

Voter: TypeAlias = "tuple[float, int, array[int]]"  # weight, place of the first token it votes for, its log
Camp: TypeAlias = tuple[float, int, list[Voter], Cursor | None]  # weight, token, its voters, the place behind
Node: TypeAlias = tuple[int, int, float]  # token, parent, chance given the parent


def elect(
    matches: Sequence[Match], budget: int, width: int, min_chance: float, cursor: Cursor | None = None
) -> list[Node]:
    """A tree of guesses, likeliest path first; with a width of 1, a chain. `matches` are best first.

    Votes for what the cursor cannot take do not count.
    """
    nodes: list[Node] = []
    waiting: list[tuple[float, int, int, float, int, Camp]] = []  # by -chance of the path, then by age
    longest = matches[0][0]
    voters, node, path, depth, age = _weigh(matches), ROOT, 1.0, 0, 0
    at = None if cursor is None else cursor.fork()  # stands after `node`
    while True:
        if not waiting:  # nothing can come between: what all of them say is taken in one go
            weight = sum([voter[0] for voter in voters])
            words = _chorus(voters, depth, budget - len(nodes))
            for token in words if at is None else _sung(words, at):
                chance = (weight / (weight + DOUBT / (longest + depth))) ** 2
                path *= chance
                if path < min_chance or token == SEPARATOR:
                    return nodes
                nodes.append((token, node, chance))
                node, depth = len(nodes) - 1, depth + 1
        if len(nodes) == budget:
            return nodes
        camps = _camps(voters, depth)
        if at is not None:
            camps = _legal(camps, at)
        total = DOUBT / (longest + depth) + sum([camp[0] for camp in camps])
        for camp in camps[:width]:
            chance = (camp[0] / total) ** 2
            if path * chance < min_chance:
                break
            age += 1
            heappush(waiting, (-path * chance, age, node, chance, depth, camp))
        if not waiting:
            return nodes
        minus_path, _, parent, chance, depth, (_, token, voters, at) = heappop(waiting)
        nodes.append((token, parent, chance))
        node, path, depth = len(nodes) - 1, -minus_path, depth + 1


def _weigh(matches: Sequence[Match]) -> list[Voter]:
    voters, weight, before = [], 1.0, matches[0][0]
    for length, _, place, log in matches:
        if length != before:
            weight *= REACH ** (length - before)
            before = length
        voters.append((weight, place, log))
        weight *= FADE
    return voters


def _chorus(voters: list[Voter], step: int, most: int) -> "array[int]":
    """What all of them say from `step` places on."""
    _, place, log = voters[0]
    words = log[place + step : place + step + most]
    for _, place, log in voters[1:]:
        others = log[place + step : place + step + most]
        if others != words:
            words = words[: common_prefix(words, others)]
    return words


def _camps(voters: list[Voter], step: int) -> list[Camp]:
    """The tokens voted for `step` places on, heaviest first; equals in the order of their voters."""
    camps: dict[int, list[Voter]] = {}
    for voter in voters:
        _, place, log = voter
        token = log[place + step]
        if token != SEPARATOR:
            camps.setdefault(token, []).append(voter)
    with_chances = [(sum([voter[0] for voter in camp]), token, camp, None) for token, camp in camps.items()]
    return sorted(with_chances, key=itemgetter(0), reverse=True)


def _sung(words: "array[int]", at: Cursor) -> "array[int]":
    """The words up to the first that cannot be taken; moves the cursor behind them."""
    for i, token in enumerate(words):
        if at.finished or token == SEPARATOR or not at.advance(token):
            return words[:i]
    return words


def _legal(camps: list[Camp], at: Cursor) -> list[Camp]:
    """Those whose token can be taken, each with a cursor of its own behind it."""
    if at.finished:
        return []
    forks = [at.fork() for _ in camps]
    return [
        (weight, token, camp, fork)
        for (weight, token, camp, _), fork in zip(camps, forks, strict=True)
        if fork.advance(token)
    ]
