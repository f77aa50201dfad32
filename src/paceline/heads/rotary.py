"""Rotary positions of heads, in the half-rotation convention."""

import torch
from torch import Tensor


def rotation(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """[...] -> cosines and signed sines, each [..., head_dim]."""
    dims = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions[..., None].float() * theta ** (-dims / head_dim)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turn
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)
