"""Greedy and top-p sampling of many rows at once, on any device: the same tokens as sampling/ chooses.

It uses the counter-based Gumbel noise of sampling/noise.py (splitmix64), so that an answer depends on its
seed and not on its neighbours.
"""

from typing import Final

import torch
from torch import Tensor

NUCLEUS: Final = 512  # tokens that top-p keeps, at most

_32: Final = 0xFFFFFFFF


def greedy(logits: Tensor) -> Tensor:
    """[rows, vocab] -> [rows]."""
    return logits.argmax(-1)


def nucleus(logits: Tensor, temperature: float, top_p: float, seeds: Tensor, index: Tensor) -> Tensor:
    """logits [rows, vocab], seeds and output indices [rows] int64 -> tokens [rows]."""
    best, ids = logits.topk(min(NUCLEUS, logits.shape[-1]), -1)
    x = (best - best[:, :1]) / temperature
    total = ((logits - best[:, :1]) / temperature).exp().sum(-1, keepdim=True, dtype=torch.float64)
    weight = x.double().exp()
    before = weight.cumsum(-1) - weight  # the weight of likelier tokens
    score = x.double() + _gumbel(_keys(seeds, index), ids)
    score = score.masked_fill(before >= top_p * total, float("-inf"))
    return ids.gather(1, score.argmax(-1, keepdim=True))[:, 0]


def _gumbel(keys: tuple[Tensor, Tensor], ids: Tensor) -> Tensor:
    """[rows] keys, [rows, n] token ids -> [rows, n] float64."""
    x = (ids * 0x9E3779B1) & _32
    x = x ^ (x >> 15) ^ keys[0][:, None]
    x = (x * (keys[1] | 1)[:, None]) & _32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _32
    x = x ^ (x >> 16)
    return -torch.log(-torch.log((x.double() + 0.5) * 2.0**-32))


def _keys(seeds: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """noise.noise_key of each row, for the first choice."""
    x = _mix64(_mix64(seeds + _signed(0x9E3779B97F4A7C15)))
    x = _mix64(x ^ (index << 20))
    return _shifted(x, 32), x & _32


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x
