"""Chains and trees out of the distributions a head gives for the next positions.

Trees are expanded best-first by the probability of the path, as in EAGLE-2 (arXiv 2406.16858).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, nsmallest
from typing import Final

import numpy as np

from paceline.drafters.support.draft_builder import DraftBuilder
from paceline.drafters.support.draft_sampling import SampledTokens, needs_q, sample_tokens
from paceline.errors import ConstraintError
from paceline.sampling import CHOICE, Floats, History, chooser, noise_key
from paceline.types import ROOT, Ask, Bits, Cursor, Draft


@dataclass(frozen=True, slots=True)
class Position:
    """A position to draft: after the committed text and these tokens."""

    ask: Ask
    written: tuple[int, ...]
    at: Cursor | None  # the grammar state there

    def after(self, token: int) -> "Position | None":
        """The next position. None: nothing follows, or the next token is forced."""
        at = None
        if self.at is not None:
            at = self.at.fork()
            if not at.advance(token) or at.finished or (self.ask.forced_budget > 0 and at.forced()):
                return None
        return Position(self.ask, (*self.written, token), at)


# For each position: logits over the vocabulary (None: the head knows none), and the probability that the best
# token is accepted (None: as the logits say).
LogitsAt = Callable[[Sequence[Position]], Sequence[tuple[Floats | None, float | None]]]
# Called with a tree's next position and those likely to come after it, to compute all of them in one pass.
Prefetch = Callable[[Sequence[Position]], None]
PREFETCH_WIDTH: Final = 8  # positions of a tree computed together: in one pass they cost little more than one


def grow(
    asks: Sequence[Ask], look: LogitsAt, name: str, vocab: int, prefetch: Prefetch | None = None
) -> list[Draft]:
    """A draft for each ask; its cursor does not move."""
    nodes = [DraftBuilder() for _ in asks]
    roots = [(b, root) for b, ask in zip(nodes, asks, strict=True) if (root := _root(ask)) is not None]
    _grow_chains([(b, root) for b, root in roots if not _grows_by_token(root.ask)], look, vocab)
    for b, root in roots:
        if _grows_by_token(root.ask):
            _grow_tree(b, root, look, vocab, prefetch)
    return [b.draft(name) for b in nodes]


def _root(ask: Ask) -> Position | None:
    if ask.budget < 1 or (ask.cursor is not None and ask.cursor.finished):
        return None
    return Position(ask, ask.after, ask.cursor)


def _grows_by_token(ask: Ask) -> bool:
    """True if the shape of the tree may depend on its tokens: not where they are sampled with a q."""
    return ask.seq.spec.tree_width > 1 and not needs_q(ask.seq)


def _grow_chains(roots: Sequence[tuple[DraftBuilder, Position]], look: LogitsAt, vocab: int) -> None:
    """One position of all chains at a time. With a q, siblings are sampled beside the chain, and whether it
    grows depends on no token but those before."""
    tips = [ROOT] * len(roots)
    active = list(zip(range(len(roots)), roots, strict=True))
    while active:
        answers = look([position for _, (_, position) in active])
        following = []
        for (number, (nodes, position)), (row, confidence) in zip(active, answers, strict=True):
            room = position.ask.budget - len(nodes)
            width = min(position.ask.seq.spec.tree_width, room)
            with_chances = confidence is None or width > 1
            sampled = _sampled(row, position, width, vocab, with_chances)
            if not sampled.tokens:
                continue
            parent = tips[number]
            tips[number] = len(nodes)
            for token, score in zip(sampled.tokens, _scores(sampled, confidence), strict=True):
                nodes.add(parent, token, score)
            nodes.q.extend(sampled.q)
            full = len(nodes) >= position.ask.budget
            after = None if full else position.after(sampled.tokens[0])
            if after is not None:
                following.append((number, (nodes, after)))
        active = following


def _grow_tree(
    nodes: DraftBuilder, root: Position, look: LogitsAt, vocab: int, prefetch: Prefetch | None
) -> None:
    """The most likely nodes, as far as the budget goes; a node's chance falls along its path."""
    budget = root.ask.budget
    queue: list[tuple[float, int, int, int, float, Position]] = []  # -chance, age, parent ...
    age = 0

    def expand(position: Position, parent: int, chance: float) -> None:
        nonlocal age
        if prefetch is not None:
            best = nsmallest(min(PREFETCH_WIDTH, budget - len(nodes)) - 1, queue)
            others = [p for _, _, _, token, _, before in best if (p := before.after(token)) is not None]
            prefetch([position, *others])
        row, confidence = look([position])[0]
        sampled = _sampled(row, position, position.ask.seq.spec.tree_width, vocab, with_chances=True)
        for token, score in zip(sampled.tokens, _scores(sampled, confidence), strict=True):
            age += 1
            heappush(queue, (-chance * score, age, parent, token, score, position))

    expand(root, ROOT, 1.0)
    while queue and len(nodes) < budget:
        minus_chance, _, parent, token, score, before = heappop(queue)
        node = nodes.add(parent, token, score)
        after = before.after(token) if len(nodes) < budget else None
        if after is not None:
            expand(after, node, -minus_chance)


def _sampled(
    row: Floats | None, position: Position, width: int, vocab: int, with_chances: bool
) -> SampledTokens:
    """Tokens the head can propose; none where the grammar allows nothing of its vocabulary."""
    nothing = SampledTokens([], [], [])
    if row is None:
        return nothing
    try:
        mask = _mask(position.at, vocab)
    except ConstraintError:  # raised again if the output gets here
        return nothing
    seq = position.ask.seq
    if width == 1 and not with_chances and seq.params.temperature > 0 and not needs_q(seq):
        sampled = SampledTokens([_choice(row, position, mask)], [], [])
    else:
        sampled = sample_tokens(row, seq, position.written, width, mask, with_chances)
    known = sum(1 for token in sampled.tokens if row[token] > -np.inf)  # the others come last
    return SampledTokens(sampled.tokens[:known], sampled.chances[:known], sampled.q[:known])


def _choice(row: Floats, position: Position, mask: Bits | None) -> int:
    """The one token that `sample_tokens` would give, without ranking all the others."""
    seq = position.ask.seq
    index = len(seq.tokens) - seq.prompt_len + len(position.written)
    key = noise_key(seq.params.noise_seed, seq.params.choice, CHOICE, index, 0)
    return chooser(seq.params)(row, key, History(seq.tokens, seq.prompt_len, position.written), mask)


def _scores(sampled: SampledTokens, confidence: float | None) -> list[float]:
    """The head's own confidence for the first; the others share the rest by their chances."""
    if confidence is None:
        return sampled.chances
    rest = max(1e-9, 1 - sampled.chances[0]) if sampled.chances else 1.0
    others = [(1 - confidence) * min(1.0, chance / rest) for chance in sampled.chances[1:]]
    return [confidence, *others][: len(sampled.tokens)]


def _mask(at: Cursor | None, vocab: int) -> Bits | None:
    if at is None:
        return None
    row: Bits = np.zeros((vocab + 31) // 32, np.uint32)
    return row if at.fill(row) else None
