"""Masks beside a pass, in threads of their own. Slow ones delay their own sequence and no other.

A sequence whose masks are not ready soon after a pass loses the rows of that pass. It is in no further pass
until its next mask is ready, and has no drafts until its masks are quick again.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from time import monotonic, thread_time
from typing import Final

from paceline.constraints.cursor import lower_priority
from paceline.constraints.draft_masks import Masks
from paceline.errors import ConstraintError
from paceline.log import log_error

log = logging.getLogger("paceline")

LATE_S: Final = 0.02  # after the pass
QUICK_S: Final = 0.005
QUICK_MASKS: Final = 4  # in a row: the sequence may have drafts again
IDLE_WAIT_S: Final = 0.05  # while no sequence has a mask

TOO_SLOW: Final = (
    "following the constraint has taken more than {:g} s of CPU time: simplify it (setting max_grammar_s)"
)

Compute = Callable[[Callable[[], bool]], Masks]  # with a function that tells whether it is late


@dataclass(slots=True, eq=False)
class _Job:
    future: "Future[Masks]"
    late: threading.Event
    compute: Compute
    cpu_s: float = 0.0


class Masking:
    """The masks that are being computed, by sequence. Only the engine's thread calls it.

    max_slow_s: CPU time that the slow masks of one output may take.
    """

    def __init__(self, max_slow_s: float) -> None:
        self._max_slow_s = max_slow_s
        self._spent: dict[str, float] = {}  # of that time, by sequence
        self._pool = _pool()
        self._late: dict[str, _Job] = {}  # of sequences that are in no pass
        self._ended: set[str] = set()  # during the pass
        self._slow: dict[str, int] = {}  # quick masks that a sequence needs before it has drafts again

    def start(self, compute: Compute) -> _Job:
        late = threading.Event()
        job = _Job(Future(), late, compute)
        job.future = self._pool.submit(_run, job)
        return job

    def collect(self, jobs: Iterable[tuple[str, _Job]]) -> dict[str, Masks]:
        """Waits for the masks of some sequences. Late ones are missing: their sequences are held."""
        waiting, deadline, done = list(jobs), monotonic() + LATE_S, dict[str, Masks]()
        for i, (seq_id, job) in enumerate(waiting):
            if wait([job.future], max(0.0, deadline - monotonic())).done:
                done[seq_id] = job.future.result()
            else:
                self._hold(seq_id, job)
                self._move_on([other for _, other in waiting[i + 1 :]])
                deadline = monotonic() + LATE_S
        self._ended.clear()
        return done

    def _hold(self, seq_id: str, job: _Job) -> None:
        job.late.set()
        if seq_id not in self._ended:
            self._late[seq_id], self._slow[seq_id] = job, QUICK_MASKS

    def _move_on(self, waiting: Iterable[_Job]) -> None:
        """The late one keeps its thread; those behind it get another."""
        self._pool.shutdown(wait=False)
        self._pool = _pool()
        for job in waiting:
            if job.future.cancel():
                job.future = self._pool.submit(_run, job)

    def slow(self, seq_id: str) -> bool:
        return seq_id in self._slow

    def held(self, seq_id: str) -> bool:
        """True while the sequence waits for its mask."""
        return seq_id in self._late and not self._late[seq_id].future.done()

    def ready(self, seq_id: str) -> Masks | None:
        """The first mask of a sequence that was held, once."""
        job = self._late.pop(seq_id, None)
        if job is None:
            return None
        quick = job.cpu_s < QUICK_S
        self._slow[seq_id] = self._slow.get(seq_id, QUICK_MASKS) - 1 if quick else QUICK_MASKS
        if not self._slow[seq_id]:
            del self._slow[seq_id]
        self._spent[seq_id] = self._spent.get(seq_id, 0.0) + (0.0 if quick else job.cpu_s)
        if self._spent[seq_id] > self._max_slow_s:
            return Masks([ConstraintError(TOO_SLOW.format(self._max_slow_s))])
        return Masks(job.future.result().rows[:1])

    def ahead(self, seq_id: str, compute: Compute) -> None:
        """Begins the next mask of a slow sequence, which is held until then."""
        pool = ThreadPoolExecutor(1, "paceline-slow-grammar", lower_priority)
        job = _Job(Future(), threading.Event(), compute)
        job.late.set()
        job.future = pool.submit(_run, job)
        pool.shutdown(wait=False)
        self._late[seq_id] = job

    def wait(self) -> None:
        """Until one of the held sequences is ready, or for a moment."""
        wait([job.future for job in self._late.values()], IDLE_WAIT_S, FIRST_COMPLETED)

    def forget(self, seq_id: str) -> None:
        """The sequence has ended."""
        self._ended.add(seq_id)
        self._slow.pop(seq_id, None)
        self._spent.pop(seq_id, None)
        if (job := self._late.pop(seq_id, None)) is not None:
            job.future.cancel()


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "paceline-grammar")


def _run(job: _Job) -> Masks:
    started = thread_time()
    try:
        return job.compute(job.late.is_set)
    except BaseException as problem:  # a panic of the compiler's is no Exception
        log_error(log, "a mask could not be computed", problem)
        return Masks([ConstraintError(f"internal error: {type(problem).__name__}")])
    finally:
        job.cpu_s = thread_time() - started
