"""One decoder layer that goes on from what the target made of the text, a token at a time.

The row of a token is made of some of the target's layers there and of the token after it, and guesses the one
after that. A guess's row is made of the guess and of the net's own output in place of the target's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.heads.net import Net, Norm, Pieces
from paceline.heads.rotary import rotated, rotation

_SPREAD: Final = 0.02  # of new weights


@dataclass(frozen=True, slots=True)
class EagleShape:
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


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that guess: m after each of b texts."""

    hidden: Tensor  # [b, m, width]
    queries: Tensor  # [b, m, heads, head_dim]
    keys_values: Tensor  # [b, m, 2, kv_heads, head_dim]


class EagleNet(Net):
    embed: Tensor  # [vocab, width]

    def __init__(self, shape: EagleShape, pieces: Pieces, draft_ids: Tensor) -> None:
        super().__init__()
        self._shape, self._embed_scale = shape, pieces.embed_scale
        width, across = shape.width, shape.heads * shape.head_dim
        self.fc = nn.Linear(len(shape.taps) * width, width, bias=False)
        self.embed_norm = Norm(width, shape.norm_eps)
        self.hidden_norm = Norm(width, shape.norm_eps)
        self.q = nn.Linear(2 * width, across, bias=False)
        self.k = nn.Linear(2 * width, shape.kv_heads * shape.head_dim, bias=False)
        self.v = nn.Linear(2 * width, shape.kv_heads * shape.head_dim, bias=False)
        self.o = nn.Linear(across, width, bias=False)
        self.ffn_norm = Norm(width, shape.norm_eps)
        self.gate = nn.Linear(width, shape.ff_width, bias=False)
        self.up = nn.Linear(width, shape.ff_width, bias=False)
        self.down = nn.Linear(shape.ff_width, width, bias=False)
        self.norm = Norm(width, shape.norm_eps)
        self.head = nn.Linear(width, shape.draft_vocab, bias=False)
        self.borrow(pieces, draft_ids, embed=pieces.embed)

    @property
    def shape(self) -> EagleShape:
        return self._shape

    def reset(self, pieces: Pieces, generator: torch.Generator) -> None:
        """At first the highest layer goes straight to a copy of the target's own norm and head."""
        with torch.no_grad():
            for weight in self.parameters():
                new = torch.ones(weight.shape)
                if weight.dim() > 1:
                    new = torch.randn(weight.shape, generator=generator) * _SPREAD
                weight.copy_(new)
            self.fc.weight[:, -self.shape.width :] += torch.eye(
                self.shape.width, device=self.fc.weight.device
            )
            self.norm.weight.copy_(pieces.norm)
            self.head.weight.copy_(pieces.head[self.draft_ids])

    def fused(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """Of the layers tapped, each [..., width] -> [..., width]; all weigh the same at first."""
        parts = [hidden[tap].to(self.fc.weight.dtype) for tap in self.shape.taps]
        parts = [F.rms_norm(x, (x.shape[-1],), None, self.shape.norm_eps) for x in parts]
        mixed: Tensor = self.fc(torch.cat(parts, -1))
        return mixed

    def rows(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Rows:
        """hidden [b, m, width] of the tokens at `positions` [b, m]; tokens [b, m] follow them."""
        embedded = F.embedding(tokens, self.embed).to(hidden.dtype) * self._embed_scale
        x = torch.cat((self.embed_norm(embedded), self.hidden_norm(hidden)), -1)
        turn = rotation(positions[..., None], self.shape.head_dim, self.shape.theta)
        q, k, v = (part(x).unflatten(-1, (-1, self.shape.head_dim)) for part in (self.q, self.k, self.v))
        return Rows(hidden, rotated(q, turn), torch.stack((rotated(k, turn), v), -3))

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
        out: Tensor = self.norm(x + self.down(F.silu(self.gate(y)) * self.up(y)))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., width] -> [..., draft_vocab]"""
        said: Tensor = self.head(hidden)
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
