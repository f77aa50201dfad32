"""The disk tier of the KV cache: pages found by content, in a folder that several processes may share.

    folder/FORMAT/KEY.page     FORMAT and KEY in hex; see page_file.py
    folder/FORMAT/about.json   the model's name, for people, and the fingerprint of its weights
    folder/FORMAT/recent       the prefixes used last, for the next start; see preload.py
    folder/.lock               held by the one process that writes or removes pages; names the last one

A page is known by the hash of everything that it follows from, so there is no index to go wrong: a process
that is killed leaves whole pages, and at most one unfinished file, which the next writer removes. A page's
modification time is its last use; those used longest ago go first.
"""

import errno
import logging
import os
import secrets
import stat
import struct
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from paceline.atomic import locked, read_json, write_json
from paceline.paths import home
from paceline.recent_file import RecentFile
from paceline.target.kv.page_file import (
    HEADER,
    Bytes,
    PageFile,
    PageFormat,
    PageStatus,
    page_key,
    prefix_keys,
    root_key,
)
from paceline.types import DiskCacheStats

QUEUE_BYTES: Final = 128 * 2**20  # pages that wait to be written
PAUSE_S: Final = 0.5  # without a new page, until those that wait are written
BEGIN_SHARE: Final = 0.75  # of the queue: they are written at once
MIN_ROWS: Final = 8  # of a page that is not a whole block: fewer are computed as fast
RETRY_S: Final = 60.0  # without writing, after the disk was full or failed
REFRESH_S: Final = 1.0  # between two looks at what other processes have written
EXIT_S: Final = 5.0  # for pages in the queue when the process ends
MAX_USED: Final = 256  # prefixes whose use is not yet noted
MAX_RECENT: Final = 64  # prefixes that the next start is told of
MAX_RECENT_BYTES: Final = 2**21  # that these take
PAGE: Final = ".page"
_NEW: Final = ".new"
_LOCK: Final = ".lock"
_ABOUT: Final = "about.json"
_RECENT: Final = "recent"
_PREFIX: Final = struct.Struct("<I")  # bytes of the tenant's name, which follows, then the tokens
_SECTOR: Final = 4096  # bytes: a file takes whole ones

log = logging.getLogger("paceline")


def cache_folder(setting: str | None = None) -> Path:
    """setting: `cache_dir`."""
    return Path(setting).expanduser() if setting else home() / "kv"


class StoredPage(NamedTuple):
    key: bytes
    tokens: tuple[int, ...]


class Prefix(NamedTuple):
    """The rows of a sequence that has ended."""

    tenant: str
    tokens: Sequence[int]

    def packed(self) -> bytes:
        """One that continues another begins with its bytes."""
        tenant = self.tenant.encode("utf-8", "surrogatepass")
        return _PREFIX.pack(len(tenant)) + tenant + array("I", self.tokens).tobytes()

    @classmethod
    def unpacked(cls, value: bytes) -> "Prefix":
        (size,) = _PREFIX.unpack_from(value)
        tenant, tokens = value[_PREFIX.size :][:size], value[_PREFIX.size + size :]
        return cls(tenant.decode("utf-8", "surrogatepass"), array("I", tokens))


class _Write(NamedTuple):
    key: bytes
    rows: int
    buffer: Bytes  # for a whole page
    nbytes: int  # of this one

    @property
    def page(self) -> Bytes:
        return self.buffer[: self.nbytes]


class DiskCache:
    """Has pages read when it is called, and writes them some time later, in a thread of its own.

    One thread calls `find`, `load`, `offer` and `used`, which never raise: a page that cannot be read is a
    miss, one that cannot be written is dropped.
    """

    def __init__(
        self,
        folder: Path,
        format: PageFormat,
        limit: int,
        page_bytes: Callable[[int], int],
        block: int,
        name: str = "",
        weights: str = "",
    ) -> None:
        """limit: bytes, of all models together. page_bytes: of so many rows. name: of the model, for people.
        weights: their fingerprint.

        An OSError where the folder cannot be used.
        """
        self.block = block
        self._format = format
        self._page_bytes = page_bytes
        self._folder = folder / format.fingerprint.hex()[:32]
        self._files = _Files(folder, limit)
        _make_private(self._folder)
        about = {"model": name, "weights": weights}
        if read_json(self._folder / _ABOUT) != about:
            write_json(self._folder / _ABOUT, about)
        self._writer = _Writer(self._files, self._folder, format, page_bytes(block))
        self._recent = RecentFile(self._folder / _RECENT, MAX_RECENT, MAX_RECENT_BYTES)
        self._version = b""  # of the folder, when it was listed
        self._looked_at = -REFRESH_S
        self._hit_tokens = self._damaged = 0
        self.close = weakref.finalize(self, self._writer.stop, EXIT_S)  # also when the process ends
        self._writer.known = set(_keys(self._folder))

    @property
    def stats(self) -> DiskCacheStats:
        files, writer = self._files, self._writer
        return DiskCacheStats(
            limit_bytes=files.limit,
            bytes=files.total,
            pages=len(files.records),
            hit_tokens=self._hit_tokens,
            written=writer.written,
            dropped=writer.dropped,
            evicted=files.evicted,
            damaged=self._damaged,
        )

    @property
    def own_pages(self) -> int:
        """Pages of this model."""
        return len(self._writer.known)

    def __contains__(self, key: bytes) -> bool:
        return key in self._writer.known

    def keys(self, tenant: str, tokens: Sequence[int]) -> list[bytes]:
        """The key before the first of these blocks, then one after each."""
        keys = [root_key(self._format.fingerprint, tenant)]
        for start in range(0, len(tokens), self.block):
            keys.append(page_key(keys[-1], tokens[start : start + self.block]))
        return keys

    def find(self, key: bytes, tokens: Sequence[int]) -> list[StoredPage]:
        """The pages of `tokens`, from the first one on; what is before them has this key.

        The last page may be a part of a block, but as a whole it must agree with `tokens`.
        """
        self._refresh()
        known, pages, start = self._writer.known, list[StoredPage](), 0
        while start + self.block <= len(tokens):
            content = tuple(tokens[start : start + self.block])
            following = page_key(key, content)
            if following not in known:
                break
            pages.append(StoredPage(following, content))
            key, start = following, start + self.block
        rest = tuple(tokens[start : start + self.block - 1])
        parts = prefix_keys(key, rest)
        for rows in range(len(rest), MIN_ROWS - 1, -1):
            if parts[rows - 1] in known:
                return [*pages, StoredPage(parts[rows - 1], rest[:rows])]
        return pages

    def load(
        self,
        pages: Sequence[StoredPage],
        read: Callable[[Sequence[PageFile]], Sequence[PageStatus]],
        counts: bool = True,
    ) -> int:
        """Has pages of one prefix read; gives how many are whole, from the first one on.

        counts: as hits.
        """
        files = [
            self._format.file(_path(self._folder, key), key, len(tokens), self._page_bytes(len(tokens)))
            for key, tokens in pages
        ]
        whole = [self._usable(page, status) for page, status in zip(pages, read(files), strict=True)]
        count = whole.index(False) if False in whole else len(whole)
        self._hit_tokens += counts * sum(len(page.tokens) for page in pages[:count])
        return count

    def _usable(self, page: StoredPage, status: PageStatus) -> bool:
        if status == PageStatus.WHOLE:
            return True
        if status == PageStatus.DAMAGED:
            self._damaged += 1
            log.warning("a page of the KV cache on the disk is damaged: its tokens are computed again")
        elif status == PageStatus.MISSING:  # somebody has removed it, and perhaps others
            self._writer.known = set(_keys(self._folder))
        self._writer.remove(page.key)
        return False

    def read_ahead(self, pages: Sequence[StoredPage]) -> None:
        """Has the system fetch what is not in its memory, while earlier pages are copied."""
        for page in pages:
            with suppress(OSError, AttributeError):  # not every system can
                file = os.open(_path(self._folder, page.key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(file)

    def offer(self, key: bytes, rows: int, fill: Callable[[Bytes], None]) -> None:
        """A page to be written some time later. fill: copies it now, if it is not on the disk."""
        self._writer.offer(key, rows, self._page_bytes(rows), fill)

    def used(self, keys: Sequence[bytes]) -> None:
        """Pages of one prefix, in its order: each is kept at least as long as those after it."""
        self._writer.used(keys[::-1])

    def ended(self, prefix: Prefix) -> None:
        """A sequence whose rows may be written has ended: the next start is told of it."""
        if len(prefix.tokens) >= MIN_ROWS:
            self._recent.note(prefix.packed())

    def recent(self) -> list[Prefix]:
        """The prefixes that ended last, in this process or earlier ones, the last one first."""
        self._recent.flush()
        with suppress(struct.error, ValueError):  # of another layout
            return [Prefix.unpacked(value) for value in self._recent.read()]
        return []

    def flush(self, timeout: float = EXIT_S) -> bool:
        """Waits until everything offered so far is written or dropped. False: not in time."""
        return self._writer.flush(timeout)

    def _refresh(self) -> None:
        """Learns of pages that other processes have written or removed."""
        now = time.monotonic()
        if now - self._looked_at < REFRESH_S:
            return
        self._looked_at, version = now, self._files.version()
        if version not in (self._version, self._files.own_version):
            self._writer.known = set(_keys(self._folder))
        self._version = version


class _Writer:
    """A thread that writes, removes and marks as used what it is given, in order. Full: it drops pages.

    Writing takes a core from the passes that read a prompt. So it begins when pages have ceased to come, or
    when the queue is nearly full.
    """

    def __init__(self, files: "_Files", folder: Path, format: PageFormat, page_bytes: int) -> None:
        self.known: set[bytes] = set()  # pages on the disk, as far as this process knows
        self.written = self.dropped = 0
        self._files, self._folder, self._format = files, folder, format
        self._change = threading.Condition()
        self._writes: deque[_Write] = deque()
        self._used: deque[Sequence[bytes]] = deque(maxlen=MAX_USED)
        self._removed: deque[bytes] = deque()
        self._queued: set[bytes] = set()
        self._buffers: list[Bytes] = []  # free
        self._more_buffers = max(2, QUEUE_BYTES // page_bytes)
        self._many = int(BEGIN_SHARE * self._more_buffers)  # pages
        self._page_bytes = page_bytes
        self._retry_at = 0.0
        self._busy = True
        self._flushing = 0  # callers who wait
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="paceline-disk-cache", daemon=True)
        self._thread.start()

    def offer(self, key: bytes, rows: int, nbytes: int, fill: Callable[[Bytes], None]) -> None:
        if key in self.known or key in self._queued:
            return
        with self._change:
            buffer = None if time.monotonic() < self._retry_at or self._stopping else self._buffer()
            if buffer is None:
                self.dropped += 1
                return
        fill(buffer[:nbytes])
        with self._change:
            self._queued.add(key)
            self._writes.append(_Write(key, rows, buffer, nbytes))
            self._change.notify_all()

    def _buffer(self) -> Bytes | None:
        if self._buffers:
            return self._buffers.pop()
        if not self._more_buffers:
            return None
        self._more_buffers -= 1
        return np.empty(self._page_bytes, np.uint8)

    def used(self, keys: Sequence[bytes]) -> None:
        with self._change:
            self._used.append(keys)
            self._change.notify_all()

    def remove(self, key: bytes) -> None:
        self.known.discard(key)
        with self._change:
            self._removed.append(key)
            self._change.notify_all()

    def flush(self, timeout: float) -> bool:
        with self._change:
            self._flushing += 1
            self._change.notify_all()
            try:
                return self._change.wait_for(lambda: not self._busy and not self._waiting(), timeout)
            finally:
                self._flushing -= 1

    def stop(self, timeout: float) -> None:
        """Writes what is in the queue, for so many seconds at most."""
        with self._change:
            self._stopping = True
            self._change.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _waiting(self) -> bool:
        return bool(self._writes or self._used or self._removed)

    def _run(self) -> None:
        self._guarded(self._files.trim)
        while True:
            with self._change:
                self._busy = False
                self._change.notify_all()
                self._change.wait_for(lambda: self._stopping or self._waiting())
                if not self._waiting():
                    return
                self._busy = True
                self._await_pause()
                writes, used, removed = list(self._writes), list(self._used), list(self._removed)
                for queue in (self._writes, self._used, self._removed):
                    queue.clear()
            if writes or removed:
                self._guarded(lambda: self._change_files(writes, removed))  # noqa: B023  # called at once
            for keys in used:
                self._touch(keys)
            with self._change:
                self._buffers += [write.buffer for write in writes]
                self._queued.difference_update(write.key for write in writes)

    def _await_pause(self) -> None:
        def urgent() -> bool:
            return bool(self._stopping or self._flushing or self._removed or len(self._writes) >= self._many)

        count = -1
        while self._writes and count != len(self._writes):
            count = len(self._writes)
            if self._change.wait_for(urgent, PAUSE_S):
                return

    def _guarded(self, change: Callable[[], None]) -> None:
        """A disk that is full or fails costs time at the next start, and nothing now."""
        try:
            change()
        except Exception as problem:
            self._retry_at = time.monotonic() + RETRY_S
            reason = problem.strerror if isinstance(problem, OSError) else repr(problem)
            log.warning("the KV cache is not written to the disk for %.0f s: %s", RETRY_S, reason)

    def _change_files(self, writes: Sequence[_Write], removed: Sequence[bytes]) -> None:
        missing = len(writes)
        try:
            _make_private(self._folder)
            with self._files.changing():
                for key in removed:
                    self._files.remove(_path(self._folder, key))
                for write in writes:
                    page = partial(self._format.write, key=write.key, rows=write.rows, page=write.page)
                    if self._files.add(_path(self._folder, write.key), write.nbytes, page):
                        self.known.add(write.key)
                        self.written += 1
                        missing -= 1
        finally:
            self.dropped += missing
            self.known.difference_update(self._files.removed_keys(self._folder))

    def _touch(self, keys: Sequence[bytes]) -> None:
        """keys: deepest first."""
        now = time.time_ns()
        for i, key in enumerate(keys):
            try:
                self._files.touch(_path(self._folder, key), now + 1000 * i)
            except OSError:
                self.known.discard(key)


@dataclass(slots=True)
class _Record:
    size: int  # on the disk, in bytes
    used_ns: int


class _Files:
    """The pages in a folder, of all models, within a bound. One process at a time changes them."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.records: dict[str, _Record] = {}
        self.total = self.evicted = 0
        self.own_version = b"none"  # of the folder, if nobody else has changed it since
        self._removed: list[str] = []

    def version(self) -> bytes:
        """Another one after each change."""
        try:
            return (self.folder / _LOCK).read_bytes()
        except OSError:
            return b""

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Holds the folder's lock. Lists the folder first, if another process has changed it."""
        with locked(self.folder / _LOCK):
            if self.version() != self.own_version:
                self._list()
            self.own_version = secrets.token_bytes(16)
            (self.folder / _LOCK).write_bytes(self.own_version)
            yield

    def trim(self) -> None:
        """Removes what exceeds the bound, and what killed processes left."""
        with self.changing():
            self._make_room(0)

    def add(self, path: str, nbytes: int, write: Callable[[str], None]) -> bool:
        """Inside `changing`: makes room, writes a page under another name and renames it.

        False: it can never fit.
        """
        size = _on_disk(nbytes + HEADER)
        if path in self.records:
            return True
        if size > self.limit:
            return False
        self._make_room(size)
        fresh = path + _NEW
        try:
            write(fresh)
            os.rename(fresh, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(fresh)
            raise
        self._record(path, os.stat(path))
        return True

    def remove(self, path: str) -> None:
        with suppress(OSError):
            os.unlink(path)
        record = self.records.pop(path, None)
        self._removed.append(path)
        if record is not None:
            self.total -= record.size

    def touch(self, path: str, used_ns: int) -> None:
        os.utime(path, ns=(used_ns, used_ns))
        if path in self.records:
            self.records[path].used_ns = used_ns

    def removed_keys(self, folder: Path) -> list[bytes]:
        """Pages of one model that were removed since the last call."""
        removed = [path for path in self._removed if path not in self.records]  # else written again
        self._removed = []
        return [_key(os.path.basename(path)) for path in removed if os.path.dirname(path) == str(folder)]

    def _make_room(self, size: int) -> None:
        """The least recently used pages go, as the files say: another process may have used some."""
        while self.total + size > self.limit and self.records:
            for path in sorted(self.records, key=lambda path: self.records[path].used_ns):
                if self.total + size <= self.limit:
                    return
                record = self.records[path]
                with suppress(OSError):
                    used_ns = os.stat(path).st_mtime_ns
                    if used_ns > record.used_ns:
                        record.used_ns = used_ns
                        continue
                self.remove(path)
                self.evicted += 1

    def _record(self, path: str, state: os.stat_result) -> None:
        self.records[path] = record = _Record(_on_disk(state.st_size), state.st_mtime_ns)
        self.total += record.size

    def _list(self) -> None:
        """Also removes unfinished files: their writers would hold the lock."""
        self.records.clear()
        self.total = 0
        for folder in _model_folders(self.folder):
            with os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(OSError):
                        if entry.name.endswith(PAGE + _NEW):
                            os.unlink(entry.path)
                        elif entry.name.endswith(PAGE):
                            self._record(entry.path, entry.stat(follow_symlinks=False))


def _on_disk(nbytes: int) -> int:
    return -(-nbytes // _SECTOR) * _SECTOR


def _make_private(folder: Path) -> None:
    """A folder that only its owner can use; an OSError where that cannot be."""
    for path in (folder.parent, folder):  # what else is missing above gets the usual mode
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = os.stat(folder, follow_symlinks=False)
    if state.st_uid != os.geteuid() or not stat.S_ISDIR(state.st_mode):
        raise PermissionError(errno.EPERM, "it belongs to another user", str(folder))
    if state.st_mode & 0o077:
        os.chmod(folder, 0o700)


def _path(folder: Path, key: bytes) -> str:
    return f"{folder}/{key.hex()}{PAGE}"


def _key(name: str) -> bytes:
    return bytes.fromhex(name.removesuffix(PAGE))


def _model_folders(folder: Path) -> Iterator[Path]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        if len(name) == 32 and set(name) <= set("0123456789abcdef") and (folder / name).is_dir():
            yield folder / name


def _keys(folder: Path) -> Iterator[bytes]:
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        if name.endswith(PAGE):
            with suppress(ValueError):
                yield _key(name)


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The pages of one model and format in a folder."""

    model: str
    weights: str  # their fingerprint
    format: str
    pages: int
    bytes: int
    used: float  # unix seconds


def stored_models(folder: Path) -> list[StoredModel]:
    """The most recently used first."""
    models = []
    for path in _model_folders(folder):
        states = []
        for page in path.glob(f"*{PAGE}"):
            with suppress(OSError):
                states.append(page.stat())
        if not states:
            continue
        about = read_json(path / _ABOUT)
        name, weights = (str(about.get(key, "")) for key in ("model", "weights"))
        size = sum(_on_disk(state.st_size) for state in states)
        used = max(state.st_mtime for state in states)
        models.append(StoredModel(name, weights, path.name, len(states), size, used))
    return sorted(models, key=lambda model: -model.used)


def clear(folder: Path, model: str | None = None, weights: str | None = None) -> int:
    """Removes the pages of all models, of those of a name or with these weights; gives their number.

    Servers that run go on. What the next start is told of goes with them.
    """
    files, removed = _Files(folder, 0), 0
    if not folder.is_dir():
        return 0
    with files.changing():
        for chosen in _model_folders(folder):
            about = read_json(chosen / _ABOUT)
            if model not in (None, about.get("model")) or weights not in (None, about.get("weights")):
                continue
            for recent in chosen.glob(f"{_RECENT}*"):  # unfinished ones, too
                with suppress(OSError):
                    recent.unlink()
            for path in [path for path in files.records if Path(path).parent == chosen]:
                files.remove(path)
                removed += 1
    return removed
