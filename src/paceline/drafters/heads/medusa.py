"""Further heads on the target's last hidden state guess the places to come; see heads/medusa.py."""

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
    """The last row seen of a sequence, and what the heads say of it."""

    position: int
    hidden: Tensor  # [1, width]
    rows: list[Floats] | None = None  # of each head, over the target's vocabulary


class MedusaDrafter(Drafter):
    """The network stays where it is: it should be where the target is."""

    name = "medusa"

    def __init__(self, net: MedusaHead) -> None:
        self.net = net.eval()
        self.taps = net.shape.taps
        self._ids = net.draft_ids.numpy(force=True)
        self._last: dict[str, _Last] = {}

    def end(self, seq: Seq) -> None:
        self._last.pop(seq.id, None)

    def on_hidden(self, hidden_rows: Sequence[HiddenRows]) -> None:
        for s in hidden_rows:
            rows = s.hidden[self.taps[-1]]
            self._last[s.seq.id] = _Last(s.start + len(rows) - 1, rows[-1:].clone())

    @torch.inference_mode()
    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        ready = [ask for ask in asks if self._ready(ask.seq)]
        new = [last for ask in ready if (last := self._last[ask.seq.id]).rows is None]
        if new:
            self._say(new)
        drafts = grow(ready, self._look, self.name, self.net.shape.vocab)
        of = {ask.seq.id: draft for ask, draft in zip(ready, drafts, strict=True)}
        return [of.get(ask.seq.id, NO_DRAFT) for ask in asks]

    def _ready(self, seq: Seq) -> bool:
        last = self._last.get(seq.id)
        return last is not None and last.position == len(seq.tokens) - 2

    def _say(self, new: Sequence[_Last]) -> None:
        hidden = torch.cat([last.hidden for last in new]).to(self.net.draft_ids.device)
        logits: Floats = self.net(hidden).numpy(force=True)
        for last, said in zip(new, logits, strict=True):
            whole = np.full((len(said), self.net.shape.vocab), -np.inf, np.float32)
            whole[:, self._ids] = said
            last.rows = list(whole)

    def _look(self, spots: Sequence[Position]) -> list[tuple[Floats | None, None]]:
        return [(self._row(spot), None) for spot in spots]

    def _row(self, spot: Position) -> Floats | None:
        rows = self._last[spot.ask.seq.id].rows
        place = len(spot.written)
        return rows[place] if rows is not None and place < len(rows) else None
