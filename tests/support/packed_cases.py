"""Packed matrices made from random blocks, and the paths of the C++ that this machine can run."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.errors import NotCompiled
from paceline.target import hardware
from paceline.target.native import library
from paceline.target.native.library import (
    CODE_BYTES,
    FORMATS,
    GROUP,
    SCALE_BYTES,
    SCALE_GROUPS,
    TILE,
    UNIT,
    Linear,
)
from paceline.target.native.packing import TO_FOUR_BITS
from paceline.target.weights.dequant import ENCODINGS

PATHS = tuple(library.NEEDS)
FROM_FLOATS = ("F32", TO_FOUR_BITS)
KINDS = tuple(kind for kind in library.ENCODINGS if kind not in FROM_FLOATS)
GUARD = 0xA5  # what must be left around a packed matrix

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


def every_path() -> list[Any]:
    """Parameters of a test: all paths, those that cannot run here skipped with the reason."""
    return [
        pytest.param(
            path,
            marks=pytest.mark.skipif(
                not hardware.has(library.NEEDS[path]), reason=f"the CPU lists no {path.replace('_', '-')}"
            ),
        )
        for path in PATHS
    ]


def runnable() -> list[str]:
    return [path for path in PATHS if hardware.has(library.NEEDS[path])]


def built(path: str) -> ctypes.CDLL:
    try:
        return library.load(path)
    except NotCompiled as error:
        pytest.skip(str(error))


def block_elements(kind: str) -> int:
    return ENCODINGS[kind].elements if kind not in FROM_FLOATS else GROUP


# Bytes of a block where a half-precision number starts.
HALVES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_K", "Q5_K", "Q4_1", "Q5_1"), (0, 2)),
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), (0,)),
    "Q6_K": (208,),
    "Q3_K": (108,),
}


def random_blocks(
    kind: str, outputs: int, inputs: int, random: np.random.Generator, tame: bool = False
) -> Bytes:
    """[outputs, bytes]: any bytes, but finite half-precision numbers. tame: of about the same size."""
    encoding = ENCODINGS[kind]
    count = outputs * inputs // encoding.elements
    blocks = random.integers(0, 256, (count, encoding.nbytes), dtype=np.uint8)
    for at in HALVES[kind]:
        if tame:
            halves = (random.uniform(0.5, 2, count) * random.choice((-1, 1), count)).astype(np.float16)
        else:  # every finite number, denormal ones and zeros of both signs too
            halves = random.integers(0, 0x7C00, count).astype(np.uint16).view(np.float16)
            halves *= random.choice((-1, 1), count).astype(np.float16)
        blocks[:, at : at + 2] = halves[:, None].view(np.uint8)
    return blocks.reshape(outputs, -1)


def decoded(kind: str, blocks: Bytes) -> Floats:
    """What target/dequant.py makes of them, [outputs, inputs]."""
    encoding = ENCODINGS[kind]
    flat = np.ascontiguousarray(blocks).reshape(-1, encoding.nbytes)
    out = np.empty((len(flat), encoding.elements), np.float32)
    encoding.decode(flat, out)
    return out.reshape(len(blocks), -1)


def without_base(kind: str, blocks: Bytes) -> Bytes:
    """The same blocks with their minima or bases zero."""
    flat = blocks.reshape(-1, ENCODINGS[kind].nbytes).copy()
    for at in HALVES[kind][1:]:
        flat[:, at : at + 2] = 0
    return flat.reshape(blocks.shape)


@dataclass
class Packed:
    linear: Linear
    memory: Bytes  # what the structure points at, with guards around codes and scales

    def unpacked(self, lib: ctypes.CDLL) -> Floats:
        found = np.full((self.linear.outputs, self.linear.inputs), np.nan, np.float32)
        rows = np.arange(len(found), dtype=np.int32)
        lib.paceline_unpack(ctypes.byref(self.linear), rows.ctypes.data, len(rows), found.ctypes.data)
        return found

    def times(self, lib: ctypes.CDLL, x: Floats) -> Floats:
        """x [rows, inputs] to [rows, outputs], padded ones too."""
        x = np.ascontiguousarray(x, np.float32)
        assert x.shape[1] == self.linear.inputs
        out = np.full((len(x) + 1, self.linear.outputs), np.nan, np.float32)
        assert not lib.paceline_multiply(ctypes.byref(self.linear), x.ctypes.data, len(x), out.ctypes.data)
        assert np.isnan(out[len(x)]).all(), "written past the last row"
        return out[: len(x)]


def up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def pack(
    lib: ctypes.CDLL, kind: str, *sources: Bytes, order: NDArray[np.int32] | None = None, pieces: int = 1
) -> list[Packed]:
    """Packs matrices of one shape; several of them are woven, pair of tiles by pair of tiles.

    A source holds encoded rows, or whole groups of floats as bytes where these are rounded. order: the
    source's row that each output shows. pieces: how many calls share the work.
    """
    shown = len(sources[0]) if order is None else len(order)
    outputs, inputs = up(shown, UNIT), sources[0].shape[1] // _block_bytes(kind) * block_elements(kind)
    form = library.ENCODINGS[kind]
    codes = inputs // GROUP * CODE_BYTES[form]  # of a tile
    scales = inputs // GROUP // SCALE_GROUPS[form] * SCALE_BYTES[form]
    tiles, woven = outputs // TILE, len(sources)
    sizes = [woven * tiles * codes, woven * tiles * scales]
    memory = np.full(sum(sizes) + 4 * 64, GUARD, np.uint8)
    first = -memory.ctypes.data % 64 + 64
    second = up(first + sizes[0] + 64, 64)
    rows = np.full(outputs, -1, np.int32)
    rows[:shown] = np.arange(shown) if order is None else order
    packed = []
    for i, source in enumerate(sources):
        linear = Linear(
            format=FORMATS.index(form),
            outputs=outputs,
            inputs=inputs,
            codes=memory.ctypes.data + first + 2 * i * codes,
            scales=memory.ctypes.data + second + 2 * i * scales,
            codes_pair=2 * woven * codes,
            scales_pair=2 * woven * scales,
        )
        bytes_ = np.ascontiguousarray(source)
        cuts = [tiles * p // pieces for p in range(pieces + 1)]
        for begin, end in pairwise(cuts):
            lib.paceline_pack(
                list(library.ENCODINGS).index(kind),
                *(bytes_.ctypes.data, bytes_.strides[0], inputs // GROUP, rows.ctypes.data),
                *(ctypes.byref(linear), begin, end),
            )
        packed.append(Packed(linear, memory))
    outside = np.ones(len(memory), bool)
    outside[first : first + sizes[0]] = outside[second : second + sizes[1]] = False
    assert (memory[outside] == GUARD).all(), "written outside of codes and scales"
    return packed


def _block_bytes(kind: str) -> int:
    return ENCODINGS[kind].nbytes if kind not in FROM_FLOATS else 4 * GROUP


def quantised(x: Floats) -> tuple[Floats, Floats]:
    """Codes and scales [.., groups, 1] of rows, as a pass takes them."""
    groups = np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, GROUP)
    most = np.abs(groups).max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(most > 0, np.float32(127) / most, np.float32(0)).astype(np.float32)
    return np.rint(groups * inverse), most / np.float32(127)


def as_taken(x: Floats) -> Doubles:
    """Rows after their way through eight bits."""
    codes, scales = quantised(x)
    return (codes.astype(np.float64) * scales.astype(np.float64)).reshape(x.shape)
