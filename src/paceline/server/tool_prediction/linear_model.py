"""Logistic regression over hashed features, learned online with AdaGrad: one table of weights of fixed size.

Hashing trick: Weinberger et al., arXiv 0902.2206. A feature is a number of 32 bits, made of text by CRC-32, which is
the same in every process. Features that share a slot cost accuracy, never memory.
"""

import math
import zlib
from array import array
from collections.abc import Iterable
from typing import Final

BITS: Final = 15
_MASK: Final = (1 << BITS) - 1
_MIX: Final = 2654435761  # Knuth's multiplicative hash
_DECAY: Final = 1e-4
_STEEPEST: Final = 30.0


def feature(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def crossed(one: int, other: int) -> int:
    """The feature that both are there."""
    return ((one ^ (other * _MIX)) * _MIX >> 7) & 0xFFFFFFFF


def sigmoid(score: float) -> float:
    return 1.0 / (1.0 + math.exp(-max(-_STEEPEST, min(_STEEPEST, score))))


def logit(probability: float) -> float:
    return math.log(probability / (1.0 - probability))


class LinearModel:
    """256 KiB whatever it learns."""

    def __init__(self, rate: float = 0.3) -> None:
        self._weights = array("f", bytes(4 << BITS))
        self._squares = array("f", bytes(4 << BITS))
        self._rate = rate

    def score(self, features: Iterable[int]) -> float:
        weights = self._weights
        return sum(weights[f & _MASK] for f in features)

    def update(self, features: Iterable[int], error: float) -> None:
        """error: the probability less the label, 0 or 1."""
        weights, squares, rate = self._weights, self._squares, self._rate
        for f in features:
            i = f & _MASK
            gradient = error + _DECAY * weights[i]
            squares[i] += gradient * gradient
            weights[i] -= rate * gradient / math.sqrt(squares[i] + 1.0)
