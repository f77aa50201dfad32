"""Masks beside a pass, in threads of their own. Slow ones delay their own sequence and no other.

Those of all outputs are computed together where that can be (`constraints.mask_batch`), others one by one. If
not all of them are ready soon after a pass, the ones computed together are computed one by one, too.

A sequence whose masks are not ready soon after a pass loses the rows of that pass. It is in no further pass
until its next mask is ready, and has no drafts until its masks are quick again.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import zip_longest
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


Together = Callable[
    [], Sequence[Masks | None]
]  # one for each sequence; None: it has to be computed by itself


@dataclass(slots=True, eq=False)
class _Job:
    compute: Compute
    future: "Future[Masks]" = field(default_factory=Future)
    late: bool = False  # only the first mask is needed
    cpu_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Batch:
    """The jobs of a pass. Their futures are set one after the other, unless they were cancelled."""

    jobs: Sequence[_Job]
    together: Together | None = None
    running: bool = False  # the masks that are computed together
    renewed: bool = False  # the time that masks have after the pass
    futures: "list[Future[Masks]]" = field(init=False)  # those of a job that begins anew are others

    def __post_init__(self) -> None:
        self.running = self.together is not None
        self.futures = [job.future for job in self.jobs]


class Masking:
    """The masks that are being computed, by sequence. Only the engine's thread calls it.

    max_slow_s: CPU time that the slow masks of one output may take.
    """

    def __init__(self, max_slow_s: float) -> None:
        self._max_slow_s = max_slow_s
        self._spent: dict[str, float] = {}  # of that time, by sequence
        self._pool = _pool()
        self._jobs: dict[str, _Job] = {}  # of this pass
        self._batch = _Batch(())  # the last one, whose masks may be late
        self._deadline: float | None = None  # of the masks of this pass
        self._late: dict[str, _Job] = {}  # of sequences that are in no pass
        self._ended: set[str] = set()  # during the pass
        self._slow: dict[str, int] = {}  # quick masks that a sequence needs before it has drafts again

    def start(self, computes: Mapping[str, Compute], together: Together | None = None) -> None:
        """Begins the masks of a pass. together: of the same sequences; not called while earlier ones run."""
        if not computes:
            return
        self._jobs = {seq_id: _Job(compute) for seq_id, compute in computes.items()}
        batch = _Batch(list(self._jobs.values()), None if self._batch.running else together)
        if batch.running:
            self._batch = batch
        self._pool.submit(_run_batch, batch)

    def result(self, seq_id: str) -> Masks | None:
        """The masks of this pass, waited for. None: they are late, and the sequence is held."""
        job = self._jobs[seq_id]
        if self._deadline is None:
            self._deadline = monotonic() + LATE_S
        if not (job.late or job.future.done() or self._in_time(job)):
            self._hold(seq_id, job)
            self._deadline = monotonic() + LATE_S
        return None if job.late else job.future.result()

    def _in_time(self, job: _Job) -> bool:
        if self._wait(job):
            return True
        batch = self._batch
        if job.future in batch.futures and not batch.renewed:  # those that it leaves out come after it
            batch.renewed = True
            if batch.running:
                self._start_anew(self._jobs.values())
            self._deadline = monotonic() + LATE_S
        return self._wait(job)

    def _wait(self, job: _Job) -> bool:
        assert self._deadline is not None
        return bool(wait([job.future], max(0.0, self._deadline - monotonic())).done)

    def _start_anew(self, jobs: Iterable[_Job]) -> None:
        """In another thread. A job that is running stays where it is."""
        pending = [job for job in jobs if job.future.cancel()]
        for job in pending:
            job.future = Future()
        self._pool.shutdown(wait=False)
        self._pool = _pool()
        self._pool.submit(_run_batch, _Batch(pending))

    def rows(self, seq_id: str, count: int) -> Masks:
        """The same for a target that chooses tokens itself: where they are late, any token will do."""
        return self.result(seq_id) or Masks([None] * count)

    def end_pass(self) -> None:
        self._jobs.clear()
        self._ended.clear()
        self._deadline = None
        if not self._batch.running:
            self._batch = _Batch(())

    def _hold(self, seq_id: str, job: _Job) -> None:
        """The late one keeps its thread; those behind it get another."""
        job.late = True
        if seq_id not in self._ended:
            self._late[seq_id], self._slow[seq_id] = job, QUICK_MASKS
        self._start_anew(other for other in self._jobs.values() if other is not job)

    def set_slow(self, seq_id: str) -> None:
        """The sequence waits for its next mask before it is in a pass."""
        self._slow[seq_id] = QUICK_MASKS

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
        job = _Job(compute)
        job.late = True
        pool.submit(_run_batch, _Batch([job]))
        pool.shutdown(wait=False)
        self._late[seq_id] = job

    def wait(self) -> None:
        """Until another of the held sequences is ready, or for a moment.

        One that is ready and not admitted has no part in it: it may wait for others to leave the cache.
        """
        held = [job.future for job in self._late.values() if not job.future.done()]
        wait(held, IDLE_WAIT_S, FIRST_COMPLETED)

    def forget(self, seq_id: str) -> None:
        """The sequence has ended."""
        self._ended.add(seq_id)
        self._slow.pop(seq_id, None)
        self._spent.pop(seq_id, None)
        if (job := self._late.pop(seq_id, None)) is not None:
            job.future.cancel()


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "paceline-grammar")


def _run_batch(batch: _Batch) -> None:
    found: Sequence[Masks | None] = ()
    if batch.together is not None:
        try:
            found = batch.together()
        except BaseException as problem:
            log_error(log, "masks could not be computed together", problem)
        finally:
            batch.running = False
    for job, future, masks in zip_longest(batch.jobs, batch.futures, found):
        if future.set_running_or_notify_cancel():
            future.set_result(_run(job) if masks is None else masks)


def _run(job: _Job) -> Masks:
    started = thread_time()
    try:
        return job.compute(lambda: job.late)
    except BaseException as problem:  # a panic of the compiler's is no Exception
        log_error(log, "a mask could not be computed", problem)
        return Masks([ConstraintError(f"internal error: {type(problem).__name__}")])
    finally:
        job.cpu_s = thread_time() - started
