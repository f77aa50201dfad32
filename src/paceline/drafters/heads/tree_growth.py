"""How drafts grow out of the laws that a head gives for the places to come: chains, or trees."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, nsmallest
from typing import Final

import numpy as np
import torch

from paceline.drafters.support.draft_sampling import Drawn, draw, needs_q
from paceline.drafters.support.grammar_filter import unforced
from paceline.errors import ConstraintError
from paceline.sampling import CHOICE, Doubles, Floats, History, chooser, noise_key
from paceline.types import ROOT, Ask, Bits, Cursor, Draft


@dataclass(frozen=True, slots=True)
class Spot:
    """A place to guess at: after the committed text and these tokens."""

    ask: Ask
    written: tuple[int, ...]
    at: Cursor | None  # stands there

    def after(self, token: int) -> "Spot | None":
        """The next place. None: nothing follows, or others are certain of what does."""
        at = None
        if self.at is not None:
            at = self.at.fork()
            if not at.advance(token) or at.finished or (self.ask.forced_budget > 0 and at.forced()):
                return None
        return Spot(self.ask, (*self.written, token), at)


# What a head says of each spot: logits over the vocabulary, and the chance that its best guess is right, None
# if the logits say it. A spot it can say nothing of has no logits.
Look = Callable[[Sequence[Spot]], Sequence[tuple[Floats | None, float | None]]]
# Told of a tree's next place, and of those that are likely to come after it: to find out about all at once.
Foresee = Callable[[Sequence[Spot]], None]
ABREAST: Final = 8  # places of a tree that are foreseen: in one pass they cost little more than one


@dataclass(slots=True)
class Growing:
    """A draft being written."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    q: list[Doubles] = field(default_factory=list)

    @property
    def room(self) -> int:
        return self.ask.budget - len(self.tokens)

    def add(self, parent: int, token: int, score: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(unforced(score))
        return len(self.tokens) - 1

    def draft(self, name: str) -> Draft:
        chain = self.parents == list(range(ROOT, len(self.tokens) - 1))
        q = torch.from_numpy(np.stack(self.q)) if self.q else None
        sources = (name,) * len(self.tokens)
        return Draft(
            tuple(self.tokens), None if chain else tuple(self.parents), sources, tuple(self.scores), q
        )


def grow(
    asks: Sequence[Ask], look: Look, name: str, vocab: int, foresee: Foresee | None = None
) -> list[Draft]:
    """A draft for each ask; its cursor stays where it is."""
    growing = [Growing(ask) for ask in asks]
    spots = [(g, spot) for g in growing if (spot := _first(g.ask)) is not None]
    _grow_chains([(g, spot) for g, spot in spots if not _wide(g.ask)], look, vocab)
    for g, spot in spots:
        if _wide(g.ask):
            _grow_tree(g, spot, look, vocab, foresee)
    return [g.draft(name) for g in growing]


def _first(ask: Ask) -> Spot | None:
    if ask.budget < 1 or (ask.cursor is not None and ask.cursor.finished):
        return None
    return Spot(ask, ask.after, ask.cursor)


def _wide(ask: Ask) -> bool:
    """Whether the shape of the tree may follow from what is guessed: not where guesses are drawn."""
    return ask.seq.spec.tree_width > 1 and not needs_q(ask.seq)


def _grow_chains(pairs: Sequence[tuple[Growing, Spot]], look: Look, vocab: int) -> None:
    """One place of all of them at a time. Where guesses are drawn, those beside the chain are drawn with it,
    and what grows hangs on no token but those before."""
    tips = [ROOT] * len(pairs)
    active = list(zip(range(len(pairs)), pairs, strict=True))
    while active:
        seen = look([spot for _, (_, spot) in active])
        going = []
        for (number, (g, spot)), (row, sure) in zip(active, seen, strict=True):
            width = min(spot.ask.seq.spec.tree_width, g.room)
            found = _drawn(row, spot, width, vocab, weighed=sure is None or width > 1)
            if not found.tokens:
                continue
            parent = tips[number]
            tips[number] = len(g.tokens)
            for token, score in zip(found.tokens, _scores(found, sure), strict=True):
                g.add(parent, token, score)
            g.q.extend(found.laws)
            follows = spot.after(found.tokens[0]) if g.room > 0 else None
            if follows is not None:
                going.append((number, (g, follows)))
        active = going


def _grow_tree(g: Growing, root: Spot, look: Look, vocab: int, foresee: Foresee | None) -> None:
    """The likeliest nodes, as far as the budget goes; a node's chance to be reached falls along its path."""
    ahead: list[tuple[float, int, int, int, float, Spot]] = []
    count = 0

    def open_up(spot: Spot, parent: int, reached: float) -> None:
        nonlocal count
        if foresee is not None:
            next_best = nsmallest(min(ABREAST, g.room) - 1, ahead)
            others = [s for _, _, _, token, _, before in next_best if (s := before.after(token)) is not None]
            foresee([spot, *others])
        row, sure = look([spot])[0]
        found = _drawn(row, spot, spot.ask.seq.spec.tree_width, vocab, weighed=True)
        for token, score in zip(found.tokens, _scores(found, sure), strict=True):
            count += 1
            heappush(ahead, (-reached * score, count, parent, token, score, spot))

    open_up(root, ROOT, 1.0)
    while ahead and g.room > 0:
        chance, _, parent, token, score, spot = heappop(ahead)
        node = g.add(parent, token, score)
        follows = spot.after(token) if g.room > 0 else None
        if follows is not None:
            open_up(follows, node, -chance)


def _drawn(row: Floats | None, spot: Spot, width: int, vocab: int, weighed: bool) -> Drawn:
    """Guesses the head can have meant; none where the grammar allows nothing that it knows."""
    nothing = Drawn([], [], [])
    if row is None:
        return nothing
    try:
        mask = _mask(spot.at, vocab)
    except ConstraintError:  # which ends the output only if it comes by here
        return nothing
    seq = spot.ask.seq
    if width == 1 and not weighed and seq.params.temperature > 0 and not needs_q(seq):
        found = Drawn([_chosen(row, spot, mask)], [], [])
    else:
        found = draw(row, seq, spot.written, width, mask, weighed)
    meant = sum(1 for token in found.tokens if row[token] > -np.inf)  # the others come last
    return Drawn(found.tokens[:meant], found.chances[:meant], found.laws[:meant])


def _chosen(row: Floats, spot: Spot, mask: Bits | None) -> int:
    """The one token that `draw` would give, without an order of all the others."""
    seq = spot.ask.seq
    place = len(seq.tokens) - seq.prompt_len + len(spot.written)
    key = noise_key(seq.params.seed, seq.params.choice, CHOICE, place, 0)
    return chooser(seq.params)(row, key, History(seq.tokens, seq.prompt_len, spot.written), mask)


def _scores(found: Drawn, sure: float | None) -> list[float]:
    """The head's own confidence for the first; the others share what is left by their chances."""
    if sure is None:
        return found.chances
    rest = max(1e-9, 1 - found.chances[0]) if found.chances else 1.0
    others = [(1 - sure) * min(1.0, chance / rest) for chance in found.chances[1:]]
    return [sure, *others][: len(found.tokens)]


def _mask(at: Cursor | None, vocab: int) -> Bits | None:
    if at is None:
        return None
    row: Bits = np.zeros((vocab + 31) // 32, np.uint32)
    return row if at.fill(row) else None
