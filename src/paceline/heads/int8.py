"""Weights in a byte each, with a scale for every 64 of a row, or for the whole row where 64 do not fit."""

from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

SCALE: Final = ".scale"  # what the name of a matrix's scales ends with


_GROUP: Final = 64  # columns


def packed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices as int8 [rows, columns] with float32 scales [rows, groups] beside them; the rest as it is."""
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.dim() != 2 or not weight.is_floating_point():
            tensors[name] = weight
            continue
        columns = weight.shape[1]
        groups = weight.float().reshape(len(weight), -1, columns if columns % _GROUP else _GROUP)
        largest = groups.abs().amax(2).clamp(min=1e-30)
        tensors[name + SCALE] = scale = largest / 127
        tensors[name] = (groups / scale[:, :, None]).round().clamp(-127, 127).to(torch.int8).flatten(1)
    return tensors


class Unpacked(Mapping[str, Tensor]):
    """The floats that they stand for, made one matrix at a time as they are asked for."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        tensor, scale = self._tensors[name], self._tensors.get(name + SCALE)
        return tensor if scale is None else _floats(tensor, scale)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._tensors if not name.endswith(SCALE))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self._tensors[name].shape) for name in self}


def _floats(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight.float().view(len(weight), scale.shape[1], -1) * scale[:, :, None]).flatten(1)
