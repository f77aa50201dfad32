"""Int8 weights of a draft head: float tensors, packed in 8 bits into one block of memory."""

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from math import prod
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.target.native import library
from paceline.target.native.library import CODE_BYTES, ENCODINGS, GROUP, SCALE_BYTES, TILE, UNIT

_ENCODING: Final = "F32"
_FORMAT: Final = ENCODINGS[_ENCODING]
_HUGE: Final = 2 << 20


class Int8Weights:
    """One stretch of memory, filled front to back; what is handed out points into it."""

    def __init__(self, lib: ctypes.CDLL, nbytes: int) -> None:
        memory = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        data = np.frombuffer(memory, np.uint8)
        self._data = data[-data.ctypes.data % _HUGE :][:nbytes]
        self._lib, self._at = lib, 0

    @property
    def start(self) -> int:
        return int(self._data.ctypes.data)

    @property
    def used(self) -> int:
        """Bytes handed out so far."""
        return self._at

    def matrices(self, weights: Sequence[Tensor]) -> list[library.Linear]:
        """Matrices of one shape, each [outputs, inputs], that lie in turns, two tiles each."""
        outputs, inputs = _up(weights[0].shape[0], UNIT), _up(weights[0].shape[1], GROUP)
        codes, scales = (inputs // GROUP * table[_FORMAT] for table in (CODE_BYTES, SCALE_BYTES))
        pair = 2 * len(weights)
        first_codes = self._take(outputs // 2 * pair * codes // TILE)
        first_scales = self._take(outputs // 2 * pair * scales // TILE)
        linears = []
        for i, weight in enumerate(weights):
            linear = library.Linear(
                format=library.FORMATS.index(_FORMAT),
                outputs=outputs,
                inputs=inputs,
                codes=first_codes + 2 * i * codes,
                scales=first_scales + 2 * i * scales,
                codes_pair=pair * codes,
                scales_pair=pair * scales,
            )
            self._pack(weight, linear)
            linears.append(linear)
        return linears

    def matrix(self, weight: Tensor) -> library.Linear:
        return self.matrices([weight])[0]

    def floats(self, values: Tensor) -> int:
        """The address of a copy."""
        start, flat = self._take(4 * values.numel()), _floats(values).reshape(-1)
        ctypes.memmove(start, flat.ctypes.data, flat.nbytes)
        return start

    def _pack(self, weight: Tensor, to: library.Linear) -> None:
        rows = _floats(weight)
        if surplus := to.inputs - weight.shape[1]:
            rows = np.pad(rows, ((0, 0), (0, surplus)))
        order = np.full(to.outputs, -1, np.int32)
        order[: len(rows)] = np.arange(len(rows))
        encoding = list(ENCODINGS).index(_ENCODING)
        source = ctypes.c_void_p(rows.ctypes.data), rows.strides[0], to.inputs // GROUP
        self._lib.paceline_pack(encoding, *source, order.ctypes.data, ctypes.byref(to), 0, to.outputs // TILE)

    def _take(self, nbytes: int) -> int:
        start = self._at
        self._at = _up(start + nbytes, 64)
        assert self._at <= len(self._data), "more weights than were announced"
        return self.start + start


def bytes_for(sizes: Iterable[tuple[int, ...]]) -> int:
    """Bytes that weights of these sizes take at most, as matrices or as floats."""
    return sum(4 * _up(size[0], UNIT) * _up(prod(size[1:]), GROUP) + 4096 for size in sizes)


def _floats(values: Tensor) -> NDArray[np.float32]:
    floats: NDArray[np.float32] = values.detach().to("cpu", torch.float32).contiguous().numpy()
    return floats


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
