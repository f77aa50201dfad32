"""One decoder for all families: what differs between them is in the shape and in which weights there are."""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.heads.base import TargetEmbeddings
from paceline.target.eager.attention import KEY_TILE, Heads, Layout, Span, attend, softcap
from paceline.target.eager.layer import Layer, Store, group_rows
from paceline.target.eager.linear import (
    CUDA_TILE,
    GroupedLinear,
    Linear,
    PlainLinear,
    Product,
    RowTile,
    bytes_of,
    can_pack,
    find_row_tile,
)
from paceline.target.eager.rope import RopeTable
from paceline.target.weights.model_config import ModelConfig

Stash = list[tuple[Tensor, Tensor]]  # keys and values of each layer: [kv_heads, rows of the layout, head_dim]


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a pass."""

    tokens: Sequence[int]
    spans: Sequence[Span]  # every row is in exactly one
    scored: Sequence[int]  # the rows to give logits for
    taps: Sequence[int] = ()  # the layers whose output to give for all rows
    stash: bool = False  # return the rows' keys and values too
    layers: Sequence[int] | None = None  # those to run; None: all


@dataclass(frozen=True, slots=True)
class PassOutput:
    logits: Tensor  # [scored, vocab] float32
    hidden: dict[int, Tensor]  # layer -> [rows, width] float32
    stash: Stash  # empty unless requested
    stash_rows: Sequence[int]  # the stash's row of each row of the pass


class Decoder:
    """Takes the weights out of `tensors`."""

    def __init__(
        self, shape: ModelConfig, tensors: MutableMapping[str, Tensor], device: torch.device
    ) -> None:
        self.shape, self.device = shape, device
        store = Store(tensors, device, shape.norm_eps)
        self.dtype = store.dtype
        self._embed = store.take("embed")
        self._layers = [Layer(i, shape, store) for i in range(shape.layers)]
        self._norm = store.norm("norm")
        self._untied = "head" in store
        self._head: Linear = self._take_head(store)
        self.bytes_held = store.bytes_held + bytes_of(self._embed)
        self._rope = RopeTable(shape.rope, shape.head_dim, device)
        self._local_rope = RopeTable(shape.local_rope or shape.rope, shape.head_dim, device)
        self._heads = Heads(
            shape.kv_heads,
            shape.heads // shape.kv_heads,
            shape.head_dim,
            shape.attn_scale or shape.head_dim**-0.5,
            shape.window if any(shape.local_layers) else 0,
            shape.attn_softcap,
        )
        self.tile = self.attention_tile = RowTile(CUDA_TILE)
        if device.type == "cpu":
            self._settle_tiles()

    @torch.inference_mode()
    def forward(self, batch: Batch, keys: Sequence[Tensor], values: Sequence[Tensor]) -> PassOutput:
        """keys, values: the cache, a [kv_heads, slots, head_dim] for each layer; written as the spans say."""
        tokens = _padded(batch.tokens, self.tile)
        layout = Layout(batch.spans, len(tokens), self.attention_tile, self._heads, self.device)
        rotation = self._rope.rows(layout.positions, layout.length)
        local_rotation = self._local_rope.rows(layout.positions, layout.length)
        x = self._embedded(tokens)
        every_row = list(batch.scored) == list(range(len(batch.tokens)))
        index = None if every_row else self._ints(_padded(batch.scored, self.tile))
        stash: Stash = []
        hidden = {}
        for i in range(len(self._layers)) if batch.layers is None else batch.layers:
            layer = self._layers[i]
            turn = local_rotation if layer.local else rotation
            kv = layer(x, layout, turn, keys[i], values[i])
            if batch.stash:
                stash.append(kv)
            if i in batch.taps:
                hidden[i] = x[: len(batch.tokens)].clone()
        logits = self._logits(_select(x, index))
        return PassOutput(logits[: len(batch.scored)], hidden, stash, layout.row_of)

    def embeddings(self, fingerprint: str) -> TargetEmbeddings:
        """Shares the decoder's memory, but for an output matrix that oneDNN has packed."""
        head = self._head.weight if self._untied else self._embed
        norm = self._norm.weight.to(self.dtype)  # it was read in this type
        return TargetEmbeddings(self._embed, head, norm, fingerprint, self.shape.embed_scale)

    def final_norm(self, x: Tensor) -> Tensor:
        return self._norm(x)

    def _logits(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_empty(0, self.shape.vocab_size)
        logits = self._head(self._norm(x).to(self.dtype)).float()
        return self._capped(logits) if self.shape.logit_softcap else logits

    def _capped(self, logits: Tensor) -> Tensor:
        """Row by row, each in a buffer of its own: a vector function may round by where an element lies."""
        missing = -logits.shape[1] % KEY_TILE
        rows = [softcap(F.pad(row, (0, missing)), self.shape.logit_softcap) for row in logits]
        return torch.stack(rows)[:, : logits.shape[1]]

    def _embedded(self, tokens: Sequence[int]) -> Tensor:
        x = F.embedding(self._ints(tokens), self._embed).to(torch.float32)
        return x if self.shape.embed_scale == 1.0 else x * self.shape.embed_scale

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _take_head(self, store: Store) -> Linear:
        if "head" in store:
            return store.linear("head")
        if can_pack(self._embed):
            return store.linear_of(self._embed)
        return PlainLinear(self._embed)  # the same memory

    @torch.inference_mode()
    def _settle_tiles(self) -> None:
        """Tries attention and one of each shape of matrix; what needs its rows in groups gets them so."""
        shape = self.shape
        widths = {"o": shape.heads * shape.head_dim, "down": shape.ff_width}
        if shape.experts is not None:
            widths["expert down"] = shape.experts.ff_width
        self.attention_tile = find_row_tile(self._sample_attention())
        holders: dict[str, list[tuple[object, str]]] = {}
        for layer in self._layers:
            for kind, holder, name in layer.products():
                holders.setdefault(kind, []).append((holder, name))
        sizes = {}
        for kind, alike in holders.items():
            sample: Linear = getattr(*alike[0])
            tile = find_row_tile(Product(sample, (widths.get(kind, shape.width),), self.dtype))
            for holder, name in alike if tile.exact else ():
                group_rows(holder, name, tile.size)
            sizes[kind] = tile.size
        tile = find_row_tile(Product(self._head, (shape.width,), self.dtype))
        if tile.exact:
            self._head = GroupedLinear(self._head, tile.size)
        for layer in self._layers:
            if layer.mixture is not None:
                layer.mixture.tile = RowTile(max(sizes["expert gate_up"], sizes["expert down"]))
        self.tile = RowTile(max(*sizes.values(), tile.size))

    def _sample_attention(self) -> Product:
        """Three times the same result: from one tile of keys, and from more that are masked."""
        heads, tiles = self._heads, (1, 2, 5)
        k, v = torch.randn(
            2,
            heads.kv_heads,
            max(tiles) * KEY_TILE,
            heads.head_dim,
            generator=torch.Generator().manual_seed(1),
        )

        def attend_tiles(q: Tensor, count: int) -> Tensor:
            mask = torch.zeros(heads.kv_heads, heads.group * q.shape[1], count * KEY_TILE)
            mask[:, :, KEY_TILE - 6 :] = float("-inf")
            return attend(q, k[:, : count * KEY_TILE], v[:, : count * KEY_TILE], mask, heads)

        def run(q: Tensor) -> Tensor:
            turn = len(q) // 4 % len(tiles)  # so that other row counts are compared with other tile counts
            order = (*tiles[turn:], *tiles[:turn])
            return torch.cat([attend_tiles(q.transpose(0, 1), count) for count in order], -1)

        return Product(run, (heads.kv_heads * heads.group, heads.head_dim), torch.float32)


def _padded(rows: Sequence[int], tile: RowTile) -> list[int]:
    return [*rows, *[*rows[-1:]] * (tile.padded(len(rows)) - len(rows))]


def _select(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x.index_select(0, index)
