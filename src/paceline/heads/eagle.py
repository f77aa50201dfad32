"""One decoder layer that goes on from what the target made of the text, a token at a time.

The row of a token is made of some of the target's layers there and of the token after it, and guesses the one
after that. A guess's row is made of the guess and of the net's own output in place of the target's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.heads.base import (
    DenseTargetEmbeddings,
    DraftHead,
    RMSNorm,
    Table,
    TargetEmbeddings,
    apply_rotary,
    rotary_tables,
)

TapNorm = Literal["each", "all", "none"]  # every tapped layer by itself, all as one row, or as they are
_SPREAD: Final = 0.02  # of new weights


@dataclass(frozen=True, slots=True)
class EagleConfig:
    width: int  # the target's
    heads: int
    kv_heads: int
    head_dim: int
    ff_width: int
    vocab: int  # the target's
    draft_vocab: int  # how many of its tokens can be guessed
    taps: tuple[int, ...]  # the target's layers that are read: a low, a middle and a high one
    block: int = 5  # most guesses after one another
    window: int = 1024  # how many tokens of the text are seen
    norm_eps: float = 1e-5
    theta: float = 10000.0  # of the rotary positions
    tap_norm: TapNorm = "each"
    normed_residual: bool = False  # the layer's output is added to the normed row rather than to the row
    feeds_normed: bool = True  # what is fed back is what the head reads rather than what its norm reads
    biased: bool = False  # q, k, v and o have biases
    own_embed: bool = False  # rather than the target's


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that guess: m after each of b texts."""

    hidden: Tensor  # [b, m, width], what the layer's output is added to
    queries: Tensor  # [b, m, heads, head_dim]
    keys_values: Tensor  # [b, m, 2, kv_heads, head_dim]


class EagleHead(DraftHead):
    vocab_parameters = ("head.",)
    embed: Table  # scaled where it is its own

    def __init__(self, shape: EagleConfig, pieces: TargetEmbeddings, draft_ids: Tensor) -> None:
        super().__init__()
        self._shape, self._embed_scale = shape, 1.0 if shape.own_embed else pieces.embed_scale
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
        self.embed = nn.Parameter(torch.empty(shape.vocab, width)) if shape.own_embed else pieces.embed
        self.attach_target(pieces, draft_ids)

    @property
    def shape(self) -> EagleConfig:
        return self._shape

    def init_weights(self, pieces: DenseTargetEmbeddings, generator: torch.Generator) -> None:
        """At first the highest layer goes straight to a copy of the target's own norm and head."""
        with torch.no_grad():
            for name, weight in self.named_parameters():
                new = torch.full(weight.shape, 0.0 if name.endswith("bias") else 1.0)
                if weight.dim() > 1:
                    new = torch.randn(weight.shape, generator=generator) * _SPREAD
                weight.copy_(new)
            self.fc.weight[:, -self.shape.width :] += torch.eye(
                self.shape.width, device=self.fc.weight.device
            )
            self.norm.weight.copy_(pieces.norm)
            if isinstance(self.embed, nn.Parameter):
                self.embed.copy_(pieces.embed * pieces.embed_scale)
            self.head.weight.copy_(pieces.head[self.draft_ids])

    def fused(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """Of the layers tapped, each [..., width] -> [..., width]; normed, all weigh the same at first."""
        parts = [hidden[tap].to(self.fc.weight.dtype) for tap in self.shape.taps]
        if self.shape.tap_norm == "each":
            parts = [self._level(x) for x in parts]
        x = torch.cat(parts, -1)
        mixed: Tensor = self.fc(self._level(x) if self.shape.tap_norm == "all" else x)
        return mixed

    def _level(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), None, self.shape.norm_eps)

    def rows(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Rows:
        """hidden [b, m, width] of the tokens at `positions` [b, m]; tokens [b, m] follow them."""
        embedded = self.embed[tokens].to(hidden.dtype) * self._embed_scale
        normed = self.hidden_norm(hidden)
        x = torch.cat((self.embed_norm(embedded), normed), -1)
        turn = rotary_tables(positions[..., None], self.shape.head_dim, self.shape.theta)
        q, k, v = (part(x).unflatten(-1, (-1, self.shape.head_dim)) for part in (self.q, self.k, self.v))
        before = normed if self.shape.normed_residual else hidden
        return Rows(before, apply_rotary(q, turn), torch.stack((apply_rotary(k, turn), v), -3))

    def sees(self, rows: Tensor, positions: Tensor) -> Tensor:
        """[b, m] and [b, n] -> [b, m, n]: what of the text a row there sees, its own place included."""
        back = rows[:, :, None] - positions[:, None, :]
        return (back >= 0) & (back < self.shape.window)

    def forward(self, rows: Rows, text: Tensor, sees: Tensor, chain: Tensor) -> Tensor:
        """[b, m, width], to be fed back and read by `logits`.

        text [b, n, 2, kv_heads, head_dim], of which a row sees what `sees` [b, m, n] says; and all of its own
        chain [b, m, j, 2, kv_heads, head_dim], itself included where it is not of the text.
        """
        x = rows.hidden + self.o(_attend(rows.queries, text, sees, chain))
        y = self.ffn_norm(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        out: Tensor = self.norm(x) if self.shape.feeds_normed else x
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., width] -> [..., draft_vocab]"""
        said: Tensor = self.head(hidden if self.shape.feeds_normed else self.norm(hidden))
        return said.float()


def _attend(queries: Tensor, text: Tensor, sees: Tensor, chain: Tensor) -> Tensor:
    """[b, m, heads, head_dim] -> [b, m, heads * head_dim]"""
    kv_heads, head_dim, length = text.shape[-2], text.shape[-1], text.shape[1]
    q = queries.reshape(*queries.shape[:2], kv_heads, -1, head_dim) * head_dim**-0.5
    far = torch.einsum("bmhgd,bnhd->bmhgn", q, text[:, :, 0])
    far = far.masked_fill(~sees[:, :, None, None], -torch.inf)
    near = torch.einsum("bmhgd,bmjhd->bmhgj", q, chain[:, :, :, 0])
    share = torch.cat((far, near), -1).softmax(-1)
    seen = torch.einsum("bmhgn,bnhd->bmhgd", share[..., :length], text[:, :, 1])
    seen = seen + torch.einsum("bmhgj,bmjhd->bmhgd", share[..., length:], chain[:, :, :, 1])
    return seen.flatten(2)
