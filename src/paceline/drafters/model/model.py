"""A smaller model with the same tokenizer guesses, sharing the target's noise.

Under `match` it uses the very noise the target will use for the same token ids, so the two agree far more
often than two independent draws would. Under the residual rules it draws with coins of its own and reports q.
Where the output has a grammar, it guesses and draws only among the tokens that may come.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from paceline.drafters.legal import unsure
from paceline.errors import CacheFull, ConstraintError
from paceline.sampling import (
    CHOICE,
    DRAFT,
    Doubles,
    Floats,
    History,
    Key,
    Law,
    greedy,
    law,
    noise_key,
    ranked,
)
from paceline.types import NO_DRAFT, Ask, Bits, Cursor, Draft, Drafter, Feed, Seq, Target


@dataclass(slots=True)
class _Growing:
    """A draft being written: a chain, with siblings beside its nodes if the tree may be wide."""

    ask: Ask
    mirror: Seq  # our model's own view of the sequence; ends with the chain so far
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    q: list[Doubles] = field(default_factory=list)
    tip: int = -1  # the chain's last node
    depth: int = 0
    at: Cursor | None = None  # stands after the chain so far
    chance: float = 1.0  # that the whole chain so far is right, by what our model says
    ended: bool = False  # nothing follows, others are certain of what does, or more is not worth a pass

    @property
    def full(self) -> bool:
        return self.ended or len(self.tokens) >= self.ask.budget

    def follow(self, token: int) -> None:
        """Moves behind the new tip. Whether the chain ends there hangs on no later draw, so q stays right."""
        if self.at is not None:
            self.ended = self.ended or not self.at.advance(token) or self.at.finished
            self.ended = self.ended or (self.ask.certain > 0 and bool(self.at.forced()))


class ModelDrafter(Drafter):
    def __init__(
        self,
        model: Target,
        target_vocab: int,
        prefill_chunk: int = 256,
        cost: float = 0.0,
        name: str = "model",
    ) -> None:
        """cost: of a pass, as a share of the target's; a chain less likely than that grows no further."""
        self.name = name
        self._model = model
        self._cost = cost
        self._vocab = target_vocab
        self._chunk = prefill_chunk
        self._allowed: Bits = np.zeros((target_vocab + 31) // 32, np.uint32)
        self._mirrors: dict[str, Seq] = {}

    def begin(self, seq: Seq) -> None:
        mirror = Seq(seq.id, list(seq.tokens), seq.prompt_len, tenant=seq.tenant)
        if len(seq.tokens) < self._model.max_context:  # what does not fit is not drafted for
            mirror.computed = self._model.open(mirror)
            self._mirrors[seq.id] = mirror

    def end(self, seq: Seq) -> None:
        if self._mirrors.pop(seq.id, None) is not None:
            self._model.close(seq.id)

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        growing = [g for ask in asks if (g := self._start(ask)) is not None]
        active = [g for g in growing if not g.full]
        while active:
            try:
                rows = self._forward([g.mirror for g in active])
            except CacheFull:  # our cache, not the target's: the request goes on without a guess
                return [NO_DRAFT] * len(asks)
            for g, row in zip(active, rows, strict=True):
                self._grow(g, row)
            active = [g for g in active if not g.full]
        done = {g.ask.seq.id: self._finished(g) for g in growing}
        return [done.get(ask.seq.id, NO_DRAFT) for ask in asks]

    def _start(self, ask: Ask) -> _Growing | None:
        mirror = self._mirrored(ask)
        if mirror is None:
            return None
        too_long = len(mirror.tokens) + ask.budget >= self._model.max_context
        if too_long or max(mirror.pending) >= self._model.vocab_size:
            return None
        if ask.cursor is None:
            return _Growing(ask, mirror, depth=len(ask.after))
        at = ask.cursor.fork()
        return _Growing(ask, mirror, depth=len(ask.after), at=at, ended=at.finished)

    def _mirrored(self, ask: Ask) -> Seq | None:
        """The sequence as our model sees it, with the rows that are still right."""
        mirror = self._mirrors.get(ask.seq.id)
        if mirror is None:
            return None
        text = [*ask.seq.tokens, *ask.after]
        same = _common(mirror.tokens[: mirror.computed], text[:-1])
        if same < mirror.computed:
            self._model.keep(mirror.id, same)
            mirror.computed = same
        mirror.tokens[:] = text
        return mirror

    def _forward(self, mirrors: Sequence[Seq]) -> list[Floats]:
        """Feeds all that is pending; the row after each sequence's last token."""
        rows: dict[str, Floats] = {}
        while pending := [m for m in mirrors if m.pending]:
            feeds = [
                Feed(m.id, m.pending[: self._chunk], scored=len(m.pending) <= self._chunk) for m in pending
            ]
            scores = self._model.forward(feeds)
            logits: Floats = scores.logits.numpy(force=True)
            for m, feed, start in zip(pending, feeds, scores.starts, strict=True):
                m.computed += len(feed.tokens)
                self._model.keep(m.id, m.computed)
                if feed.scored:
                    rows[m.id] = logits[start]
        return [rows[m.id] for m in mirrors]

    def _grow(self, g: _Growing, row: Floats) -> None:
        """Adds one node to the chain, and its runners-up as siblings."""
        seq = g.ask.seq
        width = min(seq.spec.tree_width, g.ask.budget - len(g.tokens))
        written = g.mirror.tokens[len(seq.tokens) :]
        row, history = self._padded(row), History(seq.tokens, seq.prompt_len, written)
        try:
            mask = self._mask(g.at)
        except ConstraintError:  # which ends the output only if it comes by here
            g.ended = True
            return
        of = law(row, seq.params, history, mask)
        if seq.params.temperature == 0 and not _needs_q(seq):
            found = greedy(row, seq.params, history, width, mask)
        else:
            found = ranked(of, _key(seq, g.depth), width)
        laws = _without_replacement(of.probabilities(), found) if _needs_q(seq) else []
        found = found[: len(laws)] if _needs_q(seq) else found
        parent, g.tip = g.tip, len(g.tokens)
        g.tokens.extend(found)
        g.parents.extend([parent] * len(found))
        g.scores.extend(unsure(of.probability(token)) for token in found)
        g.q.extend(laws)
        g.depth += 1
        if self._cost:
            g.chance *= _sureness(of, row, seq, history, mask, found[0])
            g.ended = g.chance < self._cost  # this guess stays whatever it says, so q stays right
        g.follow(found[0])
        g.ended = g.ended or found[0] >= self._model.vocab_size  # a mask may leave nothing that we can read
        if not g.full:
            g.mirror.tokens.append(found[0])

    def _mask(self, at: Cursor | None) -> Bits | None:
        """The tokens that may come; good until the next call."""
        if at is None:
            return None
        self._allowed[:] = 0
        return self._allowed if at.fill(self._allowed) else None

    def _padded(self, row: Floats) -> Floats:
        """In the target's vocabulary: ids it lacks are cut off, ids we lack are impossible."""
        missing = max(0, self._vocab - len(row))
        return np.pad(row[: self._vocab], (0, missing), constant_values=-np.inf)

    def _finished(self, g: _Growing) -> Draft:
        q = torch.from_numpy(np.stack(g.q)) if g.q else None
        parents = tuple(g.parents) if g.ask.seq.spec.tree_width > 1 else None
        return Draft(tuple(g.tokens), parents, (self.name,) * len(g.tokens), tuple(g.scores), q)


def _sureness(of: Law, row: Floats, seq: Seq, history: History, mask: Bits | None, token: int) -> float:
    """The probability of a token; where decoding is greedy, what it would have at temperature 1."""
    if seq.params.temperature == 0:
        of = law(row, replace(seq.params, temperature=1.0), history, mask)
    return of.probability(token)


def _needs_q(seq: Seq) -> bool:
    return seq.spec.accept in ("residual", "block")


def _key(seq: Seq, depth: int) -> Key:
    """The noise the target will use at this place; where q counts, coins of this round instead."""
    index = len(seq.tokens) - seq.prompt_len
    stream, where, slot = (DRAFT, index, depth) if _needs_q(seq) else (CHOICE, index + depth, 0)
    return noise_key(seq.params.seed, seq.params.choice, stream, where, slot)


def _without_replacement(p: Doubles, drawn: Sequence[int]) -> list[Doubles]:
    """What each of the siblings was drawn from, its elders being taken; ends where nothing is left."""
    rest, laws = p.copy(), []
    for token in drawn:
        if rest[token] <= 0:
            break
        laws.append(rest / rest.sum())
        rest[token] = 0
    return laws


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)
