"""A trained network fills the whole block of guesses in one pass; see heads/block.py for what it is.

It reads the target's hidden states as they come and keeps what its layers make of them. A round is one pass
for all sequences, then a table look-up for each guess, so that a guess knows the one before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.drawn import needs_q
from paceline.drafters.heads.grow import Spot, grow
from paceline.drafters.heads.kept import Kept
from paceline.drafters.legal import unsure
from paceline.heads.block import BlockNet, KeysValues
from paceline.heads.calibration import Calibration, as_it_is
from paceline.sampling import Floats
from paceline.sampling.law import penalises
from paceline.types import NO_DRAFT, Ask, Draft, Drafter, Seen, Seq


@dataclass(frozen=True, slots=True)
class _Block:
    length: int  # of the text it follows
    base: Tensor  # [block, draft_vocab] float32
    hidden: Tensor  # [block, width]


_NOTHING: Final[tuple[Floats | None, float]] = (None, 0.0)


class BlockDrafter(Drafter):
    """The network stays where it is: it should be where the target is."""

    name = "block"

    def __init__(self, net: BlockNet, calibration: Calibration | None = None) -> None:
        shape = net.shape
        self.net = net.eval()
        self.taps = shape.taps
        self.calibration = calibration or as_it_is(shape.block)
        self._ids = net.draft_ids.numpy(force=True)
        self._kept = Kept((shape.layers, 2, shape.kv_heads, shape.head_dim))
        self._blocks: dict[str, _Block] = {}

    def begin(self, seq: Seq) -> None:
        self._kept.begin(seq)

    def end(self, seq: Seq) -> None:
        self._kept.end(seq)
        self._blocks.pop(seq.id, None)

    @torch.inference_mode()
    def read(self, seen: Sequence[Seen]) -> None:
        device = self.net.draft_ids.device
        sizes = [len(next(iter(s.hidden.values()))) for s in seen]
        positions = [torch.arange(s.start, s.start + n) for s, n in zip(seen, sizes, strict=True)]
        hidden = {tap: torch.cat([s.hidden[tap] for s in seen]).to(device) for tap in self.taps}
        at = torch.cat(positions)[None].to(device)
        layers = self.net.context(self.net.features(hidden)[None], at)
        rows = torch.stack([torch.stack(kv) for kv in layers])  # [layers, 2, 1, kv_heads, rows, head_dim]
        rows = rows[:, :, 0].permute(3, 0, 1, 2, 4)
        for s, part in zip(seen, torch.split(rows, sizes), strict=True):
            self._kept.append(s.seq.id, s.start, part)

    @torch.inference_mode()
    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        ready = [ask for ask in asks if self._ready(ask)]
        new = [ask.seq for ask in ready if self._missing(ask.seq)]
        if new:
            self._fill(new)
        simple = [ask for ask in ready if _is_simple(ask)]
        others = [ask for ask in ready if not _is_simple(ask)]
        drafts = [*self._chains(simple), *grow(others, self._look, self.name, self.net.shape.vocab)]
        of = {ask.seq.id: draft for ask, draft in zip((*simple, *others), drafts, strict=True)}
        return [of.get(ask.seq.id, NO_DRAFT) for ask in asks]

    def _ready(self, ask: Ask) -> bool:
        """Whether all that stands before the last token has been seen, as far as it ever will be."""
        positions, _ = self._kept.rows(ask.seq.id)
        seen = len(positions) > 0 and int(positions[-1]) == len(ask.seq.tokens) - 2
        return seen and len(ask.after) < self.net.shape.block

    def _missing(self, seq: Seq) -> bool:
        held = self._blocks.get(seq.id)
        return held is None or held.length != len(seq.tokens)

    def _fill(self, seqs: Sequence[Seq]) -> None:
        """One pass for all of them."""
        net, device = self.net, self.net.draft_ids.device
        positions, context = self._context(seqs)
        tokens = torch.tensor([[seq.tokens[-1]] for seq in seqs], device=device)
        anchors = torch.tensor([[len(seq.tokens) - 1] for seq in seqs], device=device)
        hidden = net.block(tokens, anchors, context, net.sees(anchors, positions))[:, 0]
        base = net.base_logits(hidden)
        for i, seq in enumerate(seqs):
            self._blocks[seq.id] = _Block(len(seq.tokens), base[i], hidden[i])

    def _context(self, seqs: Sequence[Seq]) -> tuple[Tensor, list[KeysValues]]:
        """What is seen of each text: positions [b, n], -1 for padding, and each layer's keys and values."""
        window, device = self.net.shape.window, self.net.draft_ids.device
        held = [self._kept.rows(seq.id) for seq in seqs]
        last = [(positions[-window:], rows[-window:]) for positions, rows in held]
        longest = max(len(positions) for positions, _ in last)
        positions = torch.full((len(seqs), longest), -1)
        rows = last[0][1].new_zeros(len(seqs), longest, *last[0][1].shape[1:])
        for i, (at, row) in enumerate(last):
            positions[i, : len(at)] = at
            rows[i, : len(at)] = row
        layers = rows.permute(2, 3, 0, 4, 1, 5)  # [layers, 2, b, kv_heads, n, head_dim]
        return positions.to(device), [(layer[0], layer[1]) for layer in layers]

    def _chains(self, asks: Sequence[Ask]) -> list[Draft]:
        """What `grow` would give, for all of them together and without leaving the device."""
        if not asks:
            return []
        net, device = self.net, self.net.draft_ids.device
        blocks = [self._blocks[ask.seq.id] for ask in asks]
        base, hidden = torch.stack([b.base for b in blocks]), torch.stack([b.hidden for b in blocks])
        sizes = [min(ask.budget, net.shape.block - len(ask.after)) for ask in asks]
        place = torch.tensor([len(ask.after) for ask in asks], device=device)
        previous = torch.tensor([(ask.after or ask.seq.tokens)[-1] for ask in asks], device=device)
        row, tokens, sure = torch.arange(len(asks), device=device), [], []
        for step in range(max(sizes)):
            at = (place + step).clamp(max=net.shape.block - 1)
            sure.append(net.confidence(hidden[row, at], previous))
            previous = net.draft_ids[(base[row, at] + net.markov(previous)).argmax(-1)]
            tokens.append(previous)
        said, logits = torch.stack(tokens, 1).tolist(), torch.stack(sure, 1).tolist()
        return [self._chain(*given) for given in zip(asks, sizes, said, logits, strict=True)]

    def _chain(self, ask: Ask, size: int, said: Sequence[int], logits: Sequence[float]) -> Draft:
        first = len(ask.after)
        scores = [unsure(self.calibration.chance(first + i, logit)) for i, logit in enumerate(logits[:size])]
        return Draft(tuple(said[:size]), None, (self.name,) * size, tuple(scores))

    def _look(self, spots: Sequence[Spot]) -> list[tuple[Floats | None, float]]:
        """Logits over the target's vocabulary; past the block nothing is known."""
        net, found = self.net, [_NOTHING] * len(spots)
        inside = [(i, spot) for i, spot in enumerate(spots) if len(spot.written) < net.shape.block]
        if not inside:
            return found
        blocks = [(self._blocks[spot.ask.seq.id], len(spot.written)) for _, spot in inside]
        before = [(spot.written or spot.ask.seq.tokens)[-1] for _, spot in inside]
        previous = torch.tensor(before, device=net.draft_ids.device)
        base = torch.stack([block.base[place] for block, place in blocks])
        hidden = torch.stack([block.hidden[place] for block, place in blocks])
        logits = (base + net.markov(previous)).numpy(force=True)
        sure = net.confidence(hidden, previous).tolist()
        for (i, spot), row, logit in zip(inside, logits, sure, strict=True):
            found[i] = self._whole(row), self.calibration.chance(len(spot.written), logit)
        return found

    def _whole(self, row: Floats) -> Floats:
        whole = np.full(self.net.shape.vocab, -np.inf, np.float32)
        whole[self._ids] = row
        return whole


def _is_simple(ask: Ask) -> bool:
    """Whether the likeliest token of each place is the guess, and nothing else counts."""
    params, spec = ask.seq.params, ask.seq.spec
    free = params.temperature == 0 and not params.logit_bias and not penalises(params)
    return free and ask.cursor is None and spec.tree_width == 1 and not needs_q(ask.seq) and ask.budget > 0
