"""EAGLE-3 head (arXiv 2503.01840): one decoder layer that drafts a token at a time.

The row of a token joins hidden states of three of the target's layers there with the embedding of the next
token, and predicts the one after that. In a drafted row, the head's own output replaces the target's states.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

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

TapNorm = Literal["each", "all", "none"]  # each tap by itself, all as one row, or not at all
_INIT_STD: Final = 0.02


@dataclass(frozen=True, slots=True)
class EagleConfig(DecoderHeadConfig):
    """EAGLE-3 reads three taps: a low, a middle and a high one."""

    block: int = 5  # tokens of a draft, at most
    window: int = 1024  # tokens of the text that are visible
    norm_eps: float = 1e-5
    theta: float = 10000.0  # of the rotary positions
    tap_norm: TapNorm = "each"
    normed_residual: bool = False  # the residual is the normed row rather than the row
    feeds_normed: bool = True  # the output after the final norm is fed back, not that before it
    biased: bool = False  # q, k, v and o have biases
    own_embed: bool = False  # rather than the target's


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Inputs of m draft rows after each of b texts."""

    hidden: Tensor  # [b, m, width]: the residual
    queries: Tensor  # [b, m, heads, head_dim]
    keys_values: Tensor  # [b, m, 2, kv_heads, head_dim]


class EagleHead(DraftHead):
    vocab_parameters = ("head.",)
    embed: EmbeddingTable  # with the scale applied where it is the head's own

    def __init__(self, shape: EagleConfig, embeddings: TargetEmbeddings, draft_ids: Tensor) -> None:
        super().__init__()
        self._shape, self._embed_scale = shape, 1.0 if shape.own_embed else embeddings.embed_scale
        width, across = shape.width, shape.heads * shape.head_dim
        self.fc = nn.Linear(len(shape.taps) * width, width, bias=False)
        self.embed_norm = RMSNorm(width, shape.norm_eps)
        self.hidden_norm = RMSNorm(width, shape.norm_eps)
        self.q = nn.Linear(2 * width, across, bias=shape.biased)
        self.k = nn.Linear(2 * width, shape.kv_heads * shape.head_dim, bias=shape.biased)
        self.v = nn.Linear(2 * width, shape.kv_heads * shape.head_dim, bias=shape.biased)
        self.o = nn.Linear(across, width, bias=shape.biased)
        self.ffn_norm = RMSNorm(width, shape.norm_eps)
        self.gate = nn.Linear(width, shape.ff_width, bias=False)
        self.up = nn.Linear(width, shape.ff_width, bias=False)
        self.down = nn.Linear(shape.ff_width, width, bias=False)
        self.norm = RMSNorm(width, shape.norm_eps)
        self.head = nn.Linear(width, shape.draft_vocab, bias=False)
        self.embed = nn.Parameter(torch.empty(shape.vocab, width)) if shape.own_embed else embeddings.embed
        self.attach_target(embeddings, draft_ids)

    @property
    def shape(self) -> EagleConfig:
        return self._shape

    def init_weights(self, embeddings: DenseTargetEmbeddings, generator: torch.Generator) -> None:
        """Starts as the highest tap followed by a copy of the target's final norm and lm_head."""
        with torch.no_grad():
            for name, weight in self.named_parameters():
                new = torch.full(weight.shape, 0.0 if name.endswith("bias") else 1.0)
                if weight.dim() > 1:
                    new = torch.randn(weight.shape, generator=generator) * _INIT_STD
                weight.copy_(new)
            self.fc.weight[:, -self.shape.width :] += torch.eye(
                self.shape.width, device=self.fc.weight.device
            )
            self.norm.weight.copy_(embeddings.norm)
            if isinstance(self.embed, nn.Parameter):
                self.embed.copy_(embeddings.embed * embeddings.embed_scale)
            self.head.weight.copy_(embeddings.head[self.draft_ids])

    def fuse_taps(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """Hidden states of the taps, each [..., width] -> [..., width]."""
        parts = [hidden[tap].to(self.fc.weight.dtype) for tap in self.shape.taps]
        if self.shape.tap_norm == "each":
            parts = [self._rms(x) for x in parts]
        x = torch.cat(parts, -1)
        mixed: Tensor = self.fc(self._rms(x) if self.shape.tap_norm == "all" else x)
        return mixed

    def _rms(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), None, self.shape.norm_eps)

    def rows(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> DraftRows:
        """hidden [b, m, width] of the tokens at `positions` [b, m]; tokens [b, m] follow them."""
        embedded = self.embed[tokens].to(hidden.dtype) * self._embed_scale
        normed = self.hidden_norm(hidden)
        x = torch.cat((self.embed_norm(embedded), normed), -1)
        tables = rotary_tables(positions[..., None], self.shape.head_dim, self.shape.theta)
        q, k, v = (part(x).unflatten(-1, (-1, self.shape.head_dim)) for part in (self.q, self.k, self.v))
        before = normed if self.shape.normed_residual else hidden
        return DraftRows(before, apply_rotary(q, tables), torch.stack((apply_rotary(k, tables), v), -3))

    def visible(self, rows: Tensor, positions: Tensor) -> Tensor:
        """[b, m] and [b, n] -> [b, m, n]: the text rows that a row attends to, its own position included."""
        back = rows[:, :, None] - positions[:, None, :]
        return (back >= 0) & (back < self.shape.window)

    def forward(self, rows: DraftRows, text: Tensor, visible: Tensor, chain: Tensor) -> Tensor:
        """[b, m, width]: fed back, and the input of `logits`.

        A row attends to text [b, n, 2, kv_heads, head_dim] where visible [b, m, n], and to its own chain
        [b, m, j, 2, kv_heads, head_dim], which holds the row itself if it is beyond the text.
        """
        x = rows.hidden + self.o(_attend(rows.queries, text, visible, chain))
        y = self.ffn_norm(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        out: Tensor = self.norm(x) if self.shape.feeds_normed else x
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., width] -> [..., draft_vocab]"""
        logits: Tensor = self.head(hidden if self.shape.feeds_normed else self.norm(hidden))
        return logits.float()


def _attend(queries: Tensor, text: Tensor, visible: Tensor, chain: Tensor) -> Tensor:
    """[b, m, heads, head_dim] -> [b, m, heads * head_dim]"""
    kv_heads, head_dim, length = text.shape[-2], text.shape[-1], text.shape[1]
    q = queries.reshape(*queries.shape[:2], kv_heads, -1, head_dim) * head_dim**-0.5
    far = torch.einsum("bmhgd,bnhd->bmhgn", q, text[:, :, 0])
    far = far.masked_fill(~visible[:, :, None, None], -torch.inf)
    near = torch.einsum("bmhgd,bmjhd->bmhgj", q, chain[:, :, :, 0])
    share = torch.cat((far, near), -1).softmax(-1)
    seen = torch.einsum("bmhgn,bnhd->bmhgd", share[..., :length], text[:, :, 1])
    seen = seen + torch.einsum("bmhgj,bmjhd->bmhgd", share[..., length:], chain[:, :, :, 1])
    return seen.flatten(2)
