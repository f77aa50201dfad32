"""Watches the current version of each trained drafter, and loads a new one once.

A version that cannot be loaded changes nothing: the old one stays, and the next one is tried.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.errors import PacelineError
from paceline.heads.versions import POINTER, current
from paceline.loading import TrainedHead
from paceline.log import origin

Stamp = tuple[int, int]  # inode and modification time (ns) of the file that names the version

_NEVER: Final[Stamp] = (-1, -1)

log = logging.getLogger("paceline.server")


@dataclass(slots=True)
class _Watched:
    head: TrainedHead  # the version in use
    stamp: Stamp = _NEVER
    since: float = 0.0  # when that was first seen, by this process's clock
    tried: bool = False


class VersionWatcher:
    """Calls `load` with each new version; `load` raises where it cannot be used."""

    def __init__(
        self,
        heads: Sequence[TrainedHead],
        load: Callable[[TrainedHead], None],
        patience_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._watched = {head.kind: _Watched(head) for head in heads}
        self._load, self._patience_s, self._clock = load, patience_s, clock

    @property
    def roots(self) -> dict[str, Path]:
        """By kind."""
        return {kind: it.head.root for kind, it in self._watched.items()}

    def poll(self, idle: bool) -> None:
        for it in self._watched.values():
            stamp = _stamp(it.head.root)
            if stamp != it.stamp:
                it.stamp, it.since, it.tried = stamp, self._clock(), False
            wait = not idle and self._clock() - it.since < self._patience_s
            if not it.tried and not wait:
                it.tried = True
                self._load_current(it)

    def _load_current(self, it: _Watched) -> None:
        head = it.head
        try:
            version = current(head.root)
            if version != head.version:
                new = TrainedHead(head.name, head.kind, head.root, version)
                self._load(new)
                it.head = new
        except Exception as problem:
            why = str(problem) if isinstance(problem, PacelineError) else origin(problem)
            log.error("keeping %s at version %d: %s", head.name, head.version.number, why)


def _stamp(root: Path) -> Stamp:
    """A replaced file has another inode, whatever the clocks say."""
    try:
        stat = (root / POINTER).stat()
    except FileNotFoundError:
        return 0, 0
    except OSError as error:
        return 0, error.errno or 1
    return stat.st_ino, stat.st_mtime_ns
