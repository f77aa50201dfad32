"""The file of packed weights: written once for a model, then read at every start and checked as it is read.

home/packed/FINGERPRINT.bin    4096 bytes: magic, a hash of what was packed and how, a hash of the data, zeros
                               then the data, as packing.plan lays it out
home/packed/FINGERPRINT.boot   the boot and the state of the file in which a mapped one was checked last
"""

import ctypes
import hashlib
import json
import logging
import mmap
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import numpy as np

from paceline import limits
from paceline.atomic import locked, remove_unfinished, replacing
from paceline.paths import home
from paceline.target.native.packing import Bytes, Layout, PackedWeights, pack_into, plan
from paceline.target.weights.checkpoint import Checkpoint
from paceline.target.weights.tensors import TensorEntry

VERSION: Final = 2  # raise it whenever formats.h or the layout change
MAGIC: Final = b"paceline packed weights\n"
_HEADER: Final = 4096  # bytes before the data
_CHUNK: Final = 4 << 20  # bytes read and hashed at once by one thread
_HUGE: Final = 2 << 20
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")  # of Linux
_TICK_NS: Final = 2 * 10**9  # longer than any file system's
_SPARE_MEMORY: Final = 2.0  # times the weights: free memory that a copy in huge pages needs

log = logging.getLogger("paceline")


def load_packed(
    checkpoint: Checkpoint,
    tensors: Mapping[str, TensorEntry],
    fingerprint: str,
    lib: ctypes.CDLL,
    four_bits: bool = False,
) -> PackedWeights:
    """From a file that fits and is whole, else packed now. four_bits: see `plan`."""
    layout = plan(tensors, four_bits)
    path = _folder() / f"{fingerprint[:32]}{'-4bit' * four_bits}.bin"
    key = _key(layout, fingerprint, {entry.file for entry in tensors.values()})
    packed = _read(path, key, layout.nbytes, lib)
    if packed is None:
        with ExitStack() as lock:
            with suppress(OSError):  # without a lock where the folder cannot be written to
                lock.enter_context(locked(path.with_suffix(".lock"), on_wait=_log_wait))
                remove_unfinished(path)
                packed = _read(path, key, layout.nbytes, lib)  # another process may have packed it
            if packed is None:
                packed = _pack(path, key, layout, checkpoint, tensors, lib)
    return PackedWeights(layout, *packed)


def packed_files(fingerprint: str) -> list[Path]:
    """All that was stored for a model, notes and locks included."""
    return sorted(_folder().glob(f"{fingerprint[:32]}*"))


def _folder() -> Path:
    return home() / "packed"


def _log_wait() -> None:
    log.info("another process packs these weights: waiting for it")


def _key(layout: Layout, fingerprint: str, sources: set[Path]) -> bytes:
    """Identifies model and version. A fingerprint covers samples of the files, so size and age count too."""
    files = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sources)
    packed = json.dumps([VERSION, fingerprint, files, layout.as_json()], sort_keys=True).encode()
    return MAGIC + hashlib.sha256(packed).hexdigest().encode() + b"\n"


def _header(key: bytes, digest: str) -> bytes:
    return (key + digest.encode()).ljust(_HEADER, b"\0")


def content_digest(data: Bytes, lib: ctypes.CDLL, file: int | None = None) -> str:
    """sha256 over the XXH64 of each chunk, which changes with every bit. file: read the data first."""

    def hash_chunk(start: int) -> bytes:
        chunk = data[start : start + _CHUNK]
        if file is not None:
            _read_into(chunk, file, _HEADER + start)
        xxh64: int = lib.paceline_xxh64(chunk.ctypes.data, len(chunk), 0)
        return xxh64.to_bytes(8, "little")

    with ThreadPoolExecutor(limits.cores()) as pool:
        return hashlib.sha256(b"".join(pool.map(hash_chunk, range(0, len(data), _CHUNK)))).hexdigest()


def _read_into(chunk: Bytes, file: int, offset: int) -> None:
    rest = chunk.data
    while rest:
        count = os.preadv(file, [rest], offset)
        if not count:
            raise OSError("the file ended early")
        rest, offset = rest[count:], offset + count


def _read(path: Path, key: bytes, nbytes: int, lib: ctypes.CDLL) -> tuple[Bytes, str] | None:
    """The data of the file and its digest if it has this key and its content is unchanged, else None.

    Weights are read in long streams, which cross fewer pages in a copy in huge pages than in a mapped file.
    """
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER)
            if not header.startswith(key) or os.fstat(file.fileno()).st_size != _HEADER + nbytes:
                return None
            if (limits.available_memory() or 0) > _SPARE_MEMORY * nbytes:
                data = _huge_pages(nbytes)
                digest = content_digest(data, lib, file.fileno())
            else:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                data = np.frombuffer(mapped, np.uint8)[_HEADER:]
                if _checked_this_boot(path, file.fileno()):
                    return data, header[len(key) :].rstrip(b"\0").decode()
                digest = content_digest(data, lib)
                _unmap_pages(mapped)  # memory is short
                if header == _header(key, digest):
                    _note_check(path, file.fileno())
    except OSError:
        return None
    if header != _header(key, digest):
        log.warning("%s is damaged: the weights are packed again", path.name)
        return None
    return data, digest


def _checked_this_boot(path: Path, file: int) -> bool:
    """True if the file was whole after this boot and has not been written since.

    A copy is checked as it is made; a mapping would have to be read for it, where memory is short.
    """
    try:
        return path.with_suffix(".boot").read_text() == _boot_and_state(file)
    except OSError:  # never checked, or a system without boot ids
        return False


def _note_check(path: Path, file: int) -> None:
    """Unless it was just written: another write within one tick of the clock would look the same."""
    if time.time_ns() - os.fstat(file).st_ctime_ns < _TICK_NS:
        return
    with suppress(OSError):  # else it is checked again next time
        state = _boot_and_state(file)
        with replacing(path.with_suffix(".boot"), mode=0o600) as fresh:
            fresh.write_text(state)


def _boot_and_state(file: int) -> str:
    stat = os.fstat(file)
    state = stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
    return f"{_BOOT_ID.read_text().strip()} {state}"


def _huge_pages(nbytes: int) -> Bytes:
    memory = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(memory, np.uint8)
    return data[-data.ctypes.data % _HUGE :][:nbytes]


def _pack(
    path: Path,
    key: bytes,
    layout: Layout,
    checkpoint: Checkpoint,
    tensors: Mapping[str, TensorEntry],
    lib: ctypes.CDLL,
) -> tuple[Bytes, str]:
    """Into a new file that gets its name when it is whole, or into memory where no file can be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, mode=0o600) as fresh, fresh.open("r+b") as file:
            _reserve(file.fileno(), _HEADER + layout.nbytes)
            mapped = mmap.mmap(file.fileno(), 0)
            data = np.frombuffer(mapped, np.uint8)[_HEADER:]
            pack_into(data, layout, checkpoint, tensors, lib, packed=lambda: _unmap_pages(mapped))
            mapped[:_HEADER] = _header(key, content_digest(data, lib))
            mapped.flush()
            _unmap_pages(mapped)  # before `_read` makes a copy
        written = _read(path, key, layout.nbytes, lib)
        if written is not None:
            return written
    except OSError as error:
        log.warning("packed weights are not stored (%s): the next start will pack them again", error.strerror)
    data = np.empty(layout.nbytes + 4096, np.uint8)
    data = data[-data.ctypes.data % 4096 :][: layout.nbytes]
    pack_into(data, layout, checkpoint, tensors, lib)
    return data, content_digest(data, lib)


def _unmap_pages(mapped: mmap.mmap) -> None:
    """Takes the pages of a shared mapping out of the process; what was written stays in the page cache."""
    if hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def _reserve(file: int, nbytes: int) -> None:
    """Now, since a full disk that is noticed while a mapping is written to kills the process."""
    os.ftruncate(file, nbytes)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, nbytes)
