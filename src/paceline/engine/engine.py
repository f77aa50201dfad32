"""One round, top to bottom: who runs, how far to guess, guess, one pass, choose, accept, commit.

Plain decoding is a round with an empty draft; a prompt is a round with many pending tokens.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic, perf_counter_ns
from typing import Final

import torch

from paceline.config import EngineConfig
from paceline.constraints.draft_masks import masks, refused, words
from paceline.engine.drafting import Drafting
from paceline.engine.scheduled import Pass, Scheduled, a_round
from paceline.engine.scheduler import Scheduler
from paceline.engine.verify import judge, logprobs
from paceline.errors import (
    CacheFull,
    ConstraintError,
    PacelineError,
    PromptTooLong,
    SettingError,
    TimedOut,
    short,
)
from paceline.log import log_problem
from paceline.sampling import Floats, chooser
from paceline.types import (
    NO_DRAFT,
    Controller,
    Drafter,
    Feed,
    Finish,
    Round,
    Scores,
    Seq,
    Sink,
    Target,
    Verdict,
)

_NOTHING: Final = Scores(torch.empty(0, 0), ())

log = logging.getLogger("paceline")


class Engine:
    def __init__(
        self,
        target: Target,
        drafters: Mapping[str, Drafter],
        controller: Controller,
        sinks: Sequence[Sink] = (),
        config: EngineConfig | None = None,
        eos: frozenset[int] = frozenset(),
        clock: Callable[[], float] = monotonic,
    ) -> None:
        config = config or EngineConfig()
        self.target = target
        self.controller = controller
        self._drafting = Drafting(target, drafters, controller)
        self._sinks = tuple(sinks)
        self._eos = eos
        self._scheduler = _scheduler(config, target)
        self._clock = clock
        self._cancelled: list[str] = []
        self._in_step = False
        self._walks = ThreadPoolExecutor(1, "paceline-grammar")

    def listen(self, sink: Sink) -> None:
        """Tells one more sink of every round from now on."""
        self._sinks = (*self._sinks, sink)

    def replace_drafter(self, drafter: Drafter) -> None:
        """Between two passes: what runs goes on with a drafter that knows nothing of it yet."""
        self._drafting.replace_drafter(drafter, self._scheduler.running())

    @property
    def busy(self) -> bool:
        return len(self._scheduler) > 0

    def _check_tokens(self, setting: str, tokens: Sequence[int]) -> None:
        size = self.target.vocab_size
        if strange := [token for token in tokens if not 0 <= token < size]:
            raise SettingError(f"{setting}={short(strange[0])} is not usable: expected tokens below {size}")

    def submit(self, seq: Seq, slots: int = 1) -> None:
        """slots: outputs of its request that must find room together; 0: admitted with an earlier one."""
        limit = self.target.max_context
        if len(seq.tokens) >= limit:
            raise PromptTooLong(
                f"the prompt has {len(seq.tokens)} tokens and the model's context holds {limit}, "
                "one of them for the answer: shorten the prompt"
            )
        self._check_tokens("prompt", seq.tokens)
        self._check_tokens("logit_bias", [token for token, _ in seq.params.logit_bias])
        self._check_tokens("stop_tokens", seq.params.stop_tokens)
        if seq.cursor is not None and seq.cursor.finished:
            raise ConstraintError("the constraint allows nothing but an empty answer")
        self._drafting.drafter(seq)  # an unknown name is refused here, not in the middle of a pass
        chooser(seq.params)  # likewise what must be built for it is built now
        self._scheduler.add(seq, slots)

    def give_up(self, error: PacelineError) -> list[Round]:
        """Ends every sequence with this error, whatever state a pass has left it in."""
        ends = [self._fail(seq, error, opened=True) for seq in self._scheduler.running()]
        while self._scheduler.waiting:
            ends += [self._fail(seq, error, opened=False) for seq in self._scheduler.admit()]
        return ends

    @property
    def running(self) -> int:
        return len(self._scheduler) - self._scheduler.waiting

    @property
    def waiting(self) -> int:
        return self._scheduler.waiting

    def cancel(self, seq_id: str) -> None:
        """Ends a sequence; one that is in a pass at this moment ends right after it."""
        self._cancelled.append(seq_id)
        if not self._in_step:
            self._carry_out_cancels()

    def _carry_out_cancels(self) -> None:
        while self._cancelled:
            found = self._scheduler.remove(self._cancelled.pop())
            if found is not None:
                seq, running = found
                self._leave(seq, "cancelled", running)

    def step(self) -> list[Round]:
        """One pass of the target for every running sequence."""
        self._in_step = True
        try:
            return self._step()
        finally:
            self._in_step = False
            self._carry_out_cancels()

    def _step(self) -> list[Round]:
        failed = self._expire() + self._admit()
        turns = self._turns()
        self._drafting.plan(turns)
        started = perf_counter_ns()
        by_drafter = self._drafting.draft(turns)
        drafted = perf_counter_ns()
        with self._constrained(turns):
            turns, scores, ended = self._forward(turns)
            logits = scores.logits.numpy(force=True)
        cost = Pass(
            len(turns),
            sum(t.rows for t in turns),
            (drafted - started) // 1000,
            (perf_counter_ns() - drafted) // 1000,
            by_drafter,
        )
        rounds = [
            self._settle(t, logits[start:], cost) for t, start in zip(turns, scores.starts, strict=True)
        ]
        self._drafting.observe(turns, scores)
        self.controller.learn(rounds)
        for turn, r in zip(turns, rounds, strict=True):
            self._report(turn.seq, r)
        return failed + ended + rounds

    def _expire(self) -> list[Round]:
        running = {seq.id for seq in self._scheduler.running()}
        return [
            self._fail(seq, TimedOut("the request's time is up"), opened=seq.id in running)
            for seq in self._scheduler.expired(self._clock())
        ]

    def _admit(self) -> list[Round]:
        """Opens what was waiting; a sequence that cannot be opened ends here, with its error."""
        failed = []
        for seq in self._scheduler.admit():
            try:
                seq.computed = seq.cached = self.target.open(seq)
            except PacelineError as error:
                failed.append(self._fail(seq, error, opened=False))
            else:
                self._drafting.begin(seq)
        return failed

    def _turns(self) -> list[Scheduled]:
        return [
            Scheduled(seq, fed, scored=seq.computed + len(fed) == len(seq.tokens))
            for seq, fed in self._scheduler.pieces()
        ]

    def _forward(self, turns: list[Scheduled]) -> tuple[list[Scheduled], Scores, list[Round]]:
        """The pass, for as many sequences as the cache can hold.

        Where it is full, guesses go first, then the last to come go back to waiting. One that does not even
        fit alone ends with the error.
        """
        while turns:
            feeds = [Feed(t.seq.id, t.fed, t.draft, t.scored) for t in turns]
            try:
                return turns, self.target.forward(feeds, self._drafting.taps(turns)), []
            except CacheFull as error:
                if any(len(t.draft) for t in turns):
                    for turn in turns:
                        turn.draft = NO_DRAFT
                elif len(turns) == 1:
                    return [], _NOTHING, [self._fail(turns[0].seq, error)]
                else:
                    self._preempt(turns.pop().seq)
        return [], _NOTHING, []

    def _preempt(self, seq: Seq) -> None:
        self._drafting.end(seq)
        self.target.close(seq.id)
        seq.computed = 0
        self._scheduler.put_back(seq)

    def _fail(self, seq: Seq, error: PacelineError, opened: bool = True) -> Round:
        r = a_round(Scheduled(seq, [], False), Pass(1, 0, 0, 0), finish="error", error=error)
        if opened:
            self._report(seq, r)
        else:
            self._scheduler.remove(seq.id)
            self._leave(seq, "error", running=False)
        return r

    @contextmanager
    def _constrained(self, turns: Sequence[Scheduled]) -> Iterator[None]:
        """Masks are found beside the pass. Should it drop a draft, the draft's first mask is still right."""
        bound = [(t, t.seq.cursor) for t in turns if t.seq.cursor is not None and t.scored]
        walks = [
            (turn, self._walks.submit(masks, cursor, turn.draft, words(self.target.vocab_size)))
            for turn, cursor in bound
        ]
        yield
        for turn, walk in walks:
            turn.masks = walk.result()

    def _settle(self, turn: Scheduled, rows: Floats, cost: Pass) -> Round:
        """What goes wrong here ends this output and no other."""
        try:
            return self._commit(turn, rows, cost)
        except PacelineError as error:
            return a_round(turn, cost, finish="error", error=error)
        except Exception as problem:
            log_problem(log, f"request {turn.seq.id} failed", problem)
            return a_round(turn, cost, finish="error", error=PacelineError(f"internal error: {problem!r}"))

    def _commit(self, turn: Scheduled, rows: Floats, cost: Pass) -> Round:
        """Judges a draft and commits what is kept."""
        seq, start = turn.seq, len(turn.seq.tokens)
        held = seq.computed + len(turn.fed)
        if not turn.scored:
            self.target.keep(seq.id, held)
            seq.computed, turn.kept = held, ()
            return a_round(turn, cost)
        verdict = judge(seq, turn.draft, rows, turn.masks)
        scored = logprobs(seq, verdict, turn.draft, rows)
        new = (*(turn.draft.tokens[i] for i in verdict.path), verdict.token)
        finish = self._append(seq, new)
        kept = len(seq.tokens) - start
        rows_kept = verdict.path[: kept - 1]  # the last token stays pending, as in plain decoding
        self.target.keep(seq.id, held, rows_kept)
        seq.computed, turn.kept = held + len(rows_kept), rows_kept
        turn.verdict = Verdict(rows_kept, seq.tokens[-1], turn.draft)
        return a_round(turn, cost, verdict.path[:kept], new[:kept], finish, logprobs=scored[:kept])

    def _append(self, seq: Seq, new: Sequence[int]) -> Finish | None:
        """Commits tokens up to the first one that ends the output."""
        for token in new:
            seq.tokens.append(token)
            if seq.cursor is not None and not seq.cursor.advance(token):
                raise refused(token)
            if (reason := self._ends(seq, token)) is not None:
                return reason
        return None

    def _ends(self, seq: Seq, token: int) -> Finish | None:
        ends = token in seq.params.stop_tokens or (token in self._eos and not seq.params.ignore_eos)
        ends = ends or (seq.cursor is not None and seq.cursor.finished)
        if (seq.stopped_by is not None and seq.stopped_by(token)) or ends:
            return "stop"
        full = len(seq.tokens) >= self.target.max_context
        return "length" if full or len(seq.tokens) - seq.prompt_len >= seq.params.max_tokens else None

    def _report(self, seq: Seq, r: Round) -> None:
        for sink in self._sinks:
            sink.round(r)
        if r.finish is not None:
            self._scheduler.remove(seq.id)
            self._leave(seq, r.finish, running=True)

    def _leave(self, seq: Seq, reason: Finish, running: bool) -> None:
        if running:
            self._drafting.end(seq)
            self.target.close(seq.id)
        for sink in self._sinks:
            sink.finish(seq, reason)


def _scheduler(config: EngineConfig, target: Target) -> Scheduler:
    """Prompts may be cut anywhere only where the cut does not show in the bits of the rows."""
    chunk = config.prefill_chunk
    beside = min(config.prefill_beside, chunk) if target.invariant_rows > chunk else chunk
    return Scheduler(config.max_batch, chunk, beside, config.max_waiting)
