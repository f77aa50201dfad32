"""Fine-tunes a draft model on the target's answers, with LoRA or whole (DistillSpec, arXiv 2310.08461)."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config import require_between, require_min, require_whole
from paceline.train.config import Schedule
from paceline.train.data.dataset import Batch
from paceline.train.draft_model.model import TrainableDraftModel
from paceline.train.optim import Optimizers, adamw
from paceline.train.train_decoder import TrainDecoder
from paceline.train.trainer import Batches, Report, TrainProgress, autocast, take_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneConfig(Schedule):
    lora: int = 16  # rank of the adapters; 0: all weights are trained
    alpha: float = 0.0  # adapters are scaled by alpha / lora; 0: twice the rank
    distill: float = (
        0.0  # share of the loss that is the KL divergence from the target's distribution, not from its token
    )
    lr: float = 0.0  # 0: 5e-4 for adapters, 5e-5 for all weights
    tokens_per_batch: int = 16384
    warmup: float = 0.05
    checkpoint_seconds: float = 120.0

    def __post_init__(self) -> None:
        Schedule.__post_init__(self)
        require_whole(self, "lora")
        require_min(self, lora=0, alpha=0, lr=0)
        require_between(self, 0, 1, "distill")

    @property
    def scale(self) -> float:
        """The alpha that is used."""
        return self.alpha or 2.0 * self.lora

    @property
    def top_lr(self) -> float:
        """The learning rate that is used."""
        return self.lr or (5e-4 if self.lora else 5e-5)


def finetune(
    net: TrainableDraftModel,
    batches: Batches,
    config: FinetuneConfig,
    folder: Path | None = None,
    report: Report = lambda _: None,
    teacher: TrainDecoder | None = None,
    clock: Callable[[], float] = monotonic,
) -> TrainProgress:
    """Trains the net in place. folder: of the checkpoints, old and new. teacher: the target."""
    return take_steps(_Draft(net, config, teacher), batches, config, folder, report, clock=clock)


def loss_of(
    net: TrainableDraftModel, batch: Batch, teacher: TrainDecoder | None = None, distill: float = 0.0
) -> Tensor:
    """Mean over the answers' tokens. The common part of the prompts gets no gradients."""
    device = net.model.device
    tokens, own = batch.tokens.to(device), batch.loss_mask.to(device)
    first = int(own.int().argmax(1).min())  # where the earliest answer begins
    start = max(0, first - 1)  # the row that predicts it
    own_next = own[:, start + 1 :]
    logits = net.model.logits(net.hidden(tokens[:, :-1], start)[own_next])
    loss = F.cross_entropy(logits, tokens[:, start + 1 :][own_next])
    if teacher is None or not distill:
        return loss
    _, final = teacher.features(tokens[:, :-1])
    theirs = teacher.logits(final[:, start:][own_next])
    both = min(theirs.shape[-1], logits.shape[-1])
    target, draft = (x[:, :both].log_softmax(-1) for x in (theirs, logits))
    return (1 - distill) * loss + distill * F.kl_div(draft, target, log_target=True, reduction="batchmean")


class _Draft:
    def __init__(
        self, net: TrainableDraftModel, config: FinetuneConfig, teacher: TrainDecoder | None
    ) -> None:
        self._net, self._teacher, self._distill = net, teacher, config.distill
        self.device, self.weights = net.model.device, net.trained
        self.optimizers = Optimizers(adamw(list(net.trained.values()), config.top_lr, config.weight_decay))

    @property
    def identity(self) -> dict[str, Any]:
        return {"model": self._net.model.fingerprint}

    def loss(
        self, batch: Batch, share: float, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        with autocast(self.device):
            return loss_of(self._net, batch, self._teacher, self._distill), {}
