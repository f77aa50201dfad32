"""Counter-based noise: it depends on the position where it is used, never on what was sampled before."""

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]
Words = NDArray[np.uint32]
Key = tuple[int, int]  # two 32-bit words

# What a noise is for. Streams never meet, so a draft's coins say nothing about the target's.
CHOICE: Final = 0
DRAFT: Final = 1
ACCEPT: Final = 2
RESAMPLE: Final = 3

_MASK64: Final = (1 << 64) - 1


def _mix64(x: int) -> int:
    """The splitmix64 finaliser."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _mix(seed: int, choice: int, stream: int, index: int, slot: int) -> int:
    x = _mix64((seed + 0x9E3779B97F4A7C15) & _MASK64)
    x = _mix64(x ^ (choice << 3 | stream))
    return _mix64(x ^ (index << 20 | slot))


def noise_key(seed: int, choice: int, stream: int, index: int, slot: int = 0) -> Key:
    """index: the position in the output. slot: tells apart several samples at one position."""
    x = _mix(seed, choice, stream, index, slot)
    return x >> 32, x & 0xFFFFFFFF


def coin(seed: int, choice: int, stream: int, index: int, slot: int) -> float:
    """Uniform in [0, 1), 53 bits."""
    return (_mix(seed, choice, stream, index, slot) >> 11) * 2.0**-53


@lru_cache(maxsize=4)
def spread_ids(vocab: int) -> Words:
    """Token ids scattered over 32 bits, so that neighbouring ids share no pattern."""
    return spread(np.arange(vocab))


def spread(ids: Ids) -> Words:
    x = ids.astype(np.uint32) * np.uint32(0x9E3779B1)
    x ^= x >> np.uint32(15)
    return x


def scramble(spread: Words, key: Key) -> Words:
    """The lowbias32 mixer with the key woven in: 32 random bits for each id."""
    x = spread ^ np.uint32(key[0])
    x *= np.uint32(key[1] | 1)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


def gumbel_of(bits: Words) -> Doubles:
    return -np.log(-np.log((bits.astype(np.float64) + 0.5) * 2.0**-32))


def gumbel(key: Key, ids: Ids) -> Doubles:
    """Standard Gumbel noise of these token ids."""
    return gumbel_of(scramble(spread(ids), key))
