"""Tensor entries: where a tensor lies in a file, its bytes and its values, and the fingerprint of a model."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.errors import CorruptModel, ModelError
from paceline.target.weights.dequant import ENCODINGS, Bytes, Floats

CHUNK: Final = 1 << 18  # elements decoded at once: the scratch arrays stay near the caches
SAMPLE: Final = 1 << 16  # bytes hashed at each end of a tensor


@dataclass(frozen=True, slots=True)
class TensorEntry:
    file: Path
    name: str  # the file's own
    encoding: str
    shape: tuple[int, ...]  # outermost first
    offset: int  # bytes from the start of the file
    gathered: "Gathered | None" = None  # how its bytes are put together, where they do not lie in one piece

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        encoding = ENCODINGS[self.encoding]
        return self.elements // encoding.elements * encoding.nbytes

    @property
    def span(self) -> int:
        """Bytes of the file, from the offset on, in which it lies."""
        return self.nbytes if self.gathered is None else self.gathered.span

    def require_readable(self) -> None:
        if self.encoding not in ENCODINGS:
            raise ModelError(
                f"{self.file.name}: {self.name} is stored as {self.encoding}, which paceline cannot read; "
                f"use a file with {', '.join(ENCODINGS)} only"
            )
        block = ENCODINGS[self.encoding].elements
        if not self.shape or self.shape[-1] % block:
            raise CorruptModel(
                f"{self.file.name}: {self.name} has shape {list(self.shape)}, but rows of {self.encoding} "
                f"are multiples of {block}; pull it again"
            )


class Gathered(Protocol):
    @property
    def span(self) -> int: ...  # see TensorEntry.span
    def read(self, entry: TensorEntry) -> Bytes: ...  # all its bytes, in the entry's encoding


@dataclass(frozen=True, slots=True)
class Columns:
    """Some columns of a stored matrix [inputs, columns] of floats: each becomes a row."""

    inputs: int
    columns: int
    size: int  # bytes of a number
    taken: slice

    @property
    def span(self) -> int:
        return self.inputs * self.columns * self.size

    def read(self, entry: TensorEntry) -> Bytes:
        stored = _read_bytes(entry.file, entry.offset, self.span)
        stored = stored.reshape(self.inputs, self.columns, self.size)[:, self.taken]
        return np.ascontiguousarray(stored.swapaxes(0, 1)).reshape(-1)


@dataclass(frozen=True, slots=True)
class MxRows:
    """Some rows of a matrix in MXFP4 whose scales are a tensor of their own: as blocks of a GGUF file.

    A file's own byte has two neighbours, a block's byte i has numbers i and i + 16.
    """

    rows: int
    groups: int  # of 32 numbers in a row
    scales: TensorEntry  # [rows, groups] bytes
    taken: slice

    @property
    def span(self) -> int:
        return self.rows * self.groups * 16

    def read(self, entry: TensorEntry) -> Bytes:
        stored = _read_bytes(entry.file, entry.offset, self.span).reshape(self.rows, self.groups, 16)
        scales = _read_bytes(self.scales.file, self.scales.offset, self.rows * self.groups)
        pairs = stored[self.taken]
        codes = np.stack((pairs & 15, pairs >> 4), -1).reshape(*pairs.shape[:2], 32)
        halves = codes[..., :16] | codes[..., 16:] << 4
        first = scales.reshape(self.rows, self.groups, 1)[self.taken]
        return np.ascontiguousarray(np.concatenate((first, halves), -1)).reshape(-1)


@dataclass(frozen=True, slots=True)
class EncodedMatrix:
    """A matrix as a file holds it: rows [outputs, bytes of a row] of one encoding."""

    encoding: str
    rows: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        kind = ENCODINGS[self.encoding]
        return self.rows.shape[0], self.rows.shape[1] // kind.nbytes * kind.elements


def require_whole(file: Path, ends: Mapping[str, int]) -> None:
    """Checks that every tensor ends (in bytes from the start) inside the file."""
    size = file.stat().st_size
    outside = [name for name, end in ends.items() if end > size]
    if outside:
        raise CorruptModel(
            f"{file.name} is truncated: expected {max(ends.values())} bytes, found {size}, "
            f"so {outside[0]} is incomplete; pull it again"
        )


def read_tensor(entry: TensorEntry, dtype: torch.dtype, pool: Executor) -> Tensor:
    """Decodes chunk by chunk, so that little more than the result is ever in memory."""
    out = torch.empty(entry.elements, dtype=dtype)
    raw = None if entry.gathered is None else entry.gathered.read(entry)
    starts = range(0, entry.elements, CHUNK)
    for _ in pool.map(lambda start: _read_chunk(entry, raw, start, out[start : start + CHUNK]), starts):
        pass
    return out.view(entry.shape)


def read_raw(entry: TensorEntry) -> Bytes:
    """All its bytes, encoded."""
    if entry.gathered is not None:
        return entry.gathered.read(entry)
    return _read_bytes(entry.file, entry.offset, entry.nbytes)


def _read_chunk(entry: TensorEntry, raw: Bytes | None, start: int, out: Tensor) -> None:
    """raw: the entry's bytes, where they are in memory already."""
    encoding = ENCODINGS[entry.encoding]
    skipped, count = start // encoding.elements * encoding.nbytes, len(out) // encoding.elements
    size = count * encoding.nbytes
    if raw is None:
        blocks = _read_bytes(entry.file, entry.offset + skipped, size)
    else:
        blocks = raw[skipped : skipped + size]
    blocks = blocks.reshape(count, encoding.nbytes)
    if out.dtype == torch.float32:
        encoding.decode(blocks, out.numpy().reshape(count, encoding.elements))
        return
    dense: Floats = np.empty((count, encoding.elements), np.float32)
    encoding.decode(blocks, dense)
    out.copy_(torch.from_numpy(dense).view(-1))


def _read_bytes(file: Path, start: int, count: int) -> Bytes:
    # Read, not mapped: a file that shrinks meanwhile is an error, not a crash, and nothing stays open.
    raw = np.fromfile(file, np.uint8, count, offset=start)
    if len(raw) != count:
        raise CorruptModel(f"{file.name} ended while its weights were read; pull it again")
    return raw


def fingerprint(identity: bytes, tensors: Iterable[tuple[str, TensorEntry]]) -> str:
    """sha256 over the metadata and, for each tensor, its name, encoding, shape and both ends of its span.

    It tells models apart in a fraction of a second; it does not prove that a file is undamaged.
    """
    digest = sha256(identity)
    for name, entry in sorted(tensors, key=lambda item: item[0]):
        digest.update(f"\n{name} {entry.encoding} {entry.shape}\n".encode())
        sample = min(SAMPLE, entry.span)
        for start in (entry.offset, entry.offset + entry.span - sample):
            digest.update(_read_bytes(entry.file, start, sample).data)
    return digest.hexdigest()
