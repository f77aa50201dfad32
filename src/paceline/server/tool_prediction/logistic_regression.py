"""Logistic regression over hashed features, learned online with AdaGrad: one table of weights of fixed
size.

Hashing trick: Weinberger et al., arXiv 0902.2206. A feature is a number of 32 bits, made of text by
CRC-32, which is the same in every process. Features that share a slot cost accuracy, never memory.
"""

import math
import zlib
from array import array
from collections.abc import Sequence
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


class LogisticRegression:
    """256 KiB whatever it learns."""

    def __init__(self, rate: float = 0.6) -> None:
        self._weights = array("f", bytes(4 << BITS))
        self._squares = array("f", bytes(4 << BITS))
        self._rate = rate

    def probability(self, features: Sequence[int], offset: float) -> float:
        """offset: the log-odds before anything is learned."""
        weights = self._weights
        return sigmoid(offset + sum([weights[f & _MASK] for f in features]))

    def learn(self, features: Sequence[int], offset: float, label: bool) -> None:
        """By the probability as it is now: what was predicted may be older than what was learned since."""
        weights, squares, rate = self._weights, self._squares, self._rate
        error = self.probability(features, offset) - label
        rate /= math.sqrt(len(features))  # so that one answer does not outweigh all before it
        for f in features:
            i = f & _MASK
            gradient = error + _DECAY * weights[i]
            squares[i] += gradient * gradient
            weights[i] -= rate * gradient / math.sqrt(squares[i] + 1.0)
