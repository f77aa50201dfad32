"""Logistic regression over hashed features, learned online with AdaGrad: one table of weights of fixed
size.

Hashing trick: Weinberger et al., arXiv 0902.2206. A feature is a number of 32 bits, made of text by
CRC-32, which is the same in every process. Features that share a slot cost accuracy, never memory.
"""

import base64
import math
import sys
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

    def state(self) -> list[str]:
        """All that was learned, as text."""
        return [_packed(self._weights), _packed(self._squares)]

    def restore(self, state: Sequence[str]) -> None:
        """Raises a ValueError where the state cannot be one."""
        weights, squares = map(_unpacked, state)
        if min(squares) < 0:
            raise ValueError("a sum of squares is negative")
        self._weights, self._squares = weights, squares

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


def _packed(values: "array[float]") -> str:
    little = array("f", values)
    if sys.byteorder != "little":
        little.byteswap()
    return base64.b64encode(zlib.compress(little.tobytes(), 1)).decode()


def _unpacked(text: str) -> "array[float]":
    reader = zlib.decompressobj()
    try:
        raw = reader.decompress(base64.b64decode(text, validate=True), 4 << BITS)
    except zlib.error as problem:
        raise ValueError("it is not whole") from problem
    values = array("f")
    values.frombytes(raw)
    if sys.byteorder != "little":
        values.byteswap()
    if len(values) != 1 << BITS or not reader.eof or not all(map(math.isfinite, values)):
        raise ValueError("these are no weights")
    return values
