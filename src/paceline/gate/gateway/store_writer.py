"""Writes to the store from a thread of its own, so that no request waits for a database."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from paceline.errors import PacelineError

log = logging.getLogger("paceline.gate")

MAX_WAITING: Final = 1000
SECONDS_BETWEEN_LOGS: Final = 60.0


class StoreWriter:
    """Never blocks or raises. What finds no room is dropped; failures are counted and logged."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self.dropped = 0
        self.failed = 0
        self._max_waiting = max_waiting
        self._waiting: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._logged = float("-inf")
        self._thread = threading.Thread(target=self._work, name="paceline-gate-store", daemon=True)
        self._thread.start()

    def submit(self, act: Callable[[], object]) -> bool:
        """False: there was no room."""
        with self._changed:
            if self._closing or len(self._waiting) >= self._max_waiting:
                self.dropped += 1
                return False
            self._waiting.append(act)
            self._changed.notify()
        return True

    def flush(self, seconds: float) -> bool:
        """Waits until nothing waits; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, seconds)

    def close(self, seconds: float) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(seconds)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                act = self._waiting[0]  # it counts as waiting until it is done
            try:
                act()
            except Exception as error:
                self._failure(error)
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()

    def _failure(self, error: Exception) -> None:
        self.failed += 1
        if time.monotonic() - self._logged >= SECONDS_BETWEEN_LOGS:
            self._logged = time.monotonic()
            # Only our own errors are known to quote nothing.
            reason = error if isinstance(error, PacelineError) else type(error).__name__
            log.warning("the gate's store loses entries, %d so far: %s", self.failed, reason)
