"""Who changes which weights: AdamW all of them, or Muon the matrices of the layers and AdamW the rest."""

from typing import Any

import torch
from torch import nn

from paceline.train.recipe import TrainConfig


class Optimizers:
    """As one; rates are set anew for every step."""

    def __init__(self, net: nn.Module, config: TrainConfig) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, weight in net.named_parameters():
            inner = weight.dim() == 2 and ("layers." in name or name.startswith("fc."))
            (matrices if inner and config.optimizer == "muon" else others).append(weight)
        self._made: list[tuple[torch.optim.Optimizer, float]] = [
            (
                torch.optim.AdamW(others, config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay),
                config.lr,
            )
        ]
        if matrices:
            muon = torch.optim.Muon(matrices, config.muon_lr, weight_decay=config.weight_decay)
            self._made.append((muon, config.muon_lr))

    def step(self, rate: float) -> None:
        """rate: the share of the configured rates to use."""
        for optimizer, lr in self._made:
            for group in optimizer.param_groups:
                group["lr"] = lr * rate
            optimizer.step()

    def state(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer, _ in self._made]

    def restore(self, states: list[dict[str, Any]]) -> None:
        for (optimizer, _), state in zip(self._made, states, strict=True):
            optimizer.load_state_dict(state)
