"""Continuous batching with chunked prefill: which sequences run, and which tokens go into a pass."""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Final, NamedTuple

from paceline.constraints.draft_masks import FREE, Masks
from paceline.errors import Busy, PacelineError
from paceline.types import NO_DRAFT, Draft, Finish, Round, Seq, TokenLogprob, Verdict

OLDEST_EVERY: Final = 4  # admissions, of which one is the oldest's
QUEUE_SHARE: Final = 4  # places that one client may hold for each that stays free
MAX_RETRY_S: Final = 600.0
MIN_BESIDE: Final = 8  # rows of prompts beside decoding, however slow they are
FIRST_BESIDE: Final = 64  # the same, at most, before anything is known of their time
_MIN_ROW_MS: Final = 0.001  # of a cost curve that says less

RowCost = Callable[[int], float]  # tokens before a row of a prompt -> milliseconds that it adds to a pass


class Scheduler:
    """Admits sequences and shares the rows of a pass among them.

    Of the waiting ones the highest priority comes first. Of equal ones, those that were preempted; then the
    one whose client has the fewest running, then the one whose tenant has, then the oldest. Every fourth time
    the oldest comes first, so that nobody waits for more than four times as many admissions as in order of
    arrival.

    Every decoding sequence is in every pass. Prompts share the rows for prefill (chunked prefill as in
    Sarathi-Serve, arXiv 2403.02310): half are for the prompt admitted first, the other half for shorter
    remainders, shortest first. So a prompt is read after at most twice as many passes as in order of
    admission, rounded up for each prompt, whatever comes after it.

    A sequence that is only read ahead (`Seq.prefill`) is behind all others: it is admitted when nobody else
    waits, has the rows that no other prompt needs, and gives its place back to one that generates.
    """

    def __init__(
        self,
        max_batch: int,
        prefill_chunk: int,
        prefill_beside: int = 0,
        max_waiting: int = 0,
        cut_anywhere: bool = True,
        beside_s: float = 0.0,
        clock: Callable[[], float] = monotonic,
        row_cost: RowCost | None = None,
    ) -> None:
        """cut_anywhere: prompts may be cut at any position; False: only at multiples of prefill_chunk.

        beside_s: seconds that prompts may add to a pass beside decoding; 0: any. row_cost: of their rows.
        """
        self._max_batch = max_batch
        self._chunk = prefill_chunk
        self._beside = prefill_beside or prefill_chunk
        self._max_waiting = max_waiting  # 0: any number
        self._cut_anywhere = cut_anywhere
        self._waiting: list[Seq] = []  # in order of arrival
        self._preempted: list[Seq] = []  # in order of admission
        self._running: list[Seq] = []  # in order of admission
        self._admitted: dict[str, int] = {}  # sequence -> the number of its first admission
        self._admissions = 0
        self._full = False  # the cache was full: none is admitted before another leaves
        self._pace = _Pace(clock)
        self._row_time = _RowTime(beside_s if cut_anywhere else 0.0, row_cost)

    def __len__(self) -> int:
        return self.waiting + len(self._running)

    def __contains__(self, seq_id: str) -> bool:
        """True once it was admitted, until it leaves."""
        return seq_id in self._admitted

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._preempted)

    def add(self, seq: Seq, slots: int = 1) -> None:
        everyone = (*self._waiting, *self._preempted, *self._running)
        if any(seq.id == other.id for other in everyone):
            raise ValueError(f"a sequence {seq.id!r} is here already")
        if not self._room(slots):
            raise Busy(
                f"{self.waiting} requests wait already: there is no room for {slots} more; try again later",
                self._pace.seconds(slots),
            )
        if seq.client and slots and not self._fair_room(sum(o.client == seq.client for o in everyone), slots):
            raise Busy(
                "this client has too large a part of the queue: wait for its other answers",
                self._pace.seconds(slots),
            )
        self._waiting.append(seq)

    def _room(self, slots: int) -> bool:
        """True if all outputs of a request fit in the queue; one that never could is admitted alone."""
        if not self._max_waiting or not slots:
            return True
        free = self._max_batch + self._max_waiting - len(self)
        return self.waiting < self._max_waiting and (slots <= free or not len(self))

    def _fair_room(self, held: int, slots: int) -> bool:
        """Dynamic thresholds (Choudhury and Hahne 1998): one client leaves room for the others.

        It holds at most QUEUE_SHARE times as many places as stay free.
        """
        if not self._max_waiting or not held:
            return True
        free = self._max_batch + self._max_waiting - len(self)
        return held + slots <= QUEUE_SHARE * (free - slots + 1)

    def admit(self) -> list[Seq]:
        """Moves sequences from waiting to running; returns the new ones. Preempted ones return one a pass."""
        new: list[Seq] = []
        limit = 1 if self._preempted else self._max_batch
        while self.waiting and len(self._running) < self._max_batch and len(new) < limit and not self._full:
            seq = self._next()
            (self._preempted if seq.id in self._admitted else self._waiting).remove(seq)
            self._admitted.setdefault(seq.id, self._admissions)
            self._admissions += 1
            insort(self._running, seq, key=self._order)
            new.append(seq)
        return new

    def _order(self, seq: Seq) -> int:
        return self._admitted[seq.id]

    def _next(self) -> Seq:
        waiting = (*self._preempted, *self._waiting)
        if self._admissions % OLDEST_EVERY == OLDEST_EVERY - 1:
            return min(waiting, key=lambda seq: (seq.prefill, -seq.priority))
        clients = Counter(seq.client for seq in self._running)
        tenants = Counter(seq.tenant for seq in self._running)

        def rank(seq: Seq) -> tuple[bool, int, bool, int, int]:
            turns = clients[seq.client], tenants[seq.tenant]
            return seq.prefill, -seq.priority, seq.id not in self._admitted, *turns

        return min(waiting, key=rank)

    def preempt(self) -> Seq:
        """Moves one from running back to waiting: of the lowest priority the one admitted last."""
        seq = min(self._running, key=lambda seq: (not seq.prefill, seq.priority, -self._order(seq)))
        self._suspend(seq)
        self._full = True
        return seq

    def displace(self) -> Seq | None:
        """Moves one that is only read ahead back to waiting, if another needs its place."""
        ahead = [seq for seq in self._running if seq.prefill]
        waits = any(not seq.prefill for seq in (*self._preempted, *self._waiting))
        if not ahead or not waits or len(self._running) < self._max_batch or self._full:
            return None
        self._suspend(ahead[-1])
        return ahead[-1]

    def _suspend(self, seq: Seq) -> None:
        self._running.remove(seq)
        insort(self._preempted, seq, key=self._order)

    def running(self) -> Sequence[Seq]:
        return tuple(self._running)

    def expired(self, now: float) -> list[Seq]:
        """Sequences past their deadline."""
        queues = (self._running, self._preempted, self._waiting)
        return [seq for queue in queues for seq in queue if seq.deadline is not None and now >= seq.deadline]

    def remove(self, seq_id: str) -> tuple[Seq, bool] | None:
        """Removes a sequence; returns it and whether it was running."""
        for queue in (self._running, self._preempted, self._waiting):
            for seq in list(queue):
                if seq.id == seq_id:
                    self._pace.left(self.waiting)
                    queue.remove(seq)
                    self._admitted.pop(seq_id, None)
                    self._full = False
                    return seq, queue is self._running
        return None

    def pieces(self, held: Callable[[Seq], bool] = lambda seq: False) -> list[tuple[Seq, list[int]]]:
        """The pending tokens of each sequence that has a part in this pass. held: those that have none."""
        running = [seq for seq in self._running if not held(seq)]
        if all(_remainder(seq) == 1 for seq in running):
            return [(seq, seq.tokens[-1:]) for seq in running]
        decoding = {seq.id: 1 for seq in running if _remainder(seq) == 1}
        prompts = [seq for seq in running if _remainder(seq) > 1]
        reading = [seq for seq in prompts if not seq.prefill] or prompts
        rows = self._chunk
        if decoding:
            rows = self._row_time.rows(self._beside, max((seq.computed for seq in reading), default=0))
        shares = self._shared_rows if self._cut_anywhere else self._whole_chunks
        sizes = decoding | (shares(reading, rows) if reading else {})
        return [
            (seq, seq.tokens[seq.computed : seq.computed + size])
            for seq in running
            if (size := sizes.get(seq.id, 0))
        ]

    def took(self, scheduled: "Sequence[Scheduled]", seconds: float) -> None:
        """The time of a pass."""
        read = [(s.seq.computed, len(s.fed)) for s in scheduled if len(s.fed) > 1]
        rows = sum([s.rows for s in scheduled if len(s.fed) == 1])
        self._row_time.learn(read, rows, seconds)

    def _shared_rows(self, reading: Sequence[Seq], rows: int) -> dict[str, int]:
        """The rows of each prompt: half for the first, then for short ones, then in order of admission."""
        first, shares = reading[0], Counter[str]()
        for seq, limit in ((first, -(-rows // 2)), *((seq, rows) for seq in (*_shorter(reading), *reading))):
            size = min(_remainder(seq) - shares[seq.id], limit, rows - shares.total())
            shares[seq.id] += size
        return dict(shares)

    def _whole_chunks(self, reading: Sequence[Seq], rows: int) -> dict[str, int]:
        """The same in chunks that end at multiples of a fixed number, in at most half as many rows again."""
        sizes: dict[str, int] = {}
        for seq in (reading[0], *_shorter(reading), *reading):
            size = min(_remainder(seq), self._chunk - seq.computed % self._chunk)
            if not sizes or sum(sizes.values()) + size <= rows + rows // 2:
                sizes.setdefault(seq.id, size)
        return sizes


def _remainder(seq: Seq) -> int:
    """Tokens that are not computed yet."""
    return len(seq.tokens) - seq.computed


def _shorter(reading: Sequence[Seq]) -> list[Seq]:
    """Those that overtake the first: of a higher priority, or with at most half as many tokens to compute.

    With more than half, the first would lose more time than they gain.
    """
    first, *others = reading
    short = [
        seq
        for seq in others
        if seq.priority > first.priority
        or (seq.priority == first.priority and 2 * _remainder(seq) <= _remainder(first))
    ]
    return sorted(short, key=lambda seq: (-seq.priority, _remainder(seq)))


class _RowTime:
    """The most rows of prompts that fit into a time: the token budget of Sarathi-Serve, by a cost curve.

    A row costs more the further its prompt has been read. The curve says by how much, and passes correct it;
    without one they say it alone. Rows of answers, drafts included, take what they take in passes without
    prompts; further ones count as rows of prompts do. All numbers are exponential moving averages.
    """

    def __init__(self, limit_s: float, row_cost: RowCost | None) -> None:
        self._limit_s = limit_s  # 0: any
        self._row_cost = row_cost
        self._decode_s = 0.0  # of a pass without prompts
        self._decode_rows = 0.0  # in it
        self._ratio = 1.0 if row_cost else 0.0  # of measured to expected seconds; 0: unknown

    def learn(self, read: Sequence[tuple[int, int]], decoding: int, seconds: float) -> None:
        """read: for each prompt in the pass the tokens before its rows, and how many these are.

        decoding: rows of answers, drafts included.
        """
        if read:
            expected = sum(rows * self._expected_s(context) for context, rows in read)
            usual = min(1.0, decoding / self._decode_rows) if self._decode_rows else 0.0
            more = max(0.0, decoding - self._decode_rows) / sum(rows for _, rows in read)
            ratio = max(0.0, seconds - usual * self._decode_s) / (expected * (1 + more))
            self._ratio += (0.3 if self._ratio else 1.0) * (ratio - self._ratio)
        elif decoding:
            share = 0.3 if self._decode_s else 1.0
            self._decode_s += share * (seconds - self._decode_s)
            self._decode_rows += share * (decoding - self._decode_rows)

    def rows(self, limit: int, context: int) -> int:
        """Up to `limit`, for prompts with at most `context` tokens before them."""
        if not self._limit_s:
            return limit
        if not self._ratio:
            return min(limit, FIRST_BESIDE)
        fitting = int(self._limit_s / (self._ratio * self._expected_s(context)))
        return min(limit, max(MIN_BESIDE, fitting))

    def _expected_s(self, context: int) -> float:
        return max(self._row_cost(context), _MIN_ROW_MS) / 1000 if self._row_cost else 1.0


class _Pace:
    """How often a sequence leaves while others wait."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: float | None = None  # None: nobody waited since
        self._gap_s = 1.0

    def left(self, waiting: int) -> None:
        now = self._clock()
        if self._last is not None:
            self._gap_s += 0.2 * (now - self._last - self._gap_s)
        self._last = now if waiting else None

    def seconds(self, places: int) -> float:
        """Until so many places are free."""
        return min(MAX_RETRY_S, self._gap_s * places)


@dataclass(frozen=True, slots=True)
class Pass:
    """The size and the time of one pass, shared by its sequences."""

    batch: int
    rows: int
    draft_us: int
    target_us: int
    draft_us_by: Mapping[str, int] = field(default_factory=dict)  # drafter -> its part


class Outcome(NamedTuple):
    """What a pass has given a sequence."""

    path: tuple[int, ...] = ()  # accepted nodes of its draft
    tokens: tuple[int, ...] = ()  # committed
    finish: Finish | None = None
    error: PacelineError | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True)
class Scheduled:
    """One sequence's part in a pass; each phase of the step fills in its fields."""

    seq: Seq
    fed: list[int]  # pending tokens that go in
    scored: bool  # False: more of the prompt is still to come
    budget: int = 0  # nodes to draft
    forced_budget: int = 0  # nodes to draft besides, which the grammar forces
    draft: Draft = NO_DRAFT
    drafted: int = 0  # nodes of the draft before any was cut
    uncut: Draft = NO_DRAFT  # the draft before the controller cut it
    asked: tuple[str, ...] = ()  # drafters, once for each time
    readers: tuple[str, ...] = ()  # drafters that get the hidden states of this pass
    masks: Masks = FREE
    late: bool = False  # its masks are not there after the pass
    verdict: Verdict | None = None
    kept_nodes: tuple[int, ...] | None = None  # nodes whose cache rows stay; None: not committed

    @property
    def rows(self) -> int:
        return len(self.fed) + len(self.draft)

    def round(self, cost: Pass, outcome: Outcome) -> Round:
        """The record of this pass, before anything else is committed."""
        seq = self.seq
        return Round(
            seq.id,
            len(seq.tokens) - len(outcome.tokens),
            seq.spec.drafters,
            self.draft,
            outcome.path,
            outcome.tokens,
            self.budget,
            cost.batch,
            cost.rows,
            cost.draft_us,
            cost.target_us,
            outcome.finish,
            outcome.error,
            outcome.logprobs,
            self.drafted,
            cost.draft_us_by,
            self.uncut,
            self.asked,
            self.readers,
        )
