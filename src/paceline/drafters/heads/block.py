"""A trained network fills the whole block of guesses in one pass; see heads/block.py for what it is.

It reads the target's hidden states as they come and keeps what its layers make of them. A round is one pass
for all sequences, then a table look-up for each guess, so that a guess knows the one before it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from torch import Tensor

from paceline.drafters.heads.head_cache import DEFAULT_POSITIONS, HeadCache
from paceline.drafters.heads.tree_growth import Position, grow
from paceline.drafters.support.draft_sampling import needs_q
from paceline.drafters.support.grammar_filter import unforced, valid_prefix
from paceline.errors import ConstraintError
from paceline.heads.calibration import Calibration, identity_calibration
from paceline.heads.runner import (
    AnchorContext,
    BlockOutput,
    BlockRunner,
    CacheRows,
    ChainStart,
    SampleCall,
    TapInput,
)
from paceline.sampling import CHOICE, Floats, chooser, noise_key
from paceline.sampling.distribution import penalises
from paceline.types import NO_DRAFT, Ask, Bits, Draft, Drafter, HiddenRows, Seq


@dataclass(frozen=True, slots=True)
class _Block:
    length: int  # of the text it follows
    filled: BlockOutput
    said: dict[tuple[int, ...], tuple[Floats, float]] = field(default_factory=dict)  # after these guesses


@dataclass(slots=True)
class _Unread:
    """What was seen of a sequence and not read yet."""

    start: int  # positions
    stop: int
    parts: list[tuple[int, int, int, Mapping[int, Tensor]]] = field(default_factory=list)


def _together(seen: HiddenRows) -> tuple[int, int, Mapping[int, Tensor]]:
    """States in which the rows seen lie one after the other: the first of them, how many, and all states."""
    rows = seen.rows
    if isinstance(rows, slice):
        return rows.start, rows.stop - rows.start, seen.states
    hidden = seen.hidden
    return 0, len(next(iter(hidden.values()))), hidden


_NOTHING: Final[tuple[Floats | None, float]] = (None, 0.0)
MAX_UNREAD_ROWS: Final = 16  # rows of a sequence
MIN_BLOCK_ROWS: Final = 4  # of a block: it was not trained with far fewer


class BlockDrafter(Drafter):
    name = "block"

    def __init__(
        self, runner: BlockRunner, calibration: Calibration | None = None, remembered: int = DEFAULT_POSITIONS
    ) -> None:
        """remembered: positions of ended sequences: see Kept."""
        shape = runner.shape
        self.taps = shape.taps
        self.calibration = calibration or identity_calibration(shape.block)
        self.runner = runner
        self._window, self._size, self._vocab = shape.window, shape.block, shape.vocab
        self._ids = runner.draft_ids.numpy(force=True)
        self._words, self._bits = self._ids // 32, (self._ids % 32).astype(np.uint32)  # of a mask
        rows = (shape.layers, 2, shape.kv_heads, shape.head_dim)
        self._kept = HeadCache(rows, remembered, like=runner.like)
        self._blocks: dict[str, _Block] = {}
        self._unread: dict[str, _Unread] = {}

    def begin(self, seq: Seq) -> None:
        self._read_now(list(self._unread))
        self._kept.begin(seq)

    def end(self, seq: Seq) -> None:
        self._blocks.pop(seq.id, None)
        try:
            self._read_now([seq.id])
        finally:
            self._kept.end(seq)

    def on_hidden(self, hidden_rows: Sequence[HiddenRows]) -> None:
        """A few rows wait for the next draft, in whose pass they cost little."""
        many = []
        for s in hidden_rows:
            of, (first, count, states) = s.seq.id, _together(s)
            waiting = self._unread.get(of)
            if waiting is None or waiting.stop != s.start:
                if waiting is not None:
                    self._read_now([of])
                waiting = self._unread[of] = _Unread(s.start, s.start)
            waiting.stop += count
            waiting.parts.append((s.start, first, count, states))
            if waiting.stop - waiting.start > MAX_UNREAD_ROWS:
                many.append(of)
        if many:
            self._read_now(many)

    def _read_now(self, ids: Sequence[str]) -> None:
        parts = self._parts(ids)
        if parts:
            with self._dropped_if_broken(ids):
                self.runner.read(parts)

    @contextmanager
    def _dropped_if_broken(self, ids: Sequence[str]) -> Iterator[None]:
        """Rows there is room for and that nobody filled would be taken for what was read."""
        try:
            yield
        except BaseException:
            for seq_id in ids:
                self._kept.drop(seq_id)
                self._blocks.pop(seq_id, None)
            raise

    def _parts(self, ids: Sequence[str]) -> list[TapInput]:
        """What waits to be read of these sequences, and the room for what is made of it."""
        parts = []
        for seq_id in ids:
            waiting = self._unread.pop(seq_id, None)
            if waiting is not None and self._kept.last(seq_id) > -2:
                count = waiting.stop - waiting.start
                whole, row = self._kept.room(seq_id, waiting.start, count, self.runner.like)
                for at, first, n, states in waiting.parts:
                    parts.append(TapInput(at, states, CacheRows(whole, row, n), first))
                    row += n
        return parts

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        waiting = [ask.seq.id for ask in asks if ask.seq.id in self._unread]
        with self._dropped_if_broken(waiting):
            return self._drafts(asks, self._parts(waiting))

    def _drafts(self, asks: Sequence[Ask], parts: Sequence[TapInput]) -> list[Draft]:
        ready = [ask for ask in asks if self._ready(ask)]
        new = [ask for ask in ready if self._missing(ask)]
        simple = [ask for ask in ready if self._is_simple(ask)]
        if ready and len(new) == len(simple) == len(ready):
            drafts = self._guesses(ready, parts)
        else:
            if parts:
                self.runner.read(parts)
            for slots in {self._slots(ask) for ask in new}:  # what is drawn with a q must not hang on others
                self._fill([ask.seq for ask in new if self._slots(ask) == slots], slots)
            others = [ask for ask in ready if not self._is_simple(ask)]
            drafts = [*self._chains(simple), *self._grown(others)]
            ready = [*simple, *others]
        of = {ask.seq.id: draft for ask, draft in zip(ready, drafts, strict=True)}
        bound = [ask for ask in simple if ask.cursor is not None]
        of |= {ask.seq.id: self._mended(ask, of[ask.seq.id]) for ask in bound}
        return [of.get(ask.seq.id, NO_DRAFT) for ask in asks]

    def _mended(self, ask: Ask, chain: Draft) -> Draft:
        """Where the grammar does not take the chain, the best that it does, and a new chain from there."""
        tokens, scores, rest = list[int](), list[float](), ask
        while rest.cursor is not None and not rest.cursor.finished:
            taken, at = valid_prefix(rest.cursor, chain.tokens, until_forced=ask.forced_budget > 0)
            tokens += chain.tokens[:taken]
            scores += chain.scores[:taken]
            if taken == len(chain) or at.finished or (taken and ask.forced_budget > 0 and at.forced()):
                break
            here = replace(ask, after=(*ask.after, *tokens), cursor=at, budget=1)
            one = self._allowed(here)
            tokens += one.tokens
            scores += one.scores
            left = self._wanted(ask) - len(tokens)
            if not one.tokens or not left:
                break
            rest = replace(
                here, after=(*here.after, *one.tokens), cursor=valid_prefix(at, one.tokens)[1], budget=left
            )
            if rest.cursor is None or (ask.forced_budget > 0 and rest.cursor.forced()):
                break
            (chain,) = self._chains([rest])
        return Draft(tuple(tokens), None, (self.name,) * len(tokens), tuple(scores))

    def _allowed(self, ask: Ask) -> Draft:
        """The one guess that `grow` would give, without a row of the whole vocabulary where it can be."""
        if ask.seq.params.temperature > 0 or ask.cursor is None or len(ask.after) >= self._size:
            return self._grown([ask])[0]
        mask: Bits = np.zeros((self._vocab + 31) // 32, np.uint32)
        try:
            bound = ask.cursor.fill(mask)
        except ConstraintError:  # which ends the output only if it comes by here
            return NO_DRAFT
        (row,), (logit,) = self.runner.look([self._place(ask, ask.after)])
        if bound:
            row[(mask[self._words] >> self._bits & 1) == 0] = -np.inf
        best = int(row.argmax())
        if row[best] == -np.inf:
            return NO_DRAFT
        score = unforced(self.calibration.chance(len(ask.after), logit))
        return Draft((int(self._ids[best]),), None, (self.name,), (score,))

    def _ready(self, ask: Ask) -> bool:
        """Whether all that stands before the last token has been seen, as far as it ever will be."""
        seen = self._kept.last(ask.seq.id) == len(ask.seq.tokens) - 2
        return seen and len(ask.after) < self._size

    def _slots(self, ask: Ask) -> int:
        """How many rows its block has: those that it may come to."""
        return min(self._size, max(MIN_BLOCK_ROWS, len(ask.after) + ask.budget))

    def _missing(self, ask: Ask) -> bool:
        held = self._blocks.get(ask.seq.id)
        return held is None or held.length != len(ask.seq.tokens) or held.filled.slots < self._slots(ask)

    def _fill(self, seqs: Sequence[Seq], slots: int) -> None:
        """One pass for all of them."""
        filled = self.runner.fill([self._before(seq) for seq in seqs], slots)
        for seq, block in zip(seqs, filled, strict=True):
            self._blocks[seq.id] = _Block(len(seq.tokens), block)

    def _before(self, seq: Seq) -> AnchorContext:
        anchor, old = len(seq.tokens) - 1, self._blocks.get(seq.id)
        positions, rows, first, count = self._kept.since(seq.id, anchor - self._window)
        return AnchorContext(
            seq.tokens[-1], anchor, positions, CacheRows(rows, first, count), old.filled if old else None
        )

    def _guesses(self, asks: Sequence[Ask], parts: Sequence[TapInput]) -> list[Draft]:
        """All that there is to do, at once: the blocks are as large as any must be."""
        sizes, texts = list(map(self._wanted, asks)), [self._before(ask.seq) for ask in asks]
        firsts = [(len(ask.after), (ask.after or ask.seq.tokens)[-1]) for ask in asks]
        draws, slots = list(map(_draw, asks, sizes)), max(map(self._slots, asks))
        filled, said = self.runner.guess(parts, texts, slots, firsts, sizes, draws)
        for ask, block in zip(asks, filled, strict=True):
            self._blocks[ask.seq.id] = _Block(len(ask.seq.tokens), block)
        return [self._chain(*given) for given in zip(asks, sizes, *said, strict=True)]

    def _chains(self, asks: Sequence[Ask]) -> list[Draft]:
        """What `grow` would give, for all of them together."""
        if not asks:
            return []
        sizes = list(map(self._wanted, asks))
        places = [self._place(ask, ask.after) for ask in asks]
        said = self.runner.chains(places, sizes, list(map(_draw, asks, sizes)))
        return [self._chain(*given) for given in zip(asks, sizes, *said, strict=True)]

    def _wanted(self, ask: Ask) -> int:
        return min(ask.budget, self._size - len(ask.after))

    def _chain(self, ask: Ask, size: int, said: Sequence[int], logits: Sequence[float]) -> Draft:
        first = len(ask.after)
        scores = map(unforced, self.calibration.chances(first, logits[:size]))
        return Draft(tuple(said[:size]), None, (self.name,) * size, tuple(scores))

    def _grown(self, asks: Sequence[Ask]) -> list[Draft]:
        foresee = self._foresee if self.runner.prefers_batched_lookup else None
        drafts = grow(asks, self._look, self.name, self._vocab, foresee)
        for ask in asks:
            self._blocks[ask.seq.id].said.clear()  # of a large vocabulary it takes much memory
        return drafts

    def _look(self, spots: Sequence[Position]) -> list[tuple[Floats | None, float]]:
        """Logits over the target's vocabulary; past the block nothing is known."""
        self._foresee(spots)
        return [self._said(spot) for spot in spots]

    def _foresee(self, spots: Sequence[Position]) -> None:
        inside = [spot for spot in spots if len(spot.written) < self._size]
        new = [spot for spot in inside if spot.written not in self._blocks[spot.ask.seq.id].said]
        if not new:
            return
        logits, sure = self.runner.look([self._place(spot.ask, spot.written) for spot in new])
        for spot, row, logit in zip(new, logits, sure, strict=True):
            chance = self.calibration.chance(len(spot.written), logit)
            self._blocks[spot.ask.seq.id].said[spot.written] = row, chance

    def _said(self, spot: Position) -> tuple[Floats | None, float]:
        said = self._blocks[spot.ask.seq.id].said.get(spot.written)
        return _NOTHING if said is None else (self._whole(said[0]), said[1])

    def _place(self, ask: Ask, written: Sequence[int]) -> ChainStart:
        return ChainStart(self._blocks[ask.seq.id].filled, len(written), (written or ask.seq.tokens)[-1])

    def _whole(self, row: Floats) -> Floats:
        whole = np.full(self._vocab, -np.inf, np.float32)
        whole[self._ids] = row
        return whole

    def _is_simple(self, ask: Ask) -> bool:
        """Whether the runner can say a chain of guesses, of which the grammar takes what it takes."""
        params, spec = ask.seq.params, ask.seq.spec
        if spec.tree_width > 1 or needs_q(ask.seq) or ask.budget < 1 or penalises(params):
            return False
        if params.temperature == 0:
            return not params.logit_bias
        cut = params.top_k > 0 or params.top_p < 1 or params.min_p > 0  # by what the grammar allows
        return self.runner.draws and not (cut and ask.cursor) and chooser(params).among is not None


def _draw(ask: Ask, size: int) -> SampleCall | None:
    seq, params = ask.seq, ask.seq.params
    if params.temperature == 0:
        return None
    owner = chooser(params)
    assert owner.among is not None
    place = len(seq.tokens) - seq.prompt_len + len(ask.after)
    keys = [noise_key(params.noise_seed, params.choice, CHOICE, place + i) for i in range(size)]
    return SampleCall(owner.among.function, owner.among.settings, keys, owner)
