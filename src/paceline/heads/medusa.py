"""Medusa heads (arXiv 2401.10774): independent output heads on the target's last hidden state.

Head i predicts the token i + 2 positions after the row it reads; the next token is the target's own choice.
New heads start equal to the target's.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.heads.base import DenseTargetEmbeddings, DraftHead, TargetEmbeddings


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    width: int  # the target's
    vocab: int  # the target's
    draft_vocab: int  # tokens of the target that can be drafted
    taps: tuple[int, ...]  # the target's last layer
    block: int = 4  # heads
    layers: int = 1  # residual blocks of each head
    norm_eps: float = 1e-5
    own_heads: bool = False  # each head has an lm_head of its own, not the target's


class MedusaHead(DraftHead):
    vocab_parameters = ("heads.",)
    head: Tensor  # [draft_vocab, width], where it is the target's
    norm: Tensor  # [width]: the target's final norm

    def __init__(self, shape: MedusaConfig, embeddings: TargetEmbeddings, draft_ids: Tensor) -> None:
        super().__init__()
        self._shape = shape
        width = shape.width
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(shape.block * shape.layers))
        if shape.own_heads:
            sizes = (width, shape.draft_vocab)
            self.heads = nn.ModuleList(nn.Linear(*sizes, bias=False) for _ in range(shape.block))
            self.attach_target(embeddings, draft_ids, norm=embeddings.norm)
        else:
            head = embeddings.head[draft_ids.to(embeddings.head.device)]
            self.attach_target(embeddings, draft_ids, head=head, norm=embeddings.norm)

    @property
    def shape(self) -> MedusaConfig:
        return self._shape

    def init_weights(self, embeddings: DenseTargetEmbeddings, generator: torch.Generator) -> None:
        with torch.no_grad():
            for weight in self.blocks.parameters():
                weight.zero_()
            if self.shape.own_heads:
                for weight in self.heads.parameters():
                    weight.copy_(embeddings.head[self.draft_ids])

    def forward(self, hidden: Tensor) -> Tensor:
        """The last layer's output [..., width] -> logits [..., block, draft_vocab]."""
        rows = [self._row(hidden, i) for i in range(self.shape.block)]
        if self.shape.own_heads:
            return torch.stack([head(row) for head, row in zip(self.heads, rows, strict=True)], -2).float()
        return F.linear(torch.stack(rows, -2).to(self.head.dtype), self.head).float()

    def logits(self, hidden: Tensor, i: int) -> Tensor:
        """Logits of head i: [..., width] -> [..., draft_vocab]."""
        row = self._row(hidden, i)
        logits: Tensor = (
            self.heads[i](row) if self.shape.own_heads else F.linear(row.to(self.head.dtype), self.head)
        )
        return logits.float()

    def _row(self, hidden: Tensor, i: int) -> Tensor:
        """The input of head i's lm_head, [..., width]."""
        shape = self.shape
        x = F.rms_norm(hidden.float(), (shape.width,), self.norm.float(), shape.norm_eps)
        x = x.to(next(self.parameters()).dtype)
        for block in self.blocks[i * shape.layers : (i + 1) * shape.layers]:
            x = x + F.silu(block(x))
        return x
