"""Packed weights: where each tensor lies (`plan`), and the repacking of a file's blocks (`pack_into`)."""

import ctypes
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from paceline import limits
from paceline.target.native import library
from paceline.target.native.library import (
    CODE_BYTES,
    ENCODINGS,
    GROUP,
    MAX_HEAD_DIM,
    SCALE_BYTES,
    SCALE_GROUPS,
    TILE,
    UNIT,
)
from paceline.target.weights.checkpoint import Checkpoint
from paceline.target.weights.model_config import ModelConfig
from paceline.target.weights.reader import rotation_order
from paceline.target.weights.tensors import TensorEntry, read_raw, read_tensor

Bytes = NDArray[np.uint8]

ALIGNMENT: Final = 4096
FLOATS: Final = ("F32", "F16", "BF16")
TO_FOUR_BITS: Final = "F32 to 4"  # made of floats, whatever the file holds
MATRICES: Final = ("q", "k", "v", "o", "gate", "up", "down", "embed", "head")
_TILES: Final = 64  # packed at once by one thread


@dataclass(frozen=True, slots=True)
class Matrix:
    """Offsets in bytes from the start of the data; *_pair: from one pair of tiles to the next."""

    encoding: str  # a key of ENCODINGS
    outputs: int
    inputs: int
    codes: int
    scales: int
    codes_pair: int
    scales_pair: int


@dataclass(frozen=True, slots=True)
class Vector:
    offset: int
    length: int  # padded, float32


@dataclass(frozen=True, slots=True)
class Layout:
    matrices: Mapping[str, Matrix]
    vectors: Mapping[str, Vector]
    nbytes: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class PackedWeights:
    """Packed tensors in one stretch of memory."""

    def __init__(self, layout: Layout, data: Bytes, digest: str = "") -> None:
        """digest: of all the data."""
        self.layout = layout
        self.digest = digest
        self._data = data
        self._start = data.ctypes.data
        self.nbytes = layout.nbytes

    def matrix(self, name: str) -> library.Linear:
        return _linear(self.layout.matrices[name], self._start)

    def floats(self, name: str) -> NDArray[np.float32]:
        """A copy of a vector, padded."""
        entry = self.layout.vectors[name]
        return self._data[entry.offset :][: 4 * entry.length].view(np.float32).copy()

    def vector(self, name: str) -> int | None:
        """Its address, or None if the model has none of that name."""
        entry = self.layout.vectors.get(name)
        return None if entry is None else self._start + entry.offset


def unsupported_reason(shape: ModelConfig, tensors: Mapping[str, TensorEntry], quantise: bool) -> str | None:
    """Why a model cannot run natively, or None. quantise: whether float weights may be rounded."""
    if shape.experts is not None and shape.width % GROUP:
        return f"a width of {shape.width}: with experts it knows multiples of {GROUP}"
    if shape.head_dim % GROUP or shape.head_dim > MAX_HEAD_DIM:
        return f"heads of {shape.head_dim}: expected a multiple of {GROUP}, at most {MAX_HEAD_DIM}"
    for name, entry in tensors.items():
        if _part(name) not in MATRICES:
            continue
        if entry.encoding in FLOATS:
            if not quantise:
                return f"{name} is {entry.encoding}; dtype=int8 would round such weights to 8 bits"
        elif entry.encoding not in ENCODINGS:
            return f"{name} is {entry.encoding}"
    return None


def plan(tensors: Mapping[str, TensorEntry], four_bits: bool = False) -> Layout:
    """four_bits: whatever takes more is rounded to 4 bits a weight."""
    cursor = _Cursor()
    encodings = {name: encoding_of(entry, four_bits) for name, entry in tensors.items()}
    matrices: dict[str, Matrix] = {}
    vectors: dict[str, Vector] = {}
    for name, entry in tensors.items():
        if _part(name) not in MATRICES:
            length = _up(entry.elements, UNIT)
            vectors[name] = Vector(cursor.take(4 * length), length)
        elif _part(name) == "up" and _paired(encodings, name):
            gate = matrices[name.removesuffix("up") + "gate"]
            matrices[name] = replace(
                gate, codes=gate.codes + gate.codes_pair // 2, scales=gate.scales + gate.scales_pair // 2
            )
        else:
            wide = _part(name) == "gate" and _paired(encodings, name.removesuffix("gate") + "up")
            matrices[name] = _matrix(entry, encodings[name], cursor, 2 if wide else 1)
    return Layout(matrices, vectors, cursor.at)


def _paired(encodings: Mapping[str, str], up: str) -> bool:
    """Gate and up lie in turns, two tiles each, if they are encoded alike: both are read as one stream."""
    return encodings[up] == encodings[up.removesuffix("up") + "gate"]


def _matrix(entry: TensorEntry, encoding: str, cursor: "_Cursor", woven: int) -> Matrix:
    """woven: how many matrices share the stretch of memory."""
    kind = ENCODINGS[encoding]
    outputs, inputs = _up(entry.shape[0], UNIT), _up(entry.shape[1], GROUP)
    groups = inputs // GROUP
    codes, scales = groups * CODE_BYTES[kind], groups // SCALE_GROUPS[kind] * SCALE_BYTES[kind]
    tiles = woven * outputs // TILE
    return Matrix(
        encoding,
        outputs,
        inputs,
        cursor.take(tiles * codes),
        cursor.take(tiles * scales),
        woven * 2 * codes,
        woven * 2 * scales,
    )


def encoding_of(entry: TensorEntry, four_bits: bool = False) -> str:
    if four_bits and not entry.encoding.startswith(("Q4", "Q3", "MXFP4")):
        return TO_FOUR_BITS
    return "F32" if entry.encoding in FLOATS else entry.encoding


class _Cursor:
    def __init__(self) -> None:
        self.at = 0

    def take(self, nbytes: int) -> int:
        start = self.at
        self.at = _up(start + nbytes, ALIGNMENT)
        return start


def _part(name: str) -> str:
    return name.rpartition(".")[2]


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def pack_into(
    data: Bytes,
    layout: Layout,
    checkpoint: Checkpoint,
    tensors: Mapping[str, TensorEntry],
    lib: ctypes.CDLL,
    packed: Callable[[], object] = lambda: None,
) -> None:
    """packed: called after each matrix."""
    with ThreadPoolExecutor(limits.cores()) as pool:
        for name, matrix in layout.matrices.items():
            _pack(name, matrix, data, checkpoint, tensors[name], lib, pool)
            packed()
        for name, vector in layout.vectors.items():
            values = _vector(name, vector, checkpoint, tensors[name], pool)
            data[vector.offset :][: values.nbytes] = values.view(np.uint8)


def _pack(
    name: str,
    matrix: Matrix,
    data: Bytes,
    checkpoint: Checkpoint,
    entry: TensorEntry,
    lib: ctypes.CDLL,
    pool: ThreadPoolExecutor,
) -> None:
    raw = _raw_rows(entry, matrix.encoding, pool)
    order = np.full(matrix.outputs, -1, np.int32)
    order[: entry.shape[0]] = _row_order(name, checkpoint, entry.shape[0])
    linear = _linear(matrix, data.ctypes.data)
    encoding = list(library.ENCODINGS).index(matrix.encoding)
    groups = -(-entry.shape[1] // library.GROUP)

    def pack_from(tile: int) -> None:
        end = min(tile + _TILES, matrix.outputs // library.TILE)
        rows = ctypes.c_void_p(raw.ctypes.data), raw.strides[0], groups
        lib.paceline_pack(encoding, *rows, order.ctypes.data, ctypes.byref(linear), tile, end)

    for _ in pool.map(pack_from, range(0, matrix.outputs // library.TILE, _TILES)):
        pass


def _raw_rows(entry: TensorEntry, encoding: str, pool: ThreadPoolExecutor) -> NDArray[Any]:
    if encoding == entry.encoding and encoding not in FLOATS:
        return read_raw(entry).reshape(entry.shape[0], -1)
    dense = read_tensor(entry, torch.float32, pool).numpy()
    surplus = -entry.shape[1] % library.GROUP
    return np.ascontiguousarray(np.pad(dense, ((0, 0), (0, surplus))))


def _row_order(name: str, checkpoint: Checkpoint, rows: int) -> NDArray[np.int32]:
    order = rotation_order(checkpoint, name)
    return (torch.arange(rows) if order is None else order).to(torch.int32).numpy()


def _vector(
    name: str, vector: Vector, checkpoint: Checkpoint, entry: TensorEntry, pool: ThreadPoolExecutor
) -> NDArray[np.float32]:
    values = np.zeros(vector.length, np.float32)
    dense = read_tensor(entry, torch.float32, pool).flatten().numpy() + np.float32(
        checkpoint.norm_shift if name.endswith("norm") else 0.0
    )
    values[: entry.elements] = dense[_row_order(name, checkpoint, entry.elements)]
    return values


def _linear(matrix: Matrix, start: int) -> library.Linear:
    kind = library.FORMATS.index(library.ENCODINGS[matrix.encoding])
    return library.Linear(
        format=kind,
        outputs=matrix.outputs,
        inputs=matrix.inputs,
        codes=start + matrix.codes,
        scales=start + matrix.scales,
        codes_pair=matrix.codes_pair,
        scales_pair=matrix.scales_pair,
    )
