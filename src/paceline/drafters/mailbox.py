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
MIN_CHANCE: Final = 0.1  # of the next drafted token: below it, nothing is worth waiting for
MAX_MISSES: Final = 3  # waits in a row that brought nothing, before there are no more until a draft arrives
PROBE: Final = 2  # tokens that are verified of a draft while drafts are rejected
PROBE_EVERY: Final = 16  # tokens of the text between two such drafts


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a sequence waits for drafts, in seconds. The last two count from its first token on."""

    wait_s: float = 0.0  # after each pass; 0: never
    reading_s: float = 0.0  # until then for a client whose drafter still reads the prompt
    total_s: float = 300.0  # until then for anybody


NO_PATIENCE: Final = Patience()


@dataclass(frozen=True, slots=True)
class _Post:
    base: int  # tokens of the output before it
    tokens: tuple[int, ...]


@dataclass(slots=True)
class _Box:
    """The state of one sequence. `post` is replaced as a whole, by two threads."""

    vocab_size: int
    patience: Patience
    since: float  # the last pass ended
    begun: float | None = None  # the first one ended
    post: _Post | None = None
    answered: int = -1  # the position that the client's last post is for
    reading: bool = False  # its drafter still reads the prompt
    misses: int = 0
    missed_at: int = -1  # the position of the last one
    probed_at: int = -PROBE_EVERY  # the position of the last unlikely draft that was verified
    accepted: float = PRIOR[0]
    verified: float = PRIOR[1]

    @property
    def chance(self) -> float:
        return self.accepted / self.verified

    @property
    def useful(self) -> bool:
        return self.chance >= MIN_CHANCE

    @property
    def patient(self) -> bool:
        return self.patience.wait_s > 0 and self.misses < MAX_MISSES and self.useful

    @property
    def end_of_wait(self) -> float:
        patience, begun = self.patience, self.since if self.begun is None else self.begun
        end = self.since + patience.wait_s
        if self.reading:
            end = max(end, begun + patience.reading_s)
        return min(end, begun + patience.total_s)


class Mailbox(Drafter):
    """`open`, `post` and `close` may be called from any thread; a sequence without a box has no drafts.

    Clients may lie: what is learned about their drafts is the sequence's own, and drafts that are mostly
    rejected are verified no more, but for a small one now and then.
    """

    name = "mailbox"
    private = True

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._boxes: dict[str, _Box] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._boxes)

    def open(self, seq_id: str, vocab_size: int, patience: Patience = NO_PATIENCE) -> None:
        """Before the sequence is submitted. patience: for `held_until`."""
        self._boxes[seq_id] = _Box(vocab_size, patience, self._clock())

    def close(self, seq_id: str) -> None:
        self._boxes.pop(seq_id, None)

    def set_patience(self, seq_id: str, patience: Patience) -> None:
        """NO_PATIENCE while nobody is connected who could send a draft."""
        if (box := self._boxes.get(seq_id)) is not None:
            box.patience, box.misses = patience, 0

    def useful(self, seq_id: str) -> bool:
        """True while its drafts are accepted often enough to be worth sending."""
        box = self._boxes.get(seq_id)
        return box is not None and box.useful

    def read_on(self, seq_id: str) -> None:
        """The client's drafter still reads the prompt: until the next post, more patience is due."""
        if (box := self._boxes.get(seq_id)) is not None:
            box.reading, box.misses = True, 0

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
            box.post, box.answered, box.reading = post, base, False
            box.misses = 0 if post.tokens else box.misses
        return True

    def held_until(self, seq: Seq) -> float:
        """For `Seq.held_until`: the end of the wait for a draft; 0 if there is one, or none is worth it.

        The first token waits for nobody. What is left of a draft for an earlier position ends the wait only
        if it fills a pass: a client that has seen the last commit sends a draft from there on.
        """
        box, position = self._boxes.get(seq.id), len(seq.tokens) - seq.prompt_len
        if box is None or not box.patient or not 0 < position < seq.params.max_tokens - 1:
            return 0.0
        if box.answered == position or len(self._rest(box, seq, ())) >= seq.spec.max_draft:
            return 0.0
        end = box.end_of_wait
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
        tokens = self._rest(box, ask.seq, ask.after)[: self._verified_length(box, ask)]
        return Draft(tokens, None, (self.name,) * len(tokens), (box.chance,) * len(tokens))

    def _verified_length(self, box: _Box, ask: Ask) -> int:
        if box.useful:
            return ask.budget
        position = len(ask.seq.tokens) - ask.seq.prompt_len
        if position < box.probed_at + PROBE_EVERY:
            return 0
        box.probed_at = position
        return min(ask.budget, PROBE)

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
            box.begun = box.since if box.begun is None else box.begun
            own = [source == self.name for source in verdict.draft.sources]
            if any(own):
                accepted = sum(own[node] for node in verdict.path)
                rejected = accepted < sum(own)
                box.accepted = DECAY * box.accepted + accepted
                box.verified = DECAY * box.verified + accepted + rejected
