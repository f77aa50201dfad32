"""Serves Medusa heads (arXiv 2401.10774): one per position, on the target's last hidden state."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.heads.tree_growth import Position, grow
from paceline.heads.medusa import MedusaHead
from paceline.sampling import Floats
from paceline.types import NO_DRAFT, Ask, Draft, Drafter, HiddenRows, Seq


@dataclass(slots=True)
class _Last:
    """The last hidden row of a sequence, and the logits of the heads for it."""

    position: int
    hidden: Tensor  # [1, width]
    rows: list[Floats] | None = None  # of each head, [vocab]


class MedusaDrafter(Drafter):
    """The head stays on its device, which should be the target's."""

    name = "medusa"

    def __init__(self, net: MedusaHead) -> None:
        self.net = net.eval()
        self.taps = net.shape.taps
        self._ids = net.draft_ids.numpy(force=True)
        self._last: dict[str, _Last] = {}

    def end(self, seq: Seq) -> None:
        self._last.pop(seq.id, None)

    def on_hidden(self, hidden_rows: Sequence[HiddenRows]) -> None:
        for part in hidden_rows:
            rows = part.hidden[self.taps[-1]]
            self._last[part.seq.id] = _Last(part.start + len(rows) - 1, rows[-1:].clone())

    @torch.inference_mode()
    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        ready = [ask for ask in asks if self.ready(ask.seq)]
        new = [last for ask in ready if (last := self._last[ask.seq.id]).rows is None]
        if new:
            self._compute(new)
        drafts = grow(ready, self._logits_at, self.name, self.net.shape.vocab)
        of = {ask.seq.id: draft for ask, draft in zip(ready, drafts, strict=True)}
        return [of.get(ask.seq.id, NO_DRAFT) for ask in asks]

    def ready(self, seq: Seq) -> bool:
        last = self._last.get(seq.id)
        return last is not None and last.position == len(seq.tokens) - 2

    def _compute(self, new: Sequence[_Last]) -> None:
        hidden = torch.cat([last.hidden for last in new]).to(self.net.draft_ids.device)
        logits: Floats = self.net(hidden).numpy(force=True)
        for last, of_heads in zip(new, logits, strict=True):
            whole = np.full((len(of_heads), self.net.shape.vocab), -np.inf, np.float32)
            whole[:, self._ids] = of_heads
            last.rows = list(whole)

    def _logits_at(self, positions: Sequence[Position]) -> list[tuple[Floats | None, None]]:
        return [(self._row(position), None) for position in positions]

    def _row(self, position: Position) -> Floats | None:
        rows = self._last[position.ask.seq.id].rows
        ahead = len(position.written)
        return rows[ahead] if rows is not None and ahead < len(rows) else None
