"""Rotary positions: cosines and sines by position, for the half-rotation (NeoX) convention."""

import math
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.target.weights.model_config import Rope

_GROWTH: Final = 1024  # positions


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[head_dim / 2] float32: radians per position; 0 for dimensions that are not rotated."""
    dims = rope.dims or head_dim
    rotated = _scaled(1.0 / rope.theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims), rope, dims)
    return F.pad(rotated, (0, (head_dim - dims) // 2))


def amplitudes(rope: Rope, head_dim: int) -> Tensor | None:
    """[head_dim / 2] float32: what cosines and sines are multiplied by; None: nothing."""
    if rope.attention_factor == 1:
        return None
    dims = rope.dims or head_dim
    return F.pad(torch.full((dims // 2,), rope.attention_factor), (0, (head_dim - dims) // 2), value=1.0)


def _scaled(base: Tensor, rope: Rope, dims: int) -> Tensor:
    if rope.divisors:
        return base / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3(base, rope)
    if rope.kind == "yarn":
        return _yarn(base, rope, dims)
    return base


def _llama3(base: Tensor, rope: Rope) -> Tensor:
    """Slow frequencies are divided by the factor, fast ones left alone, those between are blended."""
    turns = rope.original_context * base / (2 * math.pi)  # within the context the model was first trained on
    fast = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    fast = fast.clamp(0.0, 1.0)
    return (1 - fast) * base / rope.factor + fast * base


def _yarn(base: Tensor, rope: Rope, dims: int) -> Tensor:
    """Frequencies of many turns within the original context stay, those of few are divided by the factor.

    Between the two bounds they are blended by their index.
    """

    def index_of(turns: float) -> float:
        return dims * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.whole_bounds:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    slow = (torch.arange(dims // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    slow = slow.clamp(0.0, 1.0)
    return base / rope.factor * slow + base * (1 - slow)


class RopeTable:
    """Grows with the highest position used; a computed row never changes."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        self._frequencies, self._amplitudes = frequencies(rope, head_dim), amplitudes(rope, head_dim)
        self._cos = self._sin = torch.empty(0, head_dim, device=device)

    def rows(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines for positions below `length`, each [rows, head_dim]: see `rotate`."""
        self._grow(length)
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _grow(self, length: int) -> None:
        have = len(self._cos)
        if length <= have:
            return
        stop = -(-length // _GROWTH) * _GROWTH
        angles = torch.arange(have, stop, dtype=torch.float32)[:, None] * self._frequencies
        cos, sin = angles.double().cos().float(), angles.double().sin().float()
        if self._amplitudes is not None:
            cos, sin = cos * self._amplitudes, sin * self._amplitudes
        new_cos = torch.cat((cos, cos), -1).to(self._cos.device)
        new_sin = torch.cat((-sin, sin), -1).to(self._sin.device)
        self._cos, self._sin = torch.cat((self._cos, new_cos)), torch.cat((self._sin, new_sin))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[heads, rows, head_dim], contiguous. No fused operation: it may round by where an element lies."""
    return x.roll(x.shape[-1] // 2, -1).mul_(sin).add_(x * cos)
