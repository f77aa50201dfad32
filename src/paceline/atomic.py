"""Atomic file replacement, file locks, and small JSON files. (Compiled libraries: native_build.)

A file is written beside its place under another name, flushed to the disk and renamed. Rename is atomic
(POSIX), so a reader sees the old file or the new one, and a crash at any moment leaves one of them whole.
"""

import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

_NEW: Final = ".new"  # suffix of a file that has not been renamed yet


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """An empty file to write to, renamed to `path` when the body ends and removed when it raises.

    mode: permissions of the new file, less the umask. Concurrent writers do not disturb one another: each has
    a file of its own, and the last rename wins.
    """
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}{_NEW}")
    os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        yield fresh
        with fresh.open("rb") as stream:
            os.fsync(stream.fileno())
        rename(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def remove_unfinished(path: Path) -> None:
    """Deletes what killed writers of `path` left behind. No other writer may be at work."""
    for left in path.parent.glob(f"{path.name}.*{_NEW}"):
        left.unlink(missing_ok=True)


def rename(source: Path, path: Path) -> None:
    """Returns once the new name is on the disk."""
    os.replace(source, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def sync(stream: IO[Any]) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def write_bytes(path: Path, content: bytes, mode: int = 0o666) -> None:
    with replacing(path, mode) as fresh:
        fresh.write_bytes(content)


def write_json(path: Path, table: Mapping[str, Any], indent: int | None = None, ascii: bool = True) -> None:
    """ascii: other characters are escaped."""
    write_bytes(path, (json.dumps(table, indent=indent, ensure_ascii=ascii) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """An empty table where the file is missing, damaged or no table: for notes that can be made again."""
    try:
        table = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds an exclusive lock (flock) on a file, which is made if need be, or on a folder.

    The lock of a process that dies is free at once. on_wait: called once if the lock is not free.
    """
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """True where a living process holds the lock, or where that cannot be found out."""
    try:
        with path.open("r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
