"""A single layer goes on from the target's hidden states, a guess at a time; see heads/eagle.py.

It keeps what the layer made of each token of the text. All guesses of one length, of all sequences, are one
pass, and what was made of a guess is remembered while the text stays as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.heads.grow import Spot, grow
from paceline.drafters.heads.kept import Kept
from paceline.heads.eagle import EagleNet, Rows
from paceline.sampling import Floats
from paceline.types import NO_DRAFT, Ask, Draft, Drafter, Seen, Seq

Path = tuple[int, ...]  # guesses after the text
ABREAST: Final = 8  # rows of a tree in one pass: they cost little more than one


@dataclass(frozen=True, slots=True)
class _Guessed:
    """What the net made of the last token of a path."""

    hidden: Tensor  # [width], fed back
    chain: Tensor  # [len(path), 2, kv_heads, head_dim]
    row: Floats  # what follows, over the target's vocabulary


@dataclass(slots=True)
class _Ahead:
    """What is known of the places after a text."""

    hidden: Tensor  # [width], the target's, fused, at the last token but one
    length: int = 0  # of the text
    guessed: dict[Path, _Guessed] = field(default_factory=dict)


class EagleDrafter(Drafter):
    """The network stays where it is: it should be where the target is."""

    name = "eagle"

    def __init__(self, net: EagleNet) -> None:
        shape = net.shape
        self.net = net.eval()
        self.taps = shape.taps
        self._ids = net.draft_ids.numpy(force=True)
        self._kept = Kept((2, shape.kv_heads, shape.head_dim), ahead=1)
        self._ahead: dict[str, _Ahead] = {}

    def begin(self, seq: Seq) -> None:
        self._kept.begin(seq)

    def end(self, seq: Seq) -> None:
        self._kept.end(seq)
        self._ahead.pop(seq.id, None)

    @torch.inference_mode()
    def read(self, seen: Sequence[Seen]) -> None:
        parts = [s.hidden for s in seen]
        sizes = [len(part[self.taps[0]]) for part in parts]
        hidden = {tap: torch.cat([part[tap] for part in parts]).to(self._device) for tap in self.taps}
        fused = self.net.fused(hidden)
        spans = [(s, range(s.start, s.start + n)) for s, n in zip(seen, sizes, strict=True)]
        positions = self._ints([p for _, span in spans for p in span])
        tokens = self._ints([s.seq.tokens[p + 1] for s, span in spans for p in span])
        made = self.net.rows(tokens[None], fused[None], positions[None]).keys_values[0]
        for s, rows, states in zip(seen, torch.split(made, sizes), torch.split(fused, sizes), strict=True):
            self._kept.append(s.seq.id, s.start, rows)
            self._ahead[s.seq.id] = _Ahead(states[-1].clone(), s.start + len(rows) + 1)

    @torch.inference_mode()
    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        ready = [ask for ask in asks if self._ready(ask.seq)]
        drafts = grow(ready, self._look, self.name, self.net.shape.vocab, ABREAST)
        of = {ask.seq.id: draft for ask, draft in zip(ready, drafts, strict=True)}
        return [of.get(ask.seq.id, NO_DRAFT) for ask in asks]

    def _ready(self, seq: Seq) -> bool:
        known = self._ahead.get(seq.id)
        return known is not None and known.length == len(seq.tokens)

    def _look(self, spots: Sequence[Spot]) -> list[tuple[Floats | None, None]]:
        near = [(s.ask.seq, s.written) for s in spots if len(s.written) < self.net.shape.block]
        for depth in range(max((len(path) for _, path in near), default=-1) + 1):
            paths = {(seq.id, path[:depth]): seq for seq, path in near if len(path) >= depth}
            new = [(seq, path) for (name, path), seq in paths.items() if not self._known(name, path)]
            if new:
                self._step(sorted(new, key=lambda one: one[0].id), depth)
        return [(self._row(spot), None) for spot in spots]

    def _known(self, seq_id: str, path: Path) -> bool:
        return path in self._ahead[seq_id].guessed

    def _row(self, spot: Spot) -> Floats | None:
        found = self._ahead[spot.ask.seq.id].guessed.get(spot.written)
        return None if found is None else found.row

    def _step(self, new: Sequence[tuple[Seq, Path]], depth: int) -> None:
        """One pass for paths of `depth` guesses, those of one sequence together; those before are known."""
        hidden = torch.stack([self._before(seq, path) for seq, path in new])
        tokens = self._ints([path[-1] if path else seq.tokens[-1] for seq, path in new])
        positions = self._ints([len(seq.tokens) - 2 + depth for seq, _ in new])
        rows = self.net.rows(tokens[None], hidden[None], positions[None])
        out, chains, first = [], [], 0
        for _, group in groupby(new, key=lambda one: one[0].id):
            several = list(group)
            last = first + len(several)
            own = Rows(*(part[:, first:last] for part in (rows.hidden, rows.queries, rows.keys_values)))
            chain = self._chain(several, own)
            out.append(self._forward(several[0][0], own, chain))
            chains += list(chain[0])
            first = last
        states = torch.cat(out)
        logits: Floats = self.net.logits(states).numpy(force=True)
        for (seq, path), state, chain, said in zip(new, states, chains, logits, strict=True):
            whole = np.full(self.net.shape.vocab, -np.inf, np.float32)
            whole[self._ids] = said
            self._ahead[seq.id].guessed[path] = _Guessed(state, chain, whole)

    def _before(self, seq: Seq, path: Path) -> Tensor:
        known = self._ahead[seq.id]
        return known.guessed[path[:-1]].hidden if path else known.hidden

    def _chain(self, several: Sequence[tuple[Seq, Path]], own: Rows) -> Tensor:
        """[1, m, depth, ...]: what each of these paths of one sequence sees of itself; () is of the text."""
        before = [self._ahead[seq.id].guessed[path[:-1]].chain for seq, path in several if path]
        if not before:
            return own.keys_values[:, :, None][:, :, :0]
        return torch.cat((torch.stack(before)[None], own.keys_values[:, :, None]), 2)

    def _forward(self, seq: Seq, rows: Rows, chain: Tensor) -> Tensor:
        """[m, width]"""
        last = len(seq.tokens) - 2
        positions, text = self._kept.rows(seq.id)
        first = int(torch.searchsorted(positions, last - self.net.shape.window + 1))
        places = positions[None, first:].to(self._device)
        at = places.new_full((1, rows.hidden.shape[1]), last)
        out: Tensor = self.net(rows, text[None, first:], self.net.sees(at, places), chain)
        return out[0]

    @property
    def _device(self) -> torch.device:
        return self.net.draft_ids.device

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
