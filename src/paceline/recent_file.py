"""The values that a process used last, in a small file, for the processes after it.

    magic 24 | sha256 of the rest 32 | values, each with its length (u32) before it

It is written as a whole some time after a change, atomically and for its owner only. A file that is damaged,
cut or another user's holds nothing. Processes that share one keep one another's values until newer ones need
their room.
"""

import os
import stat
import struct
import threading
import weakref
from collections import OrderedDict
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Final

from paceline.atomic import write_bytes

MAGIC: Final = b"paceline recent values 1"
DELAY_S: Final = 30.0  # from a change until the file is written, unless the process ends before
_SIZE: Final = struct.Struct("<I")
_DIGEST: Final = 32
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class RecentFile:
    """Any thread may call it. A file that cannot be written costs the next start time, no more."""

    def __init__(self, path: Path, max_values: int, max_bytes: int) -> None:
        self._store = store = _Store(path, max_values, max_bytes)
        weakref.finalize(self, store.write)  # also when the process ends

    def read(self) -> list[bytes]:
        """What the file holds, the value used last first."""
        return self._store.read()

    def note(self, value: bytes) -> None:
        """A value is used now. One that another begins with is dropped: the longer one stands for both."""
        self._store.note(value)

    def flush(self) -> None:
        """Writes the file now, if there is anything new."""
        self._store.write()


class _Store:
    def __init__(self, path: Path, max_values: int, max_bytes: int) -> None:
        self._path, self._max_values, self._max_bytes = path, max_values, max_bytes
        self._own: OrderedDict[bytes, None] = OrderedDict()  # the one used last at the end
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._pending = False

    def note(self, value: bytes) -> None:
        with self._lock:
            longer = next((one for one in reversed(self._own) if one.startswith(value)), value)
            if longer is value:
                for begun in [one for one in self._own if value.startswith(one)]:
                    del self._own[begun]
            elif longer == next(reversed(self._own)):
                return
            self._own[longer] = None
            self._own.move_to_end(longer)
            while len(self._own) > self._max_values:
                self._own.popitem(last=False)
            pending, self._pending = self._pending, True
        if not pending:
            timer = threading.Timer(DELAY_S, self.write)
            timer.daemon = True
            with suppress(RuntimeError):  # no memory for a thread: written at the end
                timer.start()

    def write(self) -> None:
        with self._writing:
            with self._lock:
                if not self._pending:
                    return
                own, self._pending = list(reversed(self._own)), False
            with suppress(OSError):
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                content = _packed(self._fitting([*own, *self.read()]))
                write_bytes(self._path, content, mode=0o600)

    def _fitting(self, values: list[bytes]) -> list[bytes]:
        kept: list[bytes] = []
        room = self._max_bytes
        for value in values:
            size = _SIZE.size + len(value)
            if len(kept) < self._max_values and size <= room and not any(k.startswith(value) for k in kept):
                kept.append(value)
                room -= size
        return kept

    def read(self) -> list[bytes]:
        most = len(MAGIC) + _DIGEST + self._max_bytes
        try:
            file = os.open(self._path, _READ)
        except OSError:
            return []
        with open(file, "rb") as stream:
            state = os.fstat(file)
            if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or state.st_size > most:
                return []
            try:
                return _unpacked(stream.read(most))
            except OSError:
                return []


def _packed(values: list[bytes]) -> bytes:
    body = b"".join(_SIZE.pack(len(value)) + value for value in values)
    return MAGIC + sha256(body).digest() + body


def _unpacked(content: bytes) -> list[bytes]:
    """Empty unless it is what `_packed` made, whole and unchanged."""
    start = len(MAGIC) + _DIGEST
    body = content[start:]
    if content[:start] != MAGIC + sha256(body).digest():
        return []
    values, at = list[bytes](), 0
    while at < len(body):
        (size,) = _SIZE.unpack_from(body, at)
        at += _SIZE.size
        values.append(body[at : at + size])
        at += size
    return values
