"""The memory of the native KV cache."""

import mmap
from contextlib import suppress
from math import prod

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError
from paceline.target.native.library import SUB_BLOCK
from paceline.target.weights.model_config import ModelConfig

Halves = NDArray[np.float16]


class NativeRows:
    """Keys as [layers, kv_heads, sub-blocks, head_dim, 16], values as [layers, kv_heads, slots, head_dim].

    Slot s is token s % 16 of sub-block s // 16. Memory is touched only as rows are written.
    """

    def __init__(self, shape: ModelConfig, slots: int) -> None:
        self.sub_blocks = slots // SUB_BLOCK
        heads = (shape.layers, shape.kv_heads)
        try:
            self.keys = _zeros(*heads, self.sub_blocks, shape.head_dim, SUB_BLOCK)
            self.values = _zeros(*heads, slots, shape.head_dim)
        except (MemoryError, OSError):
            raise UsageError("the KV cache does not fit into memory: give a smaller cache_mb") from None

    def copy(self, source: int, target: int, count: int) -> None:
        """Both multiples of 16; whole sub-blocks are copied."""
        subs = -(-count // SUB_BLOCK)
        a, b = source // SUB_BLOCK, target // SUB_BLOCK
        self.keys[:, :, b : b + subs] = self.keys[:, :, a : a + subs]
        self.values[:, :, target : target + count] = self.values[:, :, source : source + count]

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Single slots; every source is read before any target is written."""
        (a, i), (b, j) = np.divmod(sources, SUB_BLOCK), np.divmod(targets, SUB_BLOCK)
        self.keys[:, :, b, :, j] = self.keys[:, :, a, :, i]
        self.values[:, :, targets] = self.values[:, :, sources]

    def scribble(self, slots: list[int]) -> None:
        """Fills slots, the first a multiple of 16, and what else is in their sub-blocks, with small noise."""
        noise = np.random.default_rng(0).standard_normal(self.keys.shape[-2:]).astype(np.float16)
        for sub in sorted({slot // SUB_BLOCK for slot in slots}):
            self.keys[:, :, sub] = noise
            self.values[:, :, sub * SUB_BLOCK : (sub + 1) * SUB_BLOCK] = noise.T


def _zeros(*shape: int) -> Halves:
    """In small pages: a sequence's rows are spread over every layer, and would fill a huge page in each."""
    memory = mmap.mmap(-1, 2 * prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.float16).reshape(shape)
