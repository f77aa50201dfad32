"""The memory of the native KV cache."""

import mmap
from contextlib import suppress
from math import prod

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError
from paceline.target.native.library import SUB_BLOCK
from paceline.target.weights.model_config import ModelConfig


class NativeKVMemory:
    """Keys as [layers, kv_heads, sub-blocks, head_dim, 16], values as [layers, kv_heads, slots, head_dim].

    Slot s is token s % 16 of sub-block s // 16. Memory is touched only as rows are written.
    """

    keys: NDArray[np.float16]
    values: NDArray[np.float16]

    def __init__(self, shape: ModelConfig, slots: int) -> None:
        self.sub_blocks = slots // SUB_BLOCK
        heads = (shape.layers, shape.kv_heads)
        sizes = (*heads, self.sub_blocks, shape.head_dim, SUB_BLOCK), (*heads, slots, shape.head_dim)
        try:
            self._memory = [_memory(2 * prod(size)) for size in sizes]
        except (MemoryError, OSError):
            raise UsageError("the KV cache does not fit into memory: give a smaller cache_mb") from None
        self.keys, self.values = (
            np.frombuffer(memory, np.float16).reshape(size)
            for memory, size in zip(self._memory, sizes, strict=True)
        )

    def release(self) -> None:
        """All rows are zeros again, and take no memory until they are written."""
        for memory in self._memory:
            if hasattr(mmap, "MADV_DONTNEED"):
                memory.madvise(mmap.MADV_DONTNEED)

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

    def fill_with_noise(self, slots: list[int]) -> None:
        """Fills slots, the first a multiple of 16, and what else is in their sub-blocks, with small noise."""
        noise = np.random.default_rng(0).standard_normal(self.keys.shape[-2:]).astype(np.float16)
        for sub in sorted({slot // SUB_BLOCK for slot in slots}):
            self.keys[:, :, sub] = noise
            self.values[:, :, sub * SUB_BLOCK : (sub + 1) * SUB_BLOCK] = noise.T


def _memory(nbytes: int) -> mmap.mmap:
    """Zeros in small pages: a sequence's rows lie in every layer, and would fill a huge page in each."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
