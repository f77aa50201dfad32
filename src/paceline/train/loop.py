"""Trains a head, whatever kind it is."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from paceline.train.data.dataset import Batch
from paceline.train.losses.base import TrainBatch
from paceline.train.optim import optimizers_of
from paceline.train.recipe import Recipe, TrainConfig
from paceline.train.train_decoder import TrainDecoder
from paceline.train.trainer import Batches, Look, Progress, Report, autocast, take_steps


def train(
    recipe: Recipe,
    model: TrainDecoder,
    batches: Batches,
    config: TrainConfig,
    folder: Path | None = None,
    report: Report = lambda _: None,
    look: Callable[[], float] | None = None,
    clock: Callable[[], float] = monotonic,
) -> Progress:
    """Trains the recipe's network in place. folder: where checkpoints go, and are found.

    look: measures the network on held-out text, and leaves it as it is.
    """
    looks = None if look is None else Look(look, config.look_steps)
    return take_steps(_Head(recipe, model, config), batches, config, folder, report, looks, clock)


class _Head:
    def __init__(self, recipe: Recipe, model: TrainDecoder, config: TrainConfig) -> None:
        self._recipe, self._model, self.device = recipe, model, model.device
        self.weights = dict(recipe.net.named_parameters())
        self.optimizers = optimizers_of(self.weights, config)

    @property
    def identity(self) -> dict[str, Any]:
        net = self._recipe.net
        ids = hashlib.sha256(net.draft_ids.numpy(force=True).tobytes()).hexdigest()
        of = {"target": self._model.fingerprint, "began_from": self._recipe.began_from}
        return {"shape": repr(net.shape), "draft_ids": ids, **of}

    def loss(
        self, batch: Batch, share: float, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        tokens, mask, constrained = (
            part.to(self.device) for part in (batch.tokens, batch.loss_mask, batch.constrained)
        )
        hidden, final = self._model.features(tokens, self._recipe.net.train().shape.taps)
        with autocast(self.device):
            return self._recipe.loss(TrainBatch(tokens, mask, hidden, final, constrained), share, generator)
