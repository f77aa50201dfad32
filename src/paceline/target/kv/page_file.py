"""The file of one page: the keys and values of one block, or of its first rows.

    magic 16 | format 32 | key 32 | rows u32 | bytes u64 | checksum u64 | the rows

A reader builds the header that it expects and compares, so that a page that was cut, damaged, renamed, or
written for other weights or by another user is never used. Nothing is flushed to the disk: after a power cut
the checksum tells what is missing. Files are read, not mapped: one that shrinks while it is mapped ends the
process (SIGBUS), one that shrinks while it is read is short.
"""

import os
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

MAGIC: Final = b"paceline page 1\n"
_NUMBERS: Final = struct.Struct("<IQQ")  # rows, bytes, checksum
HEADER: Final = len(MAGIC) + 32 + 32 + _NUMBERS.size
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
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


@dataclass(frozen=True, slots=True)
class PageFormat:
    """What a page must agree with."""

    fingerprint: bytes  # 32: of the weights, of all that decides a row's bits, and of the rows' layout
    checksum: Callable[[Bytes], int]  # 64 bits

    def header(self, key: bytes, rows: int, page: Bytes) -> bytes:
        numbers = _NUMBERS.pack(rows, len(page), self.checksum(page))
        return MAGIC + self.fingerprint + key + numbers

    def write(self, path: Path | str, key: bytes, rows: int, page: Bytes) -> None:
        """A new file, for its owner only. An OSError may leave a part of it."""
        file = os.open(path, _CREATE, 0o600)
        try:
            left = [memoryview(self.header(key, rows, page)), page.data]
            while left:
                count = os.writev(file, left)
                while left and count >= len(left[0]):
                    count -= len(left.pop(0))
                if left:
                    left[0] = left[0][count:]
        finally:
            os.close(file)

    def read(self, path: Path | str, key: bytes, rows: int, page: Bytes) -> bool:
        """Fills `page`; False if the file is not that page, whole and unchanged. FileNotFoundError: none."""
        file = os.open(path, _READ)
        try:
            state = os.fstat(file)
            if state.st_size != HEADER + len(page) or state.st_uid != os.geteuid():
                return False
            header, done = bytearray(HEADER), 0
            views = [memoryview(header), page.data]
            while done < state.st_size:
                count = os.preadv(file, views, done)
                if not count:
                    return False
                done += count
                views = [
                    memoryview(header)[min(done, HEADER) :],
                    page.data[max(0, done - HEADER) :],
                ]
        finally:
            os.close(file)
        return bytes(header) == self.header(key, rows, page)
