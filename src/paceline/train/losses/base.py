"""Common parts of the losses: batches, soft targets, sampled positions, activation checkpointing.

Heads are distilled on the target's own answers (DistillSpec, arXiv 2310.08461).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar, TypeVarTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Args = TypeVarTuple("Args")
T = TypeVar("T")
_ROWS: Final = 2048  # of logits over the whole vocabulary, at once


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """A batch, right-padded."""

    tokens: Tensor  # [b, n]
    mask: Tensor  # [b, n] bool: the token is the target's own output
    hidden: Mapping[int, Tensor]  # layer -> [b, n, width]
    final: Tensor  # [b, n, width]: the normed input of the target's lm_head
    constrained: Tensor | None = None  # [b] bool: sampled under a grammar; None: no text was
    starts: Tensor | None = None  # [b, n] bool: where drafts may begin; None: anywhere


class Loss(Protocol):
    """The loss of a batch and scalar metrics. progress: share of the training that is done, 0 to 1."""

    def __call__(
        self, batch: TrainBatch, progress: float, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


@dataclass(frozen=True, slots=True)
class SoftTargets:
    """The target's next-token distributions at the w positions that one of its own tokens follows."""

    index: Tensor  # [b, n]: a position's row in the other two; -1: none
    best: Tensor  # [w]: the likeliest token
    probs: Tensor  # [w, draft_vocab]: normalised over the whole vocabulary


@torch.no_grad()
def soft_targets(batch: TrainBatch, head: Tensor, draft_ids: Tensor) -> SoftTargets:
    """head: the target's lm_head, [vocab, width].

    For text sampled under a grammar the targets are the tokens themselves: the target's distribution does not
    know of the grammar.
    """
    follows = shift_left(batch.mask, 1)
    index = torch.where(follows, follows.flatten().cumsum(0).view_as(follows) - 1, -1)
    best, probs = [], []
    for rows in torch.split(batch.final[follows], _ROWS):
        logits = F.linear(rows.to(head.dtype), head).float()
        best.append(logits.argmax(-1))
        probs.append((logits[:, draft_ids] - logits.logsumexp(-1, keepdim=True)).exp())
    targets = SoftTargets(index, torch.cat(best), torch.cat(probs))
    if batch.constrained is not None:
        certain = (follows & batch.constrained[:, None])[follows]
        tokens = shift_left(batch.tokens, 1)[follows]
        targets.best[certain] = tokens[certain]
        targets.probs[certain] = (tokens[certain, None] == draft_ids).float()
    return targets


def draft_metrics(right: Tensor, real: Tensor) -> dict[str, Tensor]:
    """Share of first tokens that are right, and tokens per pass. right, real: [b, a, block]."""
    started = real[:, :, 0].sum().clamp(min=1)
    accepted = right.float().cumprod(-1).sum() / started
    return {"first": right[:, :, 0].sum() / started, "tokens_per_pass": 1 + accepted}


def shift_left(x: Tensor, by: int) -> Tensor:
    """[b, n]: the value `by` positions later; 0 past the end."""
    shifted = torch.zeros_like(x)
    shifted[:, : max(0, x.shape[1] - by)] = x[:, by:]
    return shifted


def valid_starts(batch: TrainBatch) -> Tensor:
    """[b, n] bool: drafts from this row may count."""
    return torch.ones_like(batch.mask) if batch.starts is None else shift_left(batch.starts, 1)


def sample_positions(fit: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """fit [b, n] -> up to `count` random positions of each text where it holds, and a mask: both [b, a].

    A text with fewer of them than another is filled up with positions outside the mask.
    """
    count = min(count, max(1, int(fit.sum(1).max())))
    order, at = torch.rand(fit.shape, generator=generator).to(fit.device).masked_fill(~fit, -1.0).topk(count)
    return at, order >= 0


def checkpointed(function: Callable[[*Args], T], *args: *Args) -> T:
    """Activation checkpointing: intermediate results are computed again for the backward pass."""
    result: T = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return result
