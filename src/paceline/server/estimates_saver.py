"""Saves the controller's estimates at intervals and at the end, so that a restart begins where it stopped."""

import logging
import threading
from collections.abc import Callable
from typing import Final, Protocol

from paceline.engine.saved_estimates import SavedEstimates, Table
from paceline.log import log_error

INTERVAL_S: Final = 60.0
SNAPSHOT_S: Final = 10.0  # to wait for the engine's thread

log = logging.getLogger("paceline.server")


class EngineQueue(Protocol):
    """The part of the engine's thread that is used here."""

    @property
    def alive(self) -> bool: ...
    def between_passes(self, call: Callable[[], None]) -> None: ...


class EstimatesSaver:
    """The engine's thread copies the numbers; the file is written in a thread of this class."""

    def __init__(self, saved: SavedEstimates, engine: EngineQueue, interval_s: float = INTERVAL_S) -> None:
        self._saved, self._engine, self._interval_s = saved, engine, interval_s
        self._written: Table | None = None  # an idle server writes nothing
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-estimates", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float) -> None:
        """After the engine's thread has ended; while it runs, the last save at an interval must do."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        if not self._engine.alive:
            self._write(self._saved.snapshot())

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._save_between_passes()

    def _save_between_passes(self) -> None:
        made, snapshots = threading.Event(), list[Table]()

        def copy() -> None:
            snapshots.append(self._saved.snapshot())
            made.set()

        self._engine.between_passes(copy)
        if made.wait(SNAPSHOT_S):
            self._write(snapshots[0])

    def _write(self, snapshot: Table) -> None:
        if snapshot == self._written:
            return
        try:
            self._saved.write(snapshot)
            self._written = snapshot
        except Exception as problem:  # a full disk, say: requests are served all the same
            log_error(log, "the controller's estimates could not be saved", problem)
