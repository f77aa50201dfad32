"""Tensor entries: where a tensor lies in a file, its bytes and its values, and the fingerprint of a model."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Final

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

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        encoding = ENCODINGS[self.encoding]
        return self.elements // encoding.elements * encoding.nbytes

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
    starts = range(0, entry.elements, CHUNK)
    for _ in pool.map(lambda start: _read_chunk(entry, start, out[start : start + CHUNK]), starts):
        pass
    return out.view(entry.shape)


def read_raw(entry: TensorEntry) -> Bytes:
    """All its bytes, encoded."""
    return _read_bytes(entry, 0, entry.nbytes)


def _read_chunk(entry: TensorEntry, start: int, out: Tensor) -> None:
    encoding = ENCODINGS[entry.encoding]
    skipped, count = start // encoding.elements, len(out) // encoding.elements
    blocks = _read_bytes(entry, skipped * encoding.nbytes, count * encoding.nbytes)
    blocks = blocks.reshape(count, encoding.nbytes)
    if out.dtype == torch.float32:
        encoding.decode(blocks, out.numpy().reshape(count, encoding.elements))
        return
    dense: Floats = np.empty((count, encoding.elements), np.float32)
    encoding.decode(blocks, dense)
    out.copy_(torch.from_numpy(dense).view(-1))


def _read_bytes(entry: TensorEntry, start: int, count: int) -> Bytes:
    # Read, not mapped: a file that shrinks meanwhile is an error, not a crash, and nothing stays open.
    raw = np.fromfile(entry.file, np.uint8, count, offset=entry.offset + start)
    if len(raw) != count:
        raise CorruptModel(f"{entry.file.name} ended while {entry.name} was read; pull it again")
    return raw


def fingerprint(identity: bytes, tensors: Iterable[tuple[str, TensorEntry]]) -> str:
    """sha256 over the metadata and, for each tensor, its name, encoding, shape and both ends of its bytes.

    It tells models apart in a fraction of a second; it does not prove that a file is undamaged.
    """
    digest = sha256(identity)
    for name, entry in sorted(tensors, key=lambda item: item[0]):
        digest.update(f"\n{name} {entry.encoding} {entry.shape}\n".encode())
        sample = min(SAMPLE, entry.nbytes)
        digest.update(_read_bytes(entry, 0, sample).data)
        digest.update(_read_bytes(entry, entry.nbytes - sample, sample).data)
    return digest.hexdigest()
