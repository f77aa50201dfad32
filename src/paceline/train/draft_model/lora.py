"""Low-rank additions to the matrices of a decoder: trained instead of it, and merged in the end."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.train.train_decoder import JOINED, Layer, TrainDecoder

MATRICES: Final = tuple(JOINED)


@dataclass(frozen=True, slots=True)
class LowRank:
    """Adds scale * up @ down to a matrix."""

    down: Tensor  # [rank, inputs]
    up: Tensor  # [outputs, rank]; begins with zeros, so that nothing is added
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.down), self.up) * self.scale

    def product(self) -> Tensor:
        return self.scale * (self.up @ self.down)


def add_low_rank(
    model: TrainDecoder, rank: int, alpha: float, generator: torch.Generator
) -> dict[str, Tensor]:
    """To every matrix of every layer; gives what is to be trained, by name."""
    trained: dict[str, Tensor] = {}
    for place, layer, name in _matrices(model):
        rows, columns = layer.parts[name].shape
        bound = columns**-0.5
        down = (2 * torch.rand(rank, columns, generator=generator) - 1) * bound
        made = LowRank(
            down.to(model.device).requires_grad_(),
            torch.zeros(rows, rank, device=model.device, requires_grad=True),
            alpha / rank,
        )
        layer.added[name] = made
        trained |= {f"{place}.{name}.down": made.down, f"{place}.{name}.up": made.up}
    return trained


@torch.no_grad()
def merge(model: TrainDecoder) -> None:
    """Every addition becomes part of its matrix."""
    for _, layer, name in _matrices(model):
        added = layer.added.pop(name, None)
        if isinstance(added, LowRank):
            layer.parts[name] = layer.parts[name] + added.product()


def _matrices(model: TrainDecoder) -> Iterator[tuple[str, Layer, str]]:
    for i, layer in enumerate(model.layers):
        for name in MATRICES:
            yield f"layers.{i}", layer, name
