"""Drafts that arrive from outside: another device posts them, and the next pass takes what still fits.

Post order and delay are the network's. A post is a guess of the text from some position on; text committed
meanwhile is compared with it, and only a post that agrees is used, from where the text is now.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Final

from paceline.types import NO_DRAFT, Ask, Draft, Drafter, Scores, Seq, Verdict

DECAY: Final = 0.95  # weight of earlier passes in the acceptance of one sequence
PRIOR: Final = (2.0, 3.0)  # accepted of verified tokens, before any evidence
MIN_CHANCE: Final = 0.15  # of the next drafted token: below it, nothing is worth waiting for
MAX_MISSES: Final = 3  # waits in a row that brought nothing, before there are no more until a draft arrives


@dataclass(frozen=True, slots=True)
class _Post:
    base: int  # tokens of the output before it
    tokens: tuple[int, ...]


@dataclass(slots=True)
class _Box:
    """The state of one sequence. `post` is replaced as a whole, by two threads."""

    vocab_size: int
    wait_s: float  # for a draft, after each pass
    post: _Post | None = None
    since: float = 0.0  # the last pass ended
    misses: int = 0
    missed_at: int = -1  # the position of the last one
    accepted: float = PRIOR[0]
    verified: float = PRIOR[1]

    @property
    def chance(self) -> float:
        return self.accepted / self.verified

    @property
    def patient(self) -> bool:
        return self.wait_s > 0 and self.misses < MAX_MISSES and self.chance >= MIN_CHANCE


class Mailbox(Drafter):
    """`open`, `post` and `close` may be called from any thread; a sequence without a box has no drafts."""

    name = "mailbox"
    fingerprint = "1"  # raised where its scores change their meaning

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._boxes: dict[str, _Box] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._boxes)

    def open(self, seq_id: str, vocab_size: int, wait_s: float = 0.0) -> None:
        """Before the sequence is submitted. wait_s: for `held_until`."""
        self._boxes[seq_id] = _Box(vocab_size, wait_s, since=self._clock())

    def close(self, seq_id: str) -> None:
        self._boxes.pop(seq_id, None)

    def set_wait(self, seq_id: str, wait_s: float) -> None:
        """Another patience: none while nobody is connected who could send a draft."""
        if (box := self._boxes.get(seq_id)) is not None:
            box.wait_s, box.misses = wait_s, 0

    def useful(self, seq_id: str) -> bool:
        """True while its drafts are accepted often enough to be worth sending."""
        box = self._boxes.get(seq_id)
        return box is not None and box.chance >= MIN_CHANCE

    def post(self, seq_id: str, base: int, tokens: Sequence[int]) -> bool:
        """Replaces the sequence's draft. base: tokens of the output before it. False: it is unknown.

        A draft ends before its first token outside the vocabulary. An empty one says that none will come for
        this position.
        """
        box = self._boxes.get(seq_id)
        if box is None:
            return False
        strange = (i for i, token in enumerate(tokens) if not 0 <= token < box.vocab_size)
        post = _Post(base, tuple(tokens[: next(strange, len(tokens))]))
        with self._lock:
            box.post = post
            box.misses = 0 if post.tokens else box.misses
        return True

    def held_until(self, seq: Seq) -> float:
        """For `Seq.held_until`: the end of the wait for a draft; 0 if there is one, or none is worth it."""
        box = self._boxes.get(seq.id)
        if box is None or not box.patient:
            return 0.0
        post, position = box.post, len(seq.tokens) - seq.prompt_len
        if post is not None and (post.base == position or self._rest(box, seq, ())):
            return 0.0
        end = box.since + box.wait_s
        if self._clock() >= end and box.missed_at != position:
            box.misses, box.missed_at = box.misses + 1, position
        return end

    def begin(self, seq: Seq) -> None:
        if (box := self._boxes.get(seq.id)) is not None:
            box.since = self._clock()

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: Ask) -> Draft:
        box = self._boxes.get(ask.seq.id)
        if box is None or ask.budget < 1:
            return NO_DRAFT
        tokens = self._rest(box, ask.seq, ask.after)[: ask.budget]
        return Draft(tokens, None, (self.name,) * len(tokens), (box.chance,) * len(tokens))

    def _rest(self, box: _Box, seq: Seq, after: tuple[int, ...]) -> tuple[int, ...]:
        """The part of the post beyond the text and `after`; a post that the text contradicts is dropped."""
        with self._lock:
            post = box.post
            if post is None:
                return ()
            since = seq.tokens[seq.prompt_len + post.base :]
            beyond = len(seq.tokens) - seq.prompt_len - post.base
            if beyond < 0 or list(post.tokens[:beyond]) != since:
                box.post = None
                return ()
            if beyond:
                box.post = post = _Post(post.base + beyond, post.tokens[beyond:])
        return post.tokens[len(after) :] if post.tokens[: len(after)] == after else ()

    def observe(self, seqs: Sequence[Seq], verdicts: Sequence[Verdict], scores: Scores) -> None:
        for seq, verdict in zip(seqs, verdicts, strict=True):
            if (box := self._boxes.get(seq.id)) is None:
                continue
            box.since = self._clock()
            own = [source == self.name for source in verdict.draft.sources]
            if any(own):
                accepted = sum(own[node] for node in verdict.path)
                rejected = accepted < sum(own)
                box.accepted = DECAY * box.accepted + accepted
                box.verified = DECAY * box.verified + accepted + rejected
