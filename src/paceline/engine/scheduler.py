"""Who runs next."""

from collections import deque
from collections.abc import Sequence

from paceline.types import Seq


class Scheduler:
    """First come, first served, up to a number of sequences in one pass."""

    def __init__(self, max_batch: int, prefill_chunk: int) -> None:
        self._max_batch = max_batch
        self._chunk = prefill_chunk
        self._waiting: deque[Seq] = deque()
        self._running: list[Seq] = []

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def add(self, seq: Seq) -> None:
        self._waiting.append(seq)

    def admit(self) -> list[Seq]:
        """Moves sequences from waiting to running; returns the new ones."""
        new = []
        while self._waiting and len(self._running) < self._max_batch:
            new.append(self._waiting.popleft())
            self._running.append(new[-1])
        return new

    def running(self) -> Sequence[Seq]:
        return tuple(self._running)

    def remove(self, seq_id: str) -> tuple[Seq, bool] | None:
        """Takes a sequence out; says whether it was running."""
        for queue in (self._running, self._waiting):
            for seq in queue:
                if seq.id == seq_id:
                    queue.remove(seq)
                    return seq, queue is self._running
        return None

    def piece(self, seq: Seq) -> list[int]:
        """The pending tokens for this pass.

        Prompts are cut at fixed places, so that a prompt's passes do not depend on its neighbours.
        """
        end = (seq.computed // self._chunk + 1) * self._chunk
        return seq.tokens[seq.computed : end]
