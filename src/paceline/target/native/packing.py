"""Weights in the packed formats: made once, kept in a file, mapped into memory from then on."""

import ctypes
import hashlib
import json
import logging
import mmap
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.atomic import replacing
from paceline.paths import home
from paceline.target import hardware, memory
from paceline.target.native import library
from paceline.target.native.layout import FLOATS, Layout, Matrix, Vector, plan
from paceline.target.weights.checkpoint import Checkpoint
from paceline.target.weights.reader import half_rotation
from paceline.target.weights.tensors import StoredTensor, read_raw, read_tensor

VERSION: Final = 1  # of the file: to be raised whenever formats.h or the layout change
MAGIC: Final = b"paceline packed weights\n"
_HEAD: Final = 4096  # bytes before the data
_TILES: Final = 64  # packed at once by one thread
_HUGE: Final = 2 << 20
_SPARE_MEMORY: Final = 2.0  # times the weights: what must be free for a copy of them

Bytes = NDArray[np.uint8]
log = logging.getLogger("paceline")


class PackedWeights:
    """Packed tensors in one stretch of memory."""

    def __init__(self, layout: Layout, data: Bytes) -> None:
        self.layout = layout
        self._data = data
        self._start = data.ctypes.data
        self.nbytes = layout.nbytes

    def matrix(self, name: str) -> library.Linear:
        return _linear(self.layout.matrices[name], self._start)

    def floats(self, name: str) -> NDArray[np.float32]:
        """A copy of a vector, padded."""
        found = self.layout.vectors[name]
        return self._data[found.offset :][: 4 * found.length].view(np.float32).copy()

    def vector(self, name: str) -> int | None:
        """Where it starts, or None if the model has none of that name."""
        found = self.layout.vectors.get(name)
        return None if found is None else self._start + found.offset


def packed(
    checkpoint: Checkpoint,
    tensors: Mapping[str, StoredTensor],
    fingerprint: str,
    lib: ctypes.CDLL,
    four_bits: bool = False,
) -> PackedWeights:
    """From the file if there is one that fits, else made now. four_bits: see plan."""
    layout = plan(tensors, four_bits)
    path = home() / "packed" / f"{fingerprint[:32]}{'-4bit' * four_bits}.bin"
    head = _head(layout, fingerprint, {stored.file for stored in tensors.values()})
    data = _found(path, head, layout.nbytes)
    if data is None:
        data = _made(path, head, layout, checkpoint, tensors, lib)
    return PackedWeights(layout, data)


def _head(layout: Layout, fingerprint: str, sources: set[Path]) -> bytes:
    """Of one model in one version. A fingerprint covers parts of a file only: its size and age count too."""
    files = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sources)
    said = json.dumps([VERSION, fingerprint, files, layout.as_json()], sort_keys=True).encode()
    return MAGIC + hashlib.sha256(said).hexdigest().encode()


def _found(path: Path, head: bytes, nbytes: int) -> Bytes | None:
    """What the file holds, if it is the one that is wanted."""
    try:
        with path.open("rb") as file:
            if file.read(len(head)) != head or os.fstat(file.fileno()).st_size != _HEAD + nbytes:
                return None
            if (memory.available() or 0) > _SPARE_MEMORY * nbytes:
                return _in_huge_pages(file.fileno(), nbytes)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError:
        return None
    return np.frombuffer(mapped, np.uint8)[_HEAD:]


def _in_huge_pages(file: int, nbytes: int) -> Bytes:
    """Read in long streams, which cross fewer pages there than in a mapped file."""
    memory = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(memory, np.uint8)
    data = data[-data.ctypes.data % _HUGE :][:nbytes]
    step = max(_HUGE, nbytes // 64)

    def read_from(start: int) -> None:
        rest = data[start : start + step].data
        while rest:
            count = os.preadv(file, [rest], _HEAD + start)
            if not count:
                raise OSError("the file ended early")
            rest, start = rest[count:], start + count

    with ThreadPoolExecutor(hardware.cores()) as pool:
        list(pool.map(read_from, range(0, nbytes, step)))
    return data


def _made(
    path: Path,
    head: bytes,
    layout: Layout,
    checkpoint: Checkpoint,
    tensors: Mapping[str, StoredTensor],
    lib: ctypes.CDLL,
) -> Bytes:
    """In a new file that gets its name when it is whole, or in memory where there is no room for one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, mode=0o600) as fresh, fresh.open("r+b") as file:
            _reserve(file.fileno(), _HEAD + layout.nbytes)
            mapped = mmap.mmap(file.fileno(), 0)
            _fill(np.frombuffer(mapped, np.uint8)[_HEAD:], layout, checkpoint, tensors, lib)
            mapped[: len(head)] = head
            mapped.flush()
        found = _found(path, head, layout.nbytes)
        if found is not None:
            return found
    except OSError as error:
        log.warning("packed weights are not kept (%s): the next start will pack them again", error.strerror)
    data = np.empty(layout.nbytes + 4096, np.uint8)
    data = data[-data.ctypes.data % 4096 :][: layout.nbytes]
    _fill(data, layout, checkpoint, tensors, lib)
    return data


def _reserve(file: int, nbytes: int) -> None:
    """Now, since a full disk that is noticed while a mapping is written to kills the process."""
    os.ftruncate(file, nbytes)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, nbytes)


def _fill(
    data: Bytes,
    layout: Layout,
    checkpoint: Checkpoint,
    tensors: Mapping[str, StoredTensor],
    lib: ctypes.CDLL,
) -> None:
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for name, matrix in layout.matrices.items():
            _pack(name, matrix, data, checkpoint, tensors[name], lib, pool)
        for name, vector in layout.vectors.items():
            values = _vector(name, vector, checkpoint, tensors[name], pool)
            data[vector.offset :][: values.nbytes] = values.view(np.uint8)


def _pack(
    name: str,
    matrix: Matrix,
    data: Bytes,
    checkpoint: Checkpoint,
    stored: StoredTensor,
    lib: ctypes.CDLL,
    pool: ThreadPoolExecutor,
) -> None:
    raw = _raw_rows(stored, matrix.encoding, pool)
    order = np.full(matrix.outputs, -1, np.int32)
    order[: stored.shape[0]] = _row_order(name, checkpoint, stored.shape[0])
    linear = _linear(matrix, data.ctypes.data)
    encoding = list(library.ENCODINGS).index(matrix.encoding)
    groups = -(-stored.shape[1] // library.GROUP)

    def pack_from(tile: int) -> None:
        end = min(tile + _TILES, matrix.outputs // library.TILE)
        rows = ctypes.c_void_p(raw.ctypes.data), raw.strides[0], groups
        lib.paceline_pack(encoding, *rows, order.ctypes.data, ctypes.byref(linear), tile, end)

    for _ in pool.map(pack_from, range(0, matrix.outputs // library.TILE, _TILES)):
        pass


def _raw_rows(stored: StoredTensor, encoding: str, pool: ThreadPoolExecutor) -> NDArray[Any]:
    if encoding == stored.encoding and encoding not in FLOATS:
        return read_raw(stored).reshape(stored.shape[0], -1)
    dense = read_tensor(stored, torch.float32, pool).numpy()
    surplus = -stored.shape[1] % library.GROUP
    return np.ascontiguousarray(np.pad(dense, ((0, 0), (0, surplus))))


def _row_order(name: str, checkpoint: Checkpoint, rows: int) -> NDArray[np.int32]:
    part, shape = name.rpartition(".")[2], checkpoint.shape
    index = torch.arange(rows, dtype=torch.int32)
    if checkpoint.interleaved and part in ("q", "k", "q_bias", "k_bias"):
        index = half_rotation(index, shape.heads if part[0] == "q" else shape.kv_heads)
    return index.numpy()


def _vector(
    name: str, vector: Vector, checkpoint: Checkpoint, stored: StoredTensor, pool: ThreadPoolExecutor
) -> NDArray[np.float32]:
    values = np.zeros(vector.length, np.float32)
    dense = read_tensor(stored, torch.float32, pool).numpy() + np.float32(
        checkpoint.norm_shift if name.endswith("norm") else 0.0
    )
    values[: stored.elements] = dense[_row_order(name, checkpoint, stored.elements)]
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
