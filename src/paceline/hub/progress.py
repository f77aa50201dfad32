"""How a pull reports its progress; the caller displays it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Final, Protocol

POLL_SECONDS: Final = 0.2


class Progress(Protocol):
    def __call__(self, done: int, total: int, label: str) -> None:
        """Called with bytes; done never falls and never passes total."""


def silent(done: int, total: int, label: str) -> None:
    """A Progress that shows nothing."""


def bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # moved or removed since it was listed
            continue
    return total


@contextmanager
def watching(folder: Path, progress: Progress, total: int, label: str) -> Iterator[None]:
    """Reports the growth of a folder from a thread of its own while the body runs."""
    stopped = Event()

    def watch() -> None:
        done = 0
        while not stopped.wait(POLL_SECONDS):
            done = max(done, min(bytes_under(folder), total))
            progress(done, total, label)

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stopped.set()
        watcher.join()
