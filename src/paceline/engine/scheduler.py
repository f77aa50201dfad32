"""Continuous batching with chunked prefill: which sequences run, and which tokens go into a pass."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.constraints.draft_masks import FREE, Masks
from paceline.errors import Busy, PacelineError
from paceline.types import NO_DRAFT, Draft, Finish, Round, Seq, TokenLogprob, Verdict


class Scheduler:
    """Admits sequences and assigns the rows of a pass.

    Of the waiting ones the highest priority comes first, then the one whose tenant has the fewest running,
    then the oldest. Every decoding sequence is in every pass; prompts fill the rows left for prefill, in the
    order of their admission.
    """

    def __init__(
        self, max_batch: int, prefill_chunk: int, prefill_beside: int = 0, max_waiting: int = 0
    ) -> None:
        self._max_batch = max_batch
        self._chunk = prefill_chunk
        self._beside = prefill_beside or prefill_chunk
        self._max_waiting = max_waiting  # 0: any number
        self._waiting: list[Seq] = []
        self._running: list[Seq] = []
        self._full = False  # the cache was full: none is admitted before another leaves

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, seq: Seq, slots: int = 1) -> None:
        if any(seq.id == other.id for other in (*self._waiting, *self._running)):
            raise ValueError(f"a sequence {seq.id!r} is here already")
        if not self._room(slots):
            waiting = len(self._waiting)
            raise Busy(f"{waiting} requests wait already: there is no room for {slots} more; try again later")
        self._waiting.append(seq)

    def _room(self, slots: int) -> bool:
        """True if all outputs of a request fit in the queue; one that never could is admitted alone."""
        if not self._max_waiting or not slots:
            return True
        free = self._max_batch + self._max_waiting - len(self)
        return len(self._waiting) < self._max_waiting and (slots <= free or not len(self))

    def admit(self) -> list[Seq]:
        """Moves sequences from waiting to running; returns the new ones."""
        new: list[Seq] = []
        while self._waiting and len(self._running) < self._max_batch and not self._full:
            seq = self._next()
            self._waiting.remove(seq)
            self._running.append(seq)
            new.append(seq)
        return new

    def _next(self) -> Seq:
        at_work = Counter(seq.tenant for seq in self._running)
        return min(self._waiting, key=lambda seq: (-seq.priority, at_work[seq.tenant]))

    def put_back(self, seq: Seq) -> None:
        """From running to the head of the waiting queue."""
        self._running.remove(seq)
        self._waiting.insert(0, seq)
        self._full = True

    def running(self) -> Sequence[Seq]:
        return tuple(self._running)

    def expired(self, now: float) -> list[Seq]:
        """Sequences past their deadline."""
        every = (*self._running, *self._waiting)
        return [seq for seq in every if seq.deadline is not None and now >= seq.deadline]

    def remove(self, seq_id: str) -> tuple[Seq, bool] | None:
        """Removes a sequence; returns it and whether it was running."""
        for queue in (self._running, self._waiting):
            for seq in list(queue):
                if seq.id == seq_id:
                    queue.remove(seq)
                    self._full = False
                    return seq, queue is self._running
        return None

    def pieces(self) -> list[tuple[Seq, list[int]]]:
        """The pending tokens of each sequence that has a part in this pass.

        Prompts are cut at multiples of a fixed number, shorter ones while others wait for their next token.
        """
        decoding = [seq for seq in self._running if len(seq.tokens) - seq.computed == 1]
        reading = [seq for seq in self._running if len(seq.tokens) - seq.computed > 1]
        rows = chunk = self._beside if decoding else self._chunk
        parts = {seq.id: seq.tokens[seq.computed :] for seq in decoding}
        for seq in reading:
            if rows <= 0:
                break
            end = (seq.computed // chunk + 1) * chunk
            parts[seq.id] = seq.tokens[seq.computed : end]
            rows -= len(parts[seq.id])
        return [(seq, parts[seq.id]) for seq in self._running if seq.id in parts]


@dataclass(frozen=True, slots=True)
class Pass:
    """The size and the time of one pass, shared by its sequences."""

    batch: int
    rows: int
    draft_us: int
    target_us: int
    draft_us_by: Mapping[str, int] = field(default_factory=dict)  # drafter -> its part


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
    masks: Masks = FREE
    verdict: Verdict | None = None
    kept_nodes: tuple[int, ...] | None = None  # nodes whose cache rows stay; None: not committed

    @property
    def rows(self) -> int:
        return len(self.fed) + len(self.draft)

    def round(
        self,
        cost: Pass,
        path: tuple[int, ...] = (),
        tokens: tuple[int, ...] = (),
        finish: Finish | None = None,
        error: PacelineError | None = None,
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> Round:
        """The record of this pass, after these tokens were committed."""
        return Round(
            request=self.seq.id,
            start=len(self.seq.tokens) - len(tokens),
            drafters=self.seq.spec.drafters,
            draft=self.draft,
            path=path,
            tokens=tokens,
            budget=self.budget,
            batch=cost.batch,
            rows=cost.rows,
            draft_us=cost.draft_us,
            target_us=cost.target_us,
            finish=finish,
            error=error,
            logprobs=logprobs,
            drafted=self.drafted,
            draft_us_by=cost.draft_us_by,
        )
