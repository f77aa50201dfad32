"""Optimizers: AdamW for all weights, or Muon for the matrices of the layers and AdamW for the rest."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.train.recipe import TrainConfig


class Optimizers:
    """Several optimizers as one; learning rates are set at every step."""

    def __init__(self, *made: tuple[torch.optim.Optimizer, float]) -> None:
        """Each with its learning rate."""
        self._made = made

    def step(self, rate: float) -> None:
        """rate: factor of the learning rates."""
        for optimizer, lr in self._made:
            for group in optimizer.param_groups:
                group["lr"] = lr * rate
            optimizer.step()

    def state(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer, _ in self._made]

    def restore(self, states: list[dict[str, Any]]) -> None:
        for (optimizer, _), state in zip(self._made, states, strict=True):
            optimizer.load_state_dict(state)


def adamw(weights: Sequence[Tensor], lr: float, decay: float) -> tuple[torch.optim.Optimizer, float]:
    return torch.optim.AdamW(weights, lr, betas=(0.9, 0.95), weight_decay=decay), lr


def optimizers_of(weights: Mapping[str, Tensor], config: TrainConfig) -> Optimizers:
    """weights: of a head, by name."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, weight in weights.items():
        inner = weight.dim() == 2 and ("layers." in name or name.startswith("fc."))
        (matrices if inner and config.optimizer == "muon" else others).append(weight)
    made = [adamw(others, config.lr, config.weight_decay)]
    if matrices:
        muon = torch.optim.Muon(matrices, config.muon_lr, weight_decay=config.weight_decay)
        made.append((muon, config.muon_lr))
    return Optimizers(*made)
