"""Measures the time of passes again, in the place of a measurement on a busy machine, once nothing runs."""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final, Protocol

from paceline.log import log_error

INTERVAL_S: Final = 30.0

log = logging.getLogger("paceline.server")


class EngineQueue(Protocol):
    """The part of the engine's thread that is used here."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def turns(self) -> AbstractContextManager[None]: ...
    def between_passes(self, call: Callable[[], None]) -> None: ...


class CostRenewal:
    """Tries at intervals, in the engine's thread, until the machine was quiet.

    A request that comes meanwhile waits: for about half a second, with a model of a billion weights.
    """

    def __init__(
        self, renew: Callable[[], bool], engine: EngineQueue, interval_s: float = INTERVAL_S
    ) -> None:
        """renew: False while the machine is busy."""
        self._renew, self._engine, self._interval_s = renew, engine, interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-cost", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._engine.between_passes(self._try)

    def _try(self) -> None:
        if self._ended.is_set() or self._engine.running or self._engine.waiting:
            return
        try:
            with self._engine.turns:  # no other model runs a pass
                renewed = self._renew()
        except Exception as problem:  # requests are served all the same
            log_error(log, "the time of passes could not be measured again", problem)
            renewed = True
        if renewed:
            self._ended.set()
