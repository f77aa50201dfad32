"""What a head is trained on: texts of the target, and what the target made of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar, TypeVarTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Given = TypeVarTuple("Given")
T = TypeVar("T")
_ROWS: Final = 2048  # of logits over the whole vocabulary at once


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One batch, right-padded."""

    tokens: Tensor  # [b, n]
    mask: Tensor  # [b, n] bool: the target's own words
    hidden: Mapping[int, Tensor]  # layer -> [b, n, width]
    final: Tensor  # [b, n, width], normed: what the head of the target reads
    constrained: Tensor | None = None  # [b] bool: texts in which a grammar chose, too; None: in none
    places: Tensor | None = None  # [b, n] bool: where guesses may begin; None: anywhere


class Loss(Protocol):
    """progress: 0 to 1, how far training is. Gives the loss, and figures to watch, each one number."""

    def __call__(
        self, batch: TrainBatch, progress: float, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


@dataclass(frozen=True, slots=True)
class SoftTargets:
    """What the target wants after the tokens that one of its own words follows, w of them."""

    which: Tensor  # [b, n]: a token's number among the w; -1: it is none of them
    best: Tensor  # [w]: the token wanted most
    law: Tensor  # [w, draft_vocab]: the chance of each token that can be guessed, among all there are


@torch.no_grad()
def soft_targets(batch: TrainBatch, head: Tensor, draft_ids: Tensor) -> SoftTargets:
    """head: the target's whole one, [vocab, width].

    Where a grammar chose, too, what was said is wanted: the law of the target alone does not know of it.
    """
    asked = shift_left(batch.mask, 1)
    which = torch.where(asked, asked.flatten().cumsum(0).view_as(asked) - 1, -1)
    best, laws = [], []
    for rows in torch.split(batch.final[asked], _ROWS):
        logits = F.linear(rows.to(head.dtype), head).float()
        best.append(logits.argmax(-1))
        laws.append((logits[:, draft_ids] - logits.logsumexp(-1, keepdim=True)).exp())
    made = SoftTargets(which, torch.cat(best), torch.cat(laws))
    if batch.constrained is not None:
        certain = (asked & batch.constrained[:, None])[asked]
        said = shift_left(batch.tokens, 1)[asked]
        made.best[certain] = said[certain]
        made.law[certain] = (said[certain, None] == draft_ids).float()
    return made


def draft_metrics(right: Tensor, real: Tensor) -> dict[str, Tensor]:
    """How often the first guess is right, and how many tokens a pass would give; both [b, a, places]."""
    started = real[:, :, 0].sum().clamp(min=1)
    kept = right.float().cumprod(-1).sum() / started
    return {"first": right[:, :, 0].sum() / started, "tokens_per_pass": 1 + kept}


def shift_left(x: Tensor, by: int) -> Tensor:
    """[b, n]: what stands `by` places after each; past the end nothing, which is 0."""
    shifted = torch.zeros_like(x)
    shifted[:, : max(0, x.shape[1] - by)] = x[:, by:]
    return shifted


def valid_starts(batch: TrainBatch) -> Tensor:
    """[b, n]: whether guesses made of this row, and of the last token there is, may count."""
    return torch.ones_like(batch.mask) if batch.places is None else shift_left(batch.places, 1)


def sample_positions(fit: Tensor, most: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """fit [b, n] -> up to `most` random places of each text where it holds, and whether each is one: [b, a].

    Where a text has fewer than another, others of its places fill up.
    """
    count = min(most, max(1, int(fit.sum(1).max())))
    order, at = torch.rand(fit.shape, generator=generator).to(fit.device).masked_fill(~fit, -1.0).topk(count)
    return at, order >= 0


def checkpointed(function: Callable[[*Given], T], *given: *Given) -> T:
    """What the function makes of its arguments; what is in between is made again for gradients."""
    made: T = checkpoint(function, *given, use_reentrant=False, preserve_rng_state=False)
    return made
