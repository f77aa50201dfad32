"""Block head, as DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147): a whole draft in one pass.

The input is the last committed token, the anchor, and a learned mask vector for each slot after it. Every
slot, the anchor's included, predicts the next token. Hidden states of the target are further keys and values
of each layer. A low-rank Markov table adds logits that depend on the token before (DSpark), and a linear
confidence head predicts whether the target will accept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.heads.base import (
    DecoderHeadConfig,
    DenseTargetEmbeddings,
    DraftHead,
    EmbeddingTable,
    RMSNorm,
    TargetEmbeddings,
    apply_rotary,
    rotary_tables,
)

KeysValues = tuple[Tensor, Tensor]  # of one layer, each [b, kv_heads, n, head_dim], keys rotated
_INIT_STD: Final = 0.02


@dataclass(frozen=True, slots=True)
class BlockConfig(DecoderHeadConfig):
    layers: int = 2
    block: int = 8  # tokens of a draft
    markov_rank: int = 64
    window: int = 1024  # tokens before the anchor that are visible
    norm_eps: float = 1e-5
    theta: float = 10000.0  # of the rotary positions


class BlockHead(DraftHead):
    vocab_parameters = ("markov_",)
    embed: EmbeddingTable
    head: Tensor  # [draft_vocab, width]

    def __init__(self, shape: BlockConfig, embeddings: TargetEmbeddings, draft_ids: Tensor) -> None:
        super().__init__()
        self._shape = shape
        width, rank = shape.width, shape.markov_rank
        self.fc = nn.Linear(len(shape.taps) * width, width, bias=False)
        self.context_norm = RMSNorm(width, shape.norm_eps)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(width, shape.norm_eps)
        self.mask = nn.Parameter(torch.empty(1, width))  # input of every slot but the anchor's
        # The last row: any other token. Left empty: to fill it without a device, torch imports much.
        pairs = torch.empty(shape.draft_vocab + 1, rank)
        self.markov_in = nn.Embedding.from_pretrained(pairs, freeze=False)  # type: ignore[no-untyped-call]
        self.markov_out = nn.Linear(rank, shape.draft_vocab, bias=False)
        self.sure = nn.Linear(width + rank, 1)
        self.embed, self.embed_scale = embeddings.embed, embeddings.embed_scale
        self.attach_target(embeddings, draft_ids, head=embeddings.head[draft_ids.to(embeddings.head.device)])

    @property
    def shape(self) -> BlockConfig:
        return self._shape

    def init_weights(self, embeddings: DenseTargetEmbeddings, generator: torch.Generator) -> None:
        """New weights: the Markov table and the confidence head start at zero."""
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.dim() == 1:
                    weight.fill_(0.0 if name.endswith("bias") else 1.0)
                else:
                    weight.copy_(torch.randn(weight.shape, generator=generator) * _INIT_STD)
            for name, weight in self.named_parameters():
                if name.endswith(("o.weight", "down.weight")):
                    weight.mul_((2 * self.shape.layers) ** -0.5)
            self.mask.mul_(float(embeddings.embed.float().std()) * self.embed_scale / _INIT_STD)
            self.norm.weight.copy_(embeddings.norm)
            self.markov_out.weight.zero_()
            self.sure.weight.zero_()

    def normalize_taps(self, rms: Sequence[float]) -> None:
        with torch.no_grad():
            for part, size in zip(torch.split(self.fc.weight, self.shape.width, 1), rms, strict=True):
                part.div_(size)

    def init_from_target(self, target: Mapping[str, Tensor], layers: int) -> None:
        """Copies the target's last layers as far as they fit. The context starts as the highest tap."""
        with torch.no_grad():
            self.fc.weight[:, -self.shape.width :] += torch.eye(self.shape.width).to(self.fc.weight)
            for i, layer in enumerate(self._layers(), layers - self.shape.layers):
                for name, weight in layer.named_parameters():
                    theirs = target.get(f"layers.{i}.{name.removesuffix('.weight')}")
                    if theirs is not None and theirs.shape == weight.shape:
                        weight.copy_(theirs)

    def features(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """Hidden states of the taps, each [..., width] -> [..., taps * width]."""
        return torch.cat([hidden[tap].to(self.fc.weight.dtype) for tap in self.shape.taps], -1)

    def context(self, features: Tensor, positions: Tensor) -> list[KeysValues]:
        """features [b, n, taps * width] at `positions` [b, n] -> keys and values of each layer."""
        x = self.context_norm(self.fc(features))
        tables = rotary_tables(positions[:, None], self.shape.head_dim, self.shape.theta)
        return [layer.keys_values(x, tables) for layer in self._layers()]

    def visible(self, anchors: Tensor, positions: Tensor) -> Tensor:
        """[b, a] and [b, n] -> [b, a, n]: context rows that an anchor attends to; position -1: padding."""
        back = anchors[:, :, None] - positions[:, None, :]
        return (back > 0) & (back <= self.shape.window) & (positions >= 0)[:, None, :]

    def block(
        self,
        tokens: Tensor,
        positions: Tensor,
        context: Sequence[KeysValues],
        visible: Tensor,
        size: int | None = None,
    ) -> Tensor:
        """Anchors [b, a] at positions [b, a] -> [b, a, size, width], normed: row k predicts position + k + 1.

        visible: [b, a, n], the context rows that each anchor attends to. size: None for the whole block.
        """
        size = size or self.shape.block
        anchors = self.embed[tokens].to(self.mask.dtype) * self.embed_scale
        masked = self.mask.expand(*tokens.shape, size - 1, -1)
        x = torch.cat((anchors[:, :, None], masked), 2).flatten(1, 2)
        at = positions[:, :, None] + torch.arange(size, device=positions.device)
        tables = rotary_tables(at.flatten(1)[:, None], self.shape.head_dim, self.shape.theta)
        for layer, layer_context in zip(self._layers(), context, strict=True):
            x = layer(x, tables, layer_context, visible)
        return torch.unflatten(self.norm(x), 1, (-1, size))

    def base_logits(self, hidden: Tensor) -> Tensor:
        """[..., width] -> [..., draft_vocab]: the logits without the Markov term."""
        return F.linear(hidden.to(self.head.dtype), self.head).float()

    def logit_parts(self, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """`base_logits` and `markov` in the dtype they are computed in."""
        return F.linear(hidden.to(self.head.dtype), self.head), self.markov_out(self._pairs(previous))

    def markov(self, previous: Tensor) -> Tensor:
        """Tokens [...] -> [..., draft_vocab], to be added to the logits of the next position."""
        added: Tensor = self.markov_out(self._pairs(previous))
        return added.float()

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """[..., width], tokens [...] -> [...]: the logit of the target's acceptance."""
        pairs = self._pairs(previous)
        confidence: Tensor = self.sure(torch.cat((hidden.to(pairs.dtype), pairs), -1))
        return confidence.squeeze(-1).float()

    def _pairs(self, previous: Tensor) -> Tensor:
        pairs: Tensor = self.markov_in(self.draft_index[previous])
        return pairs

    def _layers(self) -> "list[_Layer]":
        return [layer for layer in self.layers if isinstance(layer, _Layer)]


class _Layer(nn.Module):
    def __init__(self, shape: BlockConfig) -> None:
        super().__init__()
        self._shape, width, queries = shape, shape.width, shape.heads * shape.head_dim
        self.attn_norm = RMSNorm(width, shape.norm_eps)
        self.q = nn.Linear(width, queries, bias=False)
        self.k = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.v = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps)
        self.o = nn.Linear(queries, width, bias=False)
        self.ffn_norm = RMSNorm(width, shape.norm_eps)
        self.gate = nn.Linear(width, shape.ff_width, bias=False)
        self.up = nn.Linear(width, shape.ff_width, bias=False)
        self.down = nn.Linear(shape.ff_width, width, bias=False)

    def keys_values(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> KeysValues:
        """[b, n, width], normed."""
        return apply_rotary(self.k_norm(self._split(self.k(x))), tables), self._split(self.v(x))

    def forward(
        self, x: Tensor, tables: tuple[Tensor, Tensor], context: KeysValues, visible: Tensor
    ) -> Tensor:
        """x [b, a * block, width]; visible [b, a, n]."""
        y = self.attn_norm(x)
        q = apply_rotary(self.q_norm(self._split(self.q(y))), tables)
        x = x + self.o(_attend(q, context, self.keys_values(y, tables), visible))
        y = self.ffn_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out

    def _split(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, -1, (-1, self._shape.head_dim)).transpose(1, 2)


def _attend(q: Tensor, context: KeysValues, own: KeysValues, visible: Tensor) -> Tensor:
    """[b, heads, a * block, head_dim] -> [b, a * block, heads * head_dim].

    A row attends to its anchor's context and to all of its own block.
    """
    anchors, rows = visible.shape[1], q.shape[2]
    block = rows // anchors
    one = torch.eye(anchors, dtype=torch.bool, device=q.device)
    blocks = one.repeat_interleave(block, 0).repeat_interleave(block, 1).expand(len(q), -1, -1)
    mask = torch.cat((visible.repeat_interleave(block, 1), blocks), 2)[:, None]
    k, v = (
        torch.cat((far.to(near.dtype), near), 2).repeat_interleave(q.shape[1] // near.shape[1], 1)
        for far, near in zip(context, own, strict=True)
    )
    out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, mask)
    return out.transpose(1, 2).flatten(2)
