"""Attention of a pass, span by span, in an order of sums that depends on nothing but a row's position.

A span is a run of rows of one sequence at consecutive positions. A chain is one span. A tree is one span for
each root-to-leaf path, less what the path shares with the one before it: the spans take turns in the slots
that follow the committed rows, so every row sees exactly what it would see in a chain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.target.eager.linear import RowTile

KEY_TILE: Final = 256  # keys are read and summed in tiles of this many, from position 0 on
# Elements torch computes in one thread (gelu; 32768 for others). It cuts longer tensors anywhere, and the
# elements left over at a cut get a scalar function, which rounds unlike the vector one.
SERIAL: Final = 25600


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads, group size and window of attention."""

    kv_heads: int
    group: int  # query heads that share a key head
    head_dim: int
    scale: float
    window: int  # keys a local layer sees, a row's own included; 0: no layer is local
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: they stay as they are


@dataclass(frozen=True, slots=True)
class Span:
    rows: tuple[int, ...]  # of the pass
    start: int  # position of the first row
    slots: Sequence[int]  # for their keys and values
    keys: slice | Sequence[int]  # slots of positions 0, 1, ...: whole key tiles, whatever fills up the last


@dataclass(frozen=True, slots=True)
class PlacedSpan:
    """A span in its layout, where its rows are a slice."""

    rows: slice  # padding included
    count: int  # padding not included
    slots: Tensor
    keys: slice | Tensor
    masks: tuple[Tensor, Tensor]  # for global and for local layers: [kv_heads, group * rows, keys]


class Layout:
    """The rows of a pass in the order attention wants them: span after span, each padded to the row tile."""

    def __init__(
        self, spans: Sequence[Span], rows: int, tile: RowTile, heads: Heads, device: torch.device
    ) -> None:
        """rows: of the pass, its padding included."""
        order: list[int] = []  # pass row of each layout row
        positions: list[int] = []
        self.row_of = [0] * rows  # layout row of each pass row; padding has none
        self.spans: list[PlacedSpan] = []
        for span in spans:
            first, padded = len(order), tile.padded(len(span.rows))
            for at, row in enumerate(span.rows, first):
                self.row_of[row] = at
            nth = [min(i, len(span.rows) - 1) for i in range(padded)]  # padding repeats the last row
            order += [span.rows[i] for i in nth]
            positions += [span.start + i for i in nth]
            self.spans.append(_placed(span, slice(first, first + padded), positions[first:], heads, device))
        self.heads = heads
        self.length = max(positions) + 1
        self.positions = torch.tensor(positions, device=device)
        in_order = len(spans) == 1 and len(order) == rows  # the pass is padded as its only span is
        self._order = None if in_order else torch.tensor(order, device=device)
        self._row_of = None if in_order else torch.tensor(self.row_of, device=device)

    def arrange(self, x: Tensor) -> Tensor:
        return x if self._order is None else x.index_select(0, self._order)

    def restore(self, x: Tensor) -> Tensor:
        return x if self._row_of is None else x.index_select(0, self._row_of)


def _placed(
    span: Span, rows: slice, positions: Sequence[int], heads: Heads, device: torch.device
) -> PlacedSpan:
    if isinstance(span.keys, slice):
        keys: slice | Tensor = span.keys
        length = span.keys.stop - span.keys.start
    else:
        keys = torch.tensor(span.keys, device=device)
        length = len(span.keys)
    at = torch.tensor(positions, device=device)[:, None]
    key = torch.arange(length, device=device)
    unseen = key > at
    mask = _additive(unseen, heads)
    local = _additive(unseen | (key <= at - heads.window), heads) if heads.window else mask
    slots = torch.tensor(span.slots, device=device)
    return PlacedSpan(rows, len(span.rows), slots, keys, (mask, local))


def _additive(unseen: Tensor, heads: Heads) -> Tensor:
    mask = torch.zeros(unseen.shape, device=unseen.device).masked_fill_(unseen, float("-inf"))
    return mask.repeat(heads.group, 1).expand(heads.kv_heads, -1, -1)


def attend_spans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: Layout,
    local: bool,
    sinks: Tensor | None = None,
) -> Tensor:
    """q, k, v [heads, rows of the layout, head_dim] -> [rows of the layout, heads * head_dim].

    keys, values [kv_heads, slots, head_dim] are one layer of the cache. A span is written, then read at once,
    since the next one may overwrite it.
    """
    parts = []
    for span in layout.spans:
        new = slice(span.rows.start, span.rows.start + span.count)
        keys.index_copy_(1, span.slots, k[:, new].to(keys.dtype))
        values.index_copy_(1, span.slots, v[:, new].to(values.dtype))
        seen = _read(keys, span.keys), _read(values, span.keys)
        parts.append(attend(q[:, span.rows], *seen, span.masks[local], layout.heads, sinks))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _read(cached: Tensor, at: slice | Tensor) -> Tensor:
    rows = cached[:, at] if isinstance(at, slice) else cached.index_select(1, at)
    return rows.float()


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, heads: Heads, sinks: Tensor | None = None
) -> Tensor:
    """q [heads, rows, head_dim], k and v [kv_heads, keys, head_dim] -> [rows, heads * head_dim], float32.

    What a mask hides has the weight 0, so a longer tail of hidden keys changes no bit. Queries are scaled
    beforehand: a library may scale a product before or after the sum. sinks [heads]: a score of each head
    that takes weight and has no value (arXiv 2309.17453, learned).
    """
    grouped = (q * heads.scale).reshape(heads.kv_heads, -1, heads.head_dim)
    sunk = None if sinks is None else _sink_tile(sinks, q.shape[1], heads.kv_heads)
    out = (_by_row if q.device.type == "cpu" else _by_tile)(grouped, k, v, mask, heads.softcap, sunk)
    return out.view(q.shape).transpose(0, 1).reshape(q.shape[1], -1)


def _sink_tile(sinks: Tensor, rows: int, kv_heads: int) -> Tensor:
    """[kv_heads, group * rows, KEY_TILE]: a tile of its own before the keys, whose places stay the same."""
    scores = sinks.view(kv_heads, -1, 1).expand(-1, -1, rows).reshape(kv_heads, -1, 1)
    return F.pad(scores, (0, KEY_TILE - 1), value=float("-inf"))


def _scores(q: Tensor, k: Tensor, mask: Tensor, cap: float) -> Tensor:
    if not cap:
        return torch.baddbmm(mask, q, k.transpose(1, 2))
    return softcap(torch.bmm(q, k.transpose(1, 2)), cap).add_(mask)


def softcap(scores: Tensor, cap: float) -> Tensor:
    """cap * tanh(scores / cap), in place; scores: contiguous, on a CPU a multiple of a vector's width."""
    size = SERIAL if scores.device.type == "cpu" else scores.numel()
    for part in torch.split(scores.view(-1), size):
        part.div_(cap).tanh_().mul_(cap)
    return scores


def _by_row(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cap: float, sunk: Tensor | None) -> Tensor:
    """A CPU's softmax sums in one order however long the row is; its bare exponential rounds by position."""
    scores = _scores(q, k, mask, cap)
    if sunk is None:
        weight = scores.softmax(-1)
    else:
        weight = torch.cat((sunk, scores), -1).softmax(-1)[:, :, KEY_TILE:]
    out = torch.bmm(weight[:, :, :KEY_TILE], v[:, :KEY_TILE])
    for part in _tiles(k)[1:]:
        out.baddbmm_(weight[:, :, part], v[:, part])
    return out


def _by_tile(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cap: float, sunk: Tensor | None) -> Tensor:
    """A GPU's softmax and products sum in an order that may depend on the length: give them whole tiles."""
    tiles = _tiles(k)
    parts = [_scores(q, k[:, at], mask[:, :, at], cap) for at in tiles]
    scores = torch.stack(parts if sunk is None else [*parts, sunk])
    weight = scores.sub_(scores.amax((0, -1), keepdim=True)).exp_()  # [tiles, kv_heads, rows, KEY_TILE]
    out = torch.bmm(weight[0], v[:, tiles[0]])
    total = weight[0].sum(-1, keepdim=True)
    if sunk is not None:
        total.add_(weight[-1].sum(-1, keepdim=True))
        weight = weight[:-1]
    for part, at in zip(weight[1:], tiles[1:], strict=True):
        out.baddbmm_(part, v[:, at])
        total.add_(part.sum(-1, keepdim=True))
    return out.div_(total)


def _tiles(k: Tensor) -> list[slice]:
    return [slice(first, first + KEY_TILE) for first in range(0, k.shape[1], KEY_TILE)]
