"""What a head is trained on: texts of the target, and what the target made of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS: Final = 2048  # of logits over the whole vocabulary at once


@dataclass(frozen=True, slots=True)
class Lesson:
    """One batch, right-padded."""

    tokens: Tensor  # [b, n]
    mask: Tensor  # [b, n] bool: the target's own words
    hidden: Mapping[int, Tensor]  # layer -> [b, n, width]
    final: Tensor  # [b, n, width], normed: what the head of the target reads
    places: Tensor | None = None  # [b, n] bool: where guesses may begin; None: anywhere


class Loss(Protocol):
    """progress: 0 to 1, how far training is. Gives the loss, and figures to watch, each one number."""

    def __call__(
        self, lesson: Lesson, progress: float, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


@torch.no_grad()
def verdicts(final: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [r, width] -> the target's likeliest token [r], and the logarithm of its normaliser [r]."""
    best, log_z = [], []
    for rows in torch.split(final, _ROWS):
        logits = F.linear(rows.to(head.dtype), head).float()
        best.append(logits.argmax(-1))
        log_z.append(logits.logsumexp(-1))
    return torch.cat(best), torch.cat(log_z)


def figures(right: Tensor, real: Tensor) -> dict[str, Tensor]:
    """How often the first guess is right, and how many tokens a pass would give; both [b, a, places]."""
    started = real[:, :, 0].sum().clamp(min=1)
    kept = right.float().cumprod(-1).sum() / started
    return {"first": right[:, :, 0].sum() / started, "tokens_per_pass": 1 + kept}


def ahead(x: Tensor, by: int) -> Tensor:
    """[b, n]: what stands `by` places after each; past the end nothing, which is 0."""
    shifted = torch.zeros_like(x)
    shifted[:, : max(0, x.shape[1] - by)] = x[:, by:]
    return shifted


def begins(lesson: Lesson) -> Tensor:
    """[b, n]: whether guesses made of this row, and of the last token there is, may count."""
    return torch.ones_like(lesson.mask) if lesson.places is None else ahead(lesson.places, 1)
