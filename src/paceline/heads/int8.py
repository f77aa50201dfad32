"""Weights in a byte each: every row of a matrix has a scale of its own."""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

SCALE: Final = ".scale"  # what the name of a matrix's scales ends with


def packed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices as int8 [rows, columns] with float32 scales [rows] beside them; the rest as it is."""
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.dim() != 2 or not weight.is_floating_point():
            tensors[name] = weight
            continue
        largest = weight.float().abs().amax(1).clamp(min=1e-30)
        tensors[name + SCALE] = largest / 127
        tensors[name] = (weight.float() * (127 / largest)[:, None]).round().clamp(-127, 127).to(torch.int8)
    return tensors


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.float() * tensors[name + SCALE][:, None] if name + SCALE in tensors else tensor
        for name, tensor in tensors.items()
        if not name.endswith(SCALE)
    }
