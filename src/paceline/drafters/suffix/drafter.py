"""SuffixDecoding (arXiv 2411.04975): drafts what followed the longest matches of the current context.

Special here: a suffix array instead of a suffix tree, a weighted vote of the best matches instead of counts,
and memories that never cross tenants.
"""

from array import array
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from heapq import heappop, heappush
from operator import itemgetter
from pathlib import Path
from typing import Final, TypeAlias

from paceline.config import require_min, warn_renamed
from paceline.drafters.suffix.index import SEPARATOR, ContextIndex, Match
from paceline.drafters.suffix.memory import Memory, load, save
from paceline.types import NO_DRAFT, ROOT, Ask, Cursor, Draft, Drafter, Seq, common_prefix

WINDOW: Final = 6  # neighbours in the index compared on each side of the context
VOTERS: Final = 4  # matches that vote
# Fitted on recorded agent traffic, so that chances are calibrated.
FADE: Final = 0.6  # weight of a match as a share of the one before it
REACH: Final = 1.5  # factor on the weight for one more matching token
DOUBT: Final = 0.8  # weight of all of them being wrong, divided by the matching tokens

Voter: TypeAlias = "tuple[float, int, array[int]]"  # weight, position of its first vote, its log
Camp: TypeAlias = tuple[float, int, list[Voter], Cursor | None]  # weight, token, voters, state after it
Node: TypeAlias = tuple[int, int, float]  # token, parent, chance given the parent


@dataclass(frozen=True, slots=True)
class SuffixSettings:
    remember: bool = True  # finished sequences are used for later ones of their tenant
    max_tokens: int = 1_000_000  # remembered, of all tenants together; the oldest go first
    max_depth: int = 32  # tokens of context that are compared
    min_chance: float = 0.1  # a node less likely than this to be accepted is not drafted
    learn: InitVar[bool | None] = None  # the name of `remember` before 0.2

    def __post_init__(self, learn: bool | None) -> None:
        if learn is not None:
            warn_renamed("learn", "remember", stacklevel=4)
            object.__setattr__(self, "remember", learn)
        require_min(self, max_tokens=1, max_depth=1, min_chance=0)


@dataclass(slots=True)
class _Own:
    """The tokens of a sequence that its tenant's memory did not hold when it began."""

    index: ContextIndex
    indexed: int  # tokens of the sequence in the index or the memory


class Suffix(Drafter):
    name = "suffix"

    def __init__(self, settings: SuffixSettings | None = None) -> None:
        self.settings = settings or SuffixSettings()
        self.memory = Memory(self.settings.max_tokens, self.settings.max_depth)
        self._own: dict[str, _Own] = {}

    def save(self, path: Path, tokenizer: str) -> None:
        """Writes the memory to one file, for this tokenizer's fingerprint only."""
        save(self.memory, path, tokenizer)

    def load(self, path: Path, tokenizer: str) -> None:
        """Replaces the memory by that of a file."""
        self.memory = load(path, tokenizer, self.settings.max_tokens, self.settings.max_depth)

    def begin(self, seq: Seq) -> None:
        self._own.pop(seq.id, None)

    def end(self, seq: Seq) -> None:
        self._own.pop(seq.id, None)
        if self.settings.remember and seq.remember and not seq.anonymous:
            self.memory.learn(seq.tenant, seq.tokens)

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._draft(ask) if ask.budget > 0 else NO_DRAFT for ask in asks]

    def _draft(self, ask: Ask) -> Draft:
        matches, width = self._matches(ask), ask.seq.spec.tree_width
        if not matches:
            return NO_DRAFT
        nodes = elect(matches, ask.budget, width, self.settings.min_chance, ask.cursor)
        if not nodes:
            return NO_DRAFT
        tokens, parents, chances = zip(*nodes, strict=True)
        return Draft(tokens, parents if width > 1 else None, (self.name,) * len(nodes), chances)

    def _matches(self, ask: Ask) -> list[Match]:
        """Longest first; of equals the sequence's own before remembered ones, later before earlier."""
        context = [*ask.seq.tokens[-self.settings.max_depth :], *ask.after]
        own = self._catch_up(ask.seq)
        matches = own.nearest(context, WINDOW, rank=1)
        past = self.memory.index(ask.seq.tenant)
        if past:
            matches += past.nearest(context, WINDOW, rank=0)
        matches.sort(reverse=True)
        return matches[:VOTERS]

    def _catch_up(self, seq: Seq) -> ContextIndex:
        own = self._own.get(seq.id)
        if own is None:
            own = self._own[seq.id] = self._start(seq)
        own.index.extend(seq.tokens[own.indexed :])
        own.indexed = len(seq.tokens)
        return own.index

    def _start(self, seq: Seq) -> _Own:
        depth = self.settings.max_depth
        start = self.memory.known(seq.tenant, seq.tokens)
        index = ContextIndex(depth)
        index.open(seq.tokens[max(0, start - depth) : start])
        return _Own(index, start)


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
            weight = sum([voter[0] for voter in voters])
            agreed = _unanimous(voters, depth, budget - len(nodes))
            for token in agreed if at is None else _valid_prefix(agreed, at):
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
            camps = _valid(camps, at)
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
    with_chances = [(sum([voter[0] for voter in camp]), token, camp, None) for token, camp in camps.items()]
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
