"""Saves traces from a thread of its own, without ever making a request wait."""

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from paceline.errors import PacelineError
from paceline.trace.record import RequestRecord, RoundRecord, round_record, without_text, without_tokens
from paceline.types import Finish, Round, Seq, Sink

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LOGS: Final = 60.0
SAVES_BETWEEN_PRUNES: Final = 256
SECONDS_BETWEEN_PRUNES: Final = 600.0

Job = tuple[RequestRecord, Sequence[RoundRecord], bool]  # True: its text is saved too


class RecordStore(Protocol):
    """The part of a store that a recorder needs."""

    def save(self, record: RequestRecord, rounds: Sequence[RoundRecord]) -> None: ...
    def prune(self) -> int: ...


class Recorder(Sink):
    """Collects rounds, and saves them with the record of their request once that has finished.

    It never raises or blocks, whatever happens to the database: failures are counted. The caller owns the
    store.
    """

    def __init__(
        self,
        store: RecordStore,
        *,
        with_text: bool = False,
        max_waiting: int = 256,  # requests
        max_open: int = 4096,  # sequences
        max_rounds: int = 100_000,  # in memory, of all sequences
    ) -> None:
        self.saved = 0
        self.dropped = 0  # requests that found no room, or came after the end
        self.failed = 0  # requests, rounds and prunings that went wrong
        self.unsaved = 0  # requests, of those
        self._store = store
        self._with_text = with_text
        self._max_waiting, self._max_open, self._max_rounds = max_waiting, max_open, max_rounds
        self._open: OrderedDict[str, list[RoundRecord]] = OrderedDict()  # least recently active first
        self._waiting: deque[Job] = deque()
        self._held = 0  # rounds in memory
        self._changed = threading.Condition()  # guards all of the above
        self._closing = False
        self._last_log = -math.inf
        self._last_prune = -math.inf
        self._since_prune = 0  # requests
        self._writer = threading.Thread(target=self._write, name="paceline-traces", daemon=True)
        self._writer.start()

    def round(self, r: Round) -> None:
        try:
            with self._changed:
                rounds = self._open.setdefault(r.request, [])
                rounds.append(round_record(r, len(rounds)))
                self._held += 1
                self._open.move_to_end(r.request)
                self._drop_inactive()
        except Exception as error:
            self._failure(error)

    def finish(self, seq: Seq, reason: Finish) -> None:
        """Nothing: `finished` saves. If that never comes, the rounds are dropped in time."""

    def finished(
        self, record: RequestRecord, sequence: str | None = None, with_text: bool | None = None
    ) -> None:
        """Queues a request to be saved. sequence: the id of its rounds, if it is not the record's.

        with_text: save its text; None: as set for all.
        """
        keep = self._with_text if with_text is None else with_text
        try:
            with self._changed:
                rounds = self._open.pop(sequence or record.id, [])
                if self._closing or len(self._waiting) >= self._max_waiting:
                    self.dropped += 1
                    self._held -= len(rounds)
                else:
                    self._waiting.append((record, rounds, keep))
                    self._changed.notify_all()
        except Exception as error:
            self._failure(error)

    def lost(self) -> dict[str, int]:
        """Requests that are not in the store, by reason."""
        return {"dropped": self.dropped, "failed": self.unsaved}

    def close(self, timeout: float | None = None) -> bool:
        """Saves the queued requests. True if all of it was saved; later requests are dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._writer.join(timeout)
        return not self._writer.is_alive()

    def _drop_inactive(self) -> None:
        while len(self._open) > self._max_open or (self._held > self._max_rounds and self._open):
            _, rounds = self._open.popitem(last=False)
            self._held -= len(rounds)

    def _write(self) -> None:
        while not self._done():
            if self._prune_is_due():
                self._prune()
            if (job := self._next()) is not None:
                self._save(job)

    def _done(self) -> bool:
        with self._changed:
            return self._closing and not self._waiting

    def _next(self) -> Job | None:
        """None: it is time to prune again, or the recorder is closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing, SECONDS_BETWEEN_PRUNES)
            return self._waiting[0] if self._waiting else None

    def _save(self, job: Job) -> None:
        self._since_prune += 1
        if self._try(lambda: self._store.save(*_to_save(job))):
            self.saved += 1
        else:
            self.unsaved += 1
        with self._changed:  # it counts as waiting until it is saved
            self._waiting.popleft()
            self._held -= len(job[1])

    def _prune_is_due(self) -> bool:
        late = time.monotonic() - self._last_prune >= SECONDS_BETWEEN_PRUNES
        return late or self._since_prune >= SAVES_BETWEEN_PRUNES

    def _prune(self) -> None:
        self._try(self._store.prune)
        self._last_prune, self._since_prune = time.monotonic(), 0

    def _try(self, act: Callable[[], object]) -> bool:
        try:
            act()
        except Exception as error:
            self._failure(error)
            return False
        return True

    def _failure(self, error: Exception) -> None:
        self.failed += 1
        now = time.monotonic()
        if now - self._last_log >= SECONDS_BETWEEN_LOGS:
            self._last_log = now
            # Only our own errors are known to quote nothing.
            reason = error if isinstance(error, PacelineError) else type(error).__name__
            log.warning("traces are being lost, %d so far: %s", self.failed, reason)


def _to_save(job: Job) -> tuple[RequestRecord, Sequence[RoundRecord]]:
    """The records, without text where that is not to be saved."""
    record, rounds, with_text = job
    return (record, rounds) if with_text else (without_text(record), [without_tokens(r) for r in rounds])
