"""LoRA (arXiv 2106.09685): low-rank adapters of a decoder's matrices, merged into them after training."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.train.train_decoder import JOINED, Layer, TrainDecoder

MATRICES: Final = tuple(JOINED)


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """Adds scale * up @ down to a matrix."""

    down: Tensor  # [rank, inputs]
    up: Tensor  # [outputs, rank]; zero at first, so that nothing is added
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.down), self.up) * self.scale

    def product(self) -> Tensor:
        return self.scale * (self.up @ self.down)


def add_adapters(
    model: TrainDecoder, rank: int, alpha: float, generator: torch.Generator
) -> dict[str, Tensor]:
    """Adds adapters to every matrix of every layer; returns the trainable tensors by name."""
    trained: dict[str, Tensor] = {}
    for name_prefix, layer, name in _matrices(model):
        rows, columns = layer.parts[name].shape
        bound = columns**-0.5
        down = (2 * torch.rand(rank, columns, generator=generator) - 1) * bound
        made = LoraAdapter(
            down.to(model.device).requires_grad_(),
            torch.zeros(rows, rank, device=model.device, requires_grad=True),
            alpha / rank,
        )
        layer.added[name] = made
        trained |= {f"{name_prefix}.{name}.down": made.down, f"{name_prefix}.{name}.up": made.up}
    return trained


@torch.no_grad()
def merge(model: TrainDecoder) -> None:
    """Merges every adapter into its matrix."""
    for _, layer, name in _matrices(model):
        added = layer.added.pop(name, None)
        if isinstance(added, LoraAdapter):
            layer.parts[name] = layer.parts[name] + added.product()


def _matrices(model: TrainDecoder) -> Iterator[tuple[str, Layer, str]]:
    for i, layer in enumerate(model.layers):
        for name in MATRICES:
            yield f"layers.{i}", layer, name
