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
        self._full = False  # memory was short: nobody is let in before somebody leaves

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def add(self, seq: Seq) -> None:
        if any(seq.id == other.id for other in (*self._waiting, *self._running)):
            raise ValueError(f"a sequence {seq.id!r} is here already")
        self._waiting.append(seq)

    def admit(self) -> list[Seq]:
        """Moves sequences from waiting to running; returns the new ones."""
        new = []
        while self._waiting and len(self._running) < self._max_batch and not self._full:
            new.append(self._waiting.popleft())
            self._running.append(new[-1])
        return new

    def put_back(self, seq: Seq) -> None:
        """From running to the head of those who wait."""
        self._running.remove(seq)
        self._waiting.appendleft(seq)
        self._full = True

    def running(self) -> Sequence[Seq]:
        return tuple(self._running)

    def remove(self, seq_id: str) -> tuple[Seq, bool] | None:
        """Takes a sequence out; says whether it was running."""
        for queue in (self._running, self._waiting):
            for seq in list(queue):
                if seq.id == seq_id:
                    queue.remove(seq)
                    self._full = False
                    return seq, queue is self._running
        return None

    def piece(self, seq: Seq) -> list[int]:
        """The pending tokens for this pass.

        Prompts are cut at fixed places, so that a prompt's passes do not depend on its neighbours.
        """
        end = (seq.computed // self._chunk + 1) * self._chunk
        return seq.tokens[seq.computed : end]
