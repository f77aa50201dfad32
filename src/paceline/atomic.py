"""Writing that is either done or not done, whenever the power fails."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from paceline.errors import PullError

BLOCK_BYTES: Final = 1 << 20


def read_json(path: Path) -> dict[str, Any]:
    """Empty when the file is missing or damaged: then it never said anything."""
    try:
        held = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return held if isinstance(held, dict) else {}


def write_json(path: Path, held: dict[str, Any]) -> None:
    fresh = path.with_name(path.name + ".new")
    with fresh.open("w", encoding="utf-8") as stream:
        json.dump(held, stream)
        sync(stream)
    replace(fresh, path)


def replace(source: Path, goal: Path) -> None:
    """Renames, and returns only when the new name is on the disk."""
    os.replace(source, goal)
    folder = os.open(goal.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def sync(stream: IO[Any]) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def blocks(stream: IO[bytes], size: int) -> Iterator[bytes]:
    """The next size bytes of a stream, or all that is left of it."""
    while size > 0 and (block := stream.read(min(size, BLOCK_BYTES))):
        size -= len(block)
        yield block


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def exclusive(lock: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Waits until no other process or thread holds the lock, then holds it."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def require_space(folder: Path, needed: int, name: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PullError(
            f"pulling {name} needs {megabytes(needed)} under {folder}, where {megabytes(free)} are free: "
            "make room, or set PACELINE_HOME to a folder on a larger disk"
        )


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
