"""Sees which version of each trained drafter is to serve, and has it taken up once.

One that cannot be loaded changes nothing: what serves goes on, and the next that is named is tried.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.errors import PacelineError
from paceline.heads.versions import POINTER, current
from paceline.loading import TrainedHead
from paceline.log import place_of

Mark = tuple[int, int]  # of the file that names a version: another one has another

_NEVER: Final[Mark] = (-1, -1)

log = logging.getLogger("paceline.server")


@dataclass(slots=True)
class _Followed:
    one: TrainedHead  # as it serves
    mark: Mark = _NEVER
    since: float = 0.0  # when that was first seen, by the clock of this process: others' may differ
    looked_at: bool = False


class VersionWatcher:
    """Loads nothing itself: `serve` does, and raises where it cannot."""

    def __init__(
        self,
        found: Sequence[TrainedHead],
        serve: Callable[[TrainedHead], None],
        patience_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._followed = {one.kind: _Followed(one) for one in found}
        self._serve, self._patience_s, self._clock = serve, patience_s, clock

    @property
    def roots(self) -> dict[str, Path]:
        """By kind."""
        return {kind: it.one.root for kind, it in self._followed.items()}

    def look(self, idle: bool) -> None:
        for it in self._followed.values():
            mark = _mark(it.one.root)
            if mark != it.mark:
                it.mark, it.since, it.looked_at = mark, self._clock(), False
            patient = not idle and self._clock() - it.since < self._patience_s
            if not it.looked_at and not patient:
                it.looked_at = True
                self._take_up(it)

    def _take_up(self, it: _Followed) -> None:
        one = it.one
        try:
            version = current(one.root)
            if version != one.version:
                new = TrainedHead(one.name, one.kind, one.root, version)
                self._serve(new)
                it.one = new
        except Exception as problem:
            why = str(problem) if isinstance(problem, PacelineError) else place_of(problem)
            log.error("%s goes on with version %d, which it has: %s", one.name, one.version.number, why)


def _mark(root: Path) -> Mark:
    """A file that is replaced whole is another file, whatever the clocks say."""
    try:
        found = (root / POINTER).stat()
    except FileNotFoundError:
        return 0, 0
    except OSError as error:
        return 0, error.errno or 1
    return found.st_ino, found.st_mtime_ns
