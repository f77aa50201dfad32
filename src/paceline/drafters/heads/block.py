"""Serves block heads (DFlash, DSpark): one pass drafts a whole block; see heads/block.py for the network.

The head turns the target's hidden states into cache rows as they come. A draft is one pass for all sequences,
then a table look-up for each token, so that a token depends on the one before it.
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
    output: BlockOutput
    logits: dict[tuple[int, ...], tuple[Floats, float]] = field(
        default_factory=dict
    )  # by tokens drafted before


@dataclass(slots=True)
class _PendingRows:
    """Hidden rows of a sequence that have no cache rows yet."""

    start: int  # positions
    stop: int
    parts: list[tuple[int, int, int, Mapping[int, Tensor]]] = field(
        default_factory=list
    )  # start, first, count


def _contiguous(hidden_rows: HiddenRows) -> tuple[int, int, Mapping[int, Tensor]]:
    """States in which the selected rows are contiguous: index of the first, how many, and all states."""
    rows = hidden_rows.rows
    if isinstance(rows, slice):
        return rows.start, rows.stop - rows.start, hidden_rows.states
    hidden = hidden_rows.hidden
    return 0, len(next(iter(hidden.values()))), hidden


_NO_LOGITS: Final[tuple[Floats | None, float]] = (None, 0.0)
MAX_PENDING: Final = 64  # hidden rows of a sequence that wait for its next draft
MIN_BLOCK_ROWS: Final = 4  # the head was not trained with far fewer


class BlockDrafter(Drafter):
    name = "block"

    def __init__(
        self,
        runner: BlockRunner,
        calibration: Calibration | None = None,
        cached_positions: int = DEFAULT_POSITIONS,
    ) -> None:
        """cached_positions: of ended sequences, see HeadCache."""
        shape = runner.shape
        self.taps = shape.taps
        self.calibration = calibration or identity_calibration(shape.block)
        self.runner = runner
        self._window, self._size, self._vocab = shape.window, shape.block, shape.vocab
        self._ids = runner.draft_ids.numpy(force=True)
        self._mask_words, self._mask_bits = self._ids // 32, (self._ids % 32).astype(np.uint32)
        rows = (shape.layers, 2, shape.kv_heads, shape.head_dim)
        self._cache = HeadCache(rows, cached_positions, like=runner.like)
        self._blocks: dict[str, _Block] = {}
        self._pending: dict[str, _PendingRows] = {}

    def begin(self, seq: Seq) -> None:
        self._cache.begin(seq)

    def ready(self, seq: Seq) -> bool:
        pending, last = self._pending.get(seq.id), len(seq.tokens) - 2
        return (self._cache.last_used(seq.id) if pending is None else pending.stop - 1) == last

    def end(self, seq: Seq) -> None:
        """Rows of an answer without drafts are not worth their time; a prompt may come again."""
        drafted, pending = self._blocks.pop(seq.id, None) is not None, self._pending.get(seq.id)
        try:
            if pending is not None and seq.remember and (drafted or pending.start < seq.prompt_len):
                self._cache_pending([seq.id])
        finally:
            self._pending.pop(seq.id, None)
            self._cache.end(seq)

    def on_hidden(self, hidden_rows: Sequence[HiddenRows]) -> None:
        """A few rows wait for the next draft, in whose pass they cost little."""
        full = []
        for rows in hidden_rows:
            seq_id, (first, count, states) = rows.seq.id, _contiguous(rows)
            pending = self._pending.get(seq_id)
            if pending is None or pending.stop != rows.start:
                if pending is not None:
                    self._cache_pending([seq_id])
                pending = self._pending[seq_id] = _PendingRows(rows.start, rows.start)
            pending.stop += count
            pending.parts.append((rows.start, first, count, states))
            if pending.stop - pending.start > MAX_PENDING:
                full.append(seq_id)
        if full:
            self._cache_pending(full)

    def _cache_pending(self, ids: Sequence[str]) -> None:
        parts = self._parts(ids)
        if parts:
            with self._dropped_on_error(ids):
                self.runner.read(parts)

    @contextmanager
    def _dropped_on_error(self, ids: Sequence[str]) -> Iterator[None]:
        """Rows that were reserved and not filled must not stay in the cache."""
        try:
            yield
        except BaseException:
            for seq_id in ids:
                self._cache.drop(seq_id)
                self._blocks.pop(seq_id, None)
            raise

    def _parts(self, ids: Sequence[str]) -> list[TapInput]:
        """The pending hidden rows of these sequences, with room in the cache for the result."""
        parts = []
        for seq_id in ids:
            pending = self._pending.pop(seq_id, None)
            if pending is not None and self._cache.last(seq_id) > -2:
                count = pending.stop - pending.start
                whole, row = self._cache.room(seq_id, pending.start, count, self.runner.like)
                for at, first, n, states in pending.parts:
                    parts.append(TapInput(at, states, CacheRows(whole, row, n), first))
                    row += n
        return parts

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        pending = [ask.seq.id for ask in asks if ask.seq.id in self._pending]
        with self._dropped_on_error(pending):
            return self._drafts(asks, self._parts(pending))

    def _drafts(self, asks: Sequence[Ask], parts: Sequence[TapInput]) -> list[Draft]:
        ready = [ask for ask in asks if self._ready(ask)]
        new = [ask for ask in ready if self._missing(ask)]
        plain = [ask for ask in ready if self._is_plain_chain(ask)]
        if ready and len(new) == len(plain) == len(ready):
            drafts = self._draft_at_once(ready, parts)
        else:
            if parts:
                self.runner.read(parts)
            # By size of the block: a sampled draft must not depend on other sequences.
            for slots in {self._slots(ask) for ask in new}:
                self._fill([ask.seq for ask in new if self._slots(ask) == slots], slots)
            others = [ask for ask in ready if not self._is_plain_chain(ask)]
            drafts = [*self._chains(plain), *self._grown(others)]
            ready = [*plain, *others]
        of = {ask.seq.id: draft for ask, draft in zip(ready, drafts, strict=True)}
        bound = [ask for ask in plain if ask.cursor is not None]
        of |= {ask.seq.id: self._repaired(ask, of[ask.seq.id]) for ask in bound}
        return [of.get(ask.seq.id, NO_DRAFT) for ask in asks]

    def _repaired(self, ask: Ask, chain: Draft) -> Draft:
        """At the first token that is not grammar-valid: the best valid one, and a new chain from there."""
        tokens, scores, rest = list[int](), list[float](), ask
        while rest.cursor is not None and not rest.cursor.finished:
            taken, at = valid_prefix(rest.cursor, chain.tokens, until_forced=ask.forced_budget > 0)
            tokens += chain.tokens[:taken]
            scores += chain.scores[:taken]
            if taken == len(chain) or at.finished or (taken and ask.forced_budget > 0 and at.forced()):
                break
            here = replace(ask, after=(*ask.after, *tokens), cursor=at, budget=1)
            one = self._best_valid(here)
            tokens += one.tokens
            scores += one.scores
            left = self._length(ask) - len(tokens)
            if not one.tokens or not left:
                break
            rest = replace(
                here, after=(*here.after, *one.tokens), cursor=valid_prefix(at, one.tokens)[1], budget=left
            )
            if rest.cursor is None or (ask.forced_budget > 0 and rest.cursor.forced()):
                break
            (chain,) = self._chains([rest])
        return Draft(tuple(tokens), None, (self.name,) * len(tokens), tuple(scores))

    def _best_valid(self, ask: Ask) -> Draft:
        """The one token that `grow` would draft; if greedy, without logits over the target's vocabulary."""
        if ask.seq.params.temperature > 0 or ask.cursor is None or len(ask.after) >= self._size:
            return self._grown([ask])[0]
        mask: Bits = np.zeros((self._vocab + 31) // 32, np.uint32)
        try:
            bound = ask.cursor.fill(mask)
        except ConstraintError:  # raised again if the output gets here
            return NO_DRAFT
        (row,), (logit,) = self.runner.logits_at([self._chain_start(ask, ask.after)])
        if bound:
            row[(mask[self._mask_words] >> self._mask_bits & 1) == 0] = -np.inf
        best = int(row.argmax())
        if row[best] == -np.inf:
            return NO_DRAFT
        score = unforced(self.calibration.chance(len(ask.after), logit))
        return Draft((int(self._ids[best]),), None, (self.name,), (score,))

    def _ready(self, ask: Ask) -> bool:
        """True if the hidden rows of all tokens but the last have come."""
        complete = self._cache.last(ask.seq.id) == len(ask.seq.tokens) - 2
        return complete and len(ask.after) < self._size

    def _slots(self, ask: Ask) -> int:
        """The number of rows its block needs."""
        return min(self._size, max(MIN_BLOCK_ROWS, len(ask.after) + ask.budget))

    def _missing(self, ask: Ask) -> bool:
        block = self._blocks.get(ask.seq.id)
        return block is None or block.length != len(ask.seq.tokens) or block.output.slots < self._slots(ask)

    def _fill(self, seqs: Sequence[Seq], slots: int) -> None:
        """One pass for all sequences."""
        outputs = self.runner.fill([self._context(seq) for seq in seqs], slots)
        for seq, output in zip(seqs, outputs, strict=True):
            self._blocks[seq.id] = _Block(len(seq.tokens), output)

    def _context(self, seq: Seq) -> AnchorContext:
        anchor, old = len(seq.tokens) - 1, self._blocks.get(seq.id)
        positions, rows, first, count = self._cache.since(seq.id, anchor - self._window)
        return AnchorContext(
            seq.tokens[-1], anchor, positions, CacheRows(rows, first, count), old.output if old else None
        )

    def _draft_at_once(self, asks: Sequence[Ask], parts: Sequence[TapInput]) -> list[Draft]:
        """Cache rows, blocks and chains in one call; the blocks are as large as the largest must be."""
        sizes, texts = list(map(self._length, asks)), [self._context(ask.seq) for ask in asks]
        firsts = [(len(ask.after), (ask.after or ask.seq.tokens)[-1]) for ask in asks]
        calls, slots = list(map(_sample_call, asks, sizes)), max(map(self._slots, asks))
        outputs, chains = self.runner.draft_chains(parts, texts, slots, firsts, sizes, calls)
        for ask, output in zip(asks, outputs, strict=True):
            self._blocks[ask.seq.id] = _Block(len(ask.seq.tokens), output)
        return [self._chain(*parts) for parts in zip(asks, sizes, *chains, strict=True)]

    def _chains(self, asks: Sequence[Ask]) -> list[Draft]:
        """The drafts that `grow` would give, for all asks together."""
        if not asks:
            return []
        sizes = list(map(self._length, asks))
        starts = [self._chain_start(ask, ask.after) for ask in asks]
        chains = self.runner.chains(starts, sizes, list(map(_sample_call, asks, sizes)))
        return [self._chain(*parts) for parts in zip(asks, sizes, *chains, strict=True)]

    def _length(self, ask: Ask) -> int:
        return min(ask.budget, self._size - len(ask.after))

    def _chain(self, ask: Ask, size: int, tokens: Sequence[int], logits: Sequence[float]) -> Draft:
        first = len(ask.after)
        scores = map(unforced, self.calibration.chances(first, logits[:size]))
        return Draft(tuple(tokens[:size]), None, (self.name,) * size, tuple(scores))

    def _grown(self, asks: Sequence[Ask]) -> list[Draft]:
        prefetch = self._prefetch if self.runner.prefers_batched_lookup else None
        drafts = grow(asks, self._logits_at, self.name, self._vocab, prefetch)
        for ask in asks:
            self._blocks[ask.seq.id].logits.clear()  # rows over a large vocabulary take much memory
        return drafts

    def _logits_at(self, positions: Sequence[Position]) -> list[tuple[Floats | None, float]]:
        """Logits over the target's vocabulary; none past the block."""
        self._prefetch(positions)
        return [self._full_logits(position) for position in positions]

    def _prefetch(self, positions: Sequence[Position]) -> None:
        inside = [p for p in positions if len(p.written) < self._size]
        new = [p for p in inside if p.written not in self._blocks[p.ask.seq.id].logits]
        if not new:
            return
        logits, confidences = self.runner.logits_at([self._chain_start(p.ask, p.written) for p in new])
        for p, row, logit in zip(new, logits, confidences, strict=True):
            chance = self.calibration.chance(len(p.written), logit)
            self._blocks[p.ask.seq.id].logits[p.written] = row, chance

    def _full_logits(self, position: Position) -> tuple[Floats | None, float]:
        entry = self._blocks[position.ask.seq.id].logits.get(position.written)
        return _NO_LOGITS if entry is None else (self._over_vocab(entry[0]), entry[1])

    def _chain_start(self, ask: Ask, written: Sequence[int]) -> ChainStart:
        return ChainStart(self._blocks[ask.seq.id].output, len(written), (written or ask.seq.tokens)[-1])

    def _over_vocab(self, row: Floats) -> Floats:
        whole = np.full(self._vocab, -np.inf, np.float32)
        whole[self._ids] = row
        return whole

    def _is_plain_chain(self, ask: Ask) -> bool:
        """True if the runner can make the draft: a chain, repaired afterwards where there is a grammar."""
        params, spec = ask.seq.params, ask.seq.spec
        if spec.tree_width > 1 or needs_q(ask.seq) or ask.budget < 1 or penalises(params):
            return False
        if params.temperature == 0:
            return not params.logit_bias
        cut = params.top_k > 0 or params.top_p < 1 or params.min_p > 0  # which the grammar would change
        return self.runner.samples and not (cut and ask.cursor) and chooser(params).among is not None


def _sample_call(ask: Ask, size: int) -> SampleCall | None:
    seq, params = ask.seq, ask.seq.params
    if params.temperature == 0:
        return None
    owner = chooser(params)
    assert owner.among is not None
    index = len(seq.tokens) - seq.prompt_len + len(ask.after)
    keys = [noise_key(params.noise_seed, params.choice, CHOICE, index + i) for i in range(size)]
    return SampleCall(owner.among.function, owner.among.settings, keys, owner, params.temperature)
