"""The file of one page: the keys and values of one block, or of its first rows.

    magic 16 | format 32 | key 32 | rows u32 | bytes u64 | checksum u64 | zeros up to 128 | the rows

A reader builds the header that it expects and compares, so that a page that was cut, damaged, renamed, or
written for other weights or by another user is never used. Nothing is flushed to the disk: after a power cut
the checksum tells what is missing. Files are read, not mapped: one that shrinks while it is mapped ends the
process (SIGBUS), one that shrinks while it is read is short.
"""

import os
import stat
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

MAGIC: Final = b"paceline page 2\n"
_NUMBERS: Final = struct.Struct("<IQQ")  # rows, bytes, checksum
CHECKSUM: Final = len(MAGIC) + 32 + 32 + 12  # where it stands
HEADER: Final = 128  # bytes: rows begin with a cache line, as in memory, which the system copies faster
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def root_key(format: bytes, tenant: str) -> bytes:
    """The key before a sequence's first token."""
    return sha256(b"paceline prefix\n" + format + tenant.encode("utf-8", "surrogatepass")).digest()


def page_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """A chain of hashes: names format, tenant, the page's tokens and all tokens before them."""
    return sha256(parent + array("I", tokens).tobytes()).digest()


def prefix_keys(parent: bytes, tokens: Sequence[int]) -> list[bytes]:
    """`page_key` of the first token, of the first two, and so on."""
    digest, keys = sha256(parent), []
    for token in tokens:
        digest.update(array("I", (token,)))
        keys.append(digest.digest())
    return keys


class PageStatus(IntEnum):
    """How reading a page ended."""

    WHOLE = 0
    DAMAGED = 1  # it is not that page, whole and unchanged
    MISSING = 2
    FAILED = 3  # by the system


@dataclass(frozen=True, slots=True)
class PageFile:
    """A page to be read."""

    path: str
    header: bytes  # as it must be, with zeros for the checksum
    rows: int
    nbytes: int  # of its rows
    checksum: Callable[[Bytes], int]

    def read(self, page: Bytes) -> PageStatus:
        """Fills `page`, which is of no use unless the status is WHOLE."""
        try:
            file = os.open(self.path, _READ)
        except FileNotFoundError:
            return PageStatus.MISSING
        except OSError:
            return PageStatus.FAILED
        try:
            return self._read(file, page)
        except OSError:
            return PageStatus.FAILED
        finally:
            os.close(file)

    def _read(self, file: int, page: Bytes) -> PageStatus:
        state, size = os.fstat(file), HEADER + self.nbytes
        if not stat.S_ISREG(state.st_mode) or state.st_size != size or state.st_uid != os.geteuid():
            return PageStatus.DAMAGED
        header, done = bytearray(HEADER), 0
        views = [memoryview(header), page.data]
        while done < size:
            count = os.preadv(file, views, done)
            if not count:
                return PageStatus.DAMAGED
            done += count
            views = [memoryview(header)[min(done, HEADER) :], page.data[max(0, done - HEADER) :]]
        checksum = int.from_bytes(header[CHECKSUM : CHECKSUM + 8], "little")
        header[CHECKSUM : CHECKSUM + 8] = bytes(8)
        whole = header == self.header and checksum == self.checksum(page)
        return PageStatus.WHOLE if whole else PageStatus.DAMAGED


@dataclass(frozen=True, slots=True)
class PageFormat:
    """What a page must agree with."""

    fingerprint: bytes  # 32: of the weights, of all that decides a row's bits, and of the rows' layout
    checksum: Callable[[Bytes], int]  # 64 bits

    def header(self, key: bytes, rows: int, nbytes: int, checksum: int) -> bytes:
        numbers = _NUMBERS.pack(rows, nbytes, checksum)
        return (MAGIC + self.fingerprint + key + numbers).ljust(HEADER, b"\0")

    def file(self, path: str, key: bytes, rows: int, nbytes: int) -> PageFile:
        return PageFile(path, self.header(key, rows, nbytes, 0), rows, nbytes, self.checksum)

    def write(self, path: Path | str, key: bytes, rows: int, page: Bytes) -> None:
        """A new file, for its owner only. An OSError may leave a part of it."""
        file = os.open(path, _CREATE, 0o600)
        try:
            left = [memoryview(self.header(key, rows, len(page), self.checksum(page))), page.data]
            while left:
                count = os.writev(file, left)
                while left and count >= len(left[0]):
                    count -= len(left.pop(0))
                if left:
                    left[0] = left[0][count:]
        finally:
            os.close(file)
