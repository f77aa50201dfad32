"""From places that look like this one to guesses: each votes for the token that followed it."""

from array import array
from collections.abc import Sequence
from heapq import heappop, heappush
from operator import itemgetter
from typing import Final, TypeAlias

from paceline.drafters.context_index import SEPARATOR, Match
from paceline.types import ROOT

# Fitted on recorded agent traffic, where of the tokens given a chance of x about a share of x came true.
FADE: Final = 0.6  # a voter's weight as a share of the one before it
REACH: Final = 1.5  # how many times more weight one more token in common gives
DOUBT: Final = 0.8  # the weight of all of them being wrong, divided by the tokens in common

Voter: TypeAlias = "tuple[float, int, array[int]]"  # weight, place of the first token it votes for, its log
Camp: TypeAlias = tuple[float, int, list[Voter]]  # weight, token, who voted for it
Guesses: TypeAlias = tuple[list[int], list[int], list[float]]  # tokens, parents, chances given the parent


def elect(matches: Sequence[Match], budget: int, width: int, min_chance: float) -> Guesses:
    """A tree of guesses, likeliest path first; with a width of 1, a chain. `matches` are best first."""
    tokens: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    waiting: list[tuple[float, int, float, int, int, Camp]] = []  # by -chance of the path, then by age
    longest = matches[0][0]
    voters, node, path, depth, age = _weigh(matches), ROOT, 1.0, 0, 0
    while len(tokens) < budget:
        camps = _camps(voters, depth)
        total = DOUBT / (longest + depth) + sum([camp[0] for camp in camps])
        for camp in camps[:width]:
            chance = (camp[0] / total) ** 2
            if path * chance < min_chance:
                break
            age += 1
            heappush(waiting, (-path * chance, age, chance, node, depth, camp))
        if not waiting:
            break
        minus_path, _, chance, parent, depth, (_, token, voters) = heappop(waiting)
        node, path, depth = len(tokens), -minus_path, depth + 1
        tokens.append(token)
        parents.append(parent)
        chances.append(chance)
    return tokens, parents, chances


def _weigh(matches: Sequence[Match]) -> list[Voter]:
    voters, weight, before = [], 1.0, matches[0][0]
    for length, _, place, log in matches:
        if length != before:
            weight *= REACH ** (length - before)
            before = length
        voters.append((weight, place, log))
        weight *= FADE
    return voters


def _camps(voters: list[Voter], step: int) -> list[Camp]:
    """The tokens voted for `step` places on, heaviest first; equals in the order of their voters."""
    said = [log[place + step] for _, place, log in voters]
    if said.count(said[0]) == len(said) and said[0] != SEPARATOR:
        return [(sum([voter[0] for voter in voters]), said[0], voters)]
    camps: dict[int, list[Voter]] = {}
    for token, voter in zip(said, voters, strict=True):
        if token != SEPARATOR:
            camps.setdefault(token, []).append(voter)
    weighed = [(sum([voter[0] for voter in camp]), token, camp) for token, camp in camps.items()]
    return sorted(weighed, key=itemgetter(0), reverse=True)
