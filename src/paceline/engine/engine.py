"""The draft-verify-accept loop: schedule, plan, draft, one pass of the target, choose, accept, commit.

Plain decoding is a round with an empty draft; prefill is a round with many pending tokens.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from time import monotonic, perf_counter_ns
from typing import Final

import torch

from paceline.config import EngineConfig
from paceline.constraints.draft_masks import FREE, Masks, masks, rejected, without_ends, words
from paceline.constraints.mask_batch import fill_batch
from paceline.engine.drafting import Drafting
from paceline.engine.masking import Masking
from paceline.engine.scheduler import Outcome, Pass, RowCost, Scheduled, Scheduler
from paceline.engine.verify import logprobs, sampler_of, verify, verify_choices
from paceline.errors import CacheFull, ConstraintError, PacelineError, PromptTooLong, SettingError, TimedOut
from paceline.log import log_error
from paceline.sampling import Floats, chooser
from paceline.types import (
    NO_DRAFT,
    Controller,
    Draft,
    Drafter,
    Feed,
    Finish,
    Round,
    Scores,
    Seq,
    Sink,
    Target,
    TokenLogprob,
    Verdict,
)

SLOW_MASKS: Final = 4  # CPU time of the slow masks of one output, in times that of compiling its grammar
MANY_MASKS: Final = 8  # of sequences: fewer are sooner ready one by one than in threads that have to wake up
INSTANT_NS: Final = 20_000  # a wait this short was none: the pass had ended
MAX_AWAY_NS: Final = 2_000_000  # between two steps, for passes to be launched ahead
NOT_CHOSEN: Final = -1  # a token that the pass before is still choosing
_NO_SCORES: Final = Scores(torch.empty(0, 0), ())

log = logging.getLogger("paceline")


class Engine:
    """Runs any number of sequences together. Not thread-safe: one thread submits, steps and cancels."""

    def __init__(
        self,
        target: Target,
        drafters: Mapping[str, Drafter],
        controller: Controller,
        sinks: Sequence[Sink] = (),
        config: EngineConfig | None = None,
        eos: frozenset[int] = frozenset(),
        clock: Callable[[], float] = monotonic,
        timer: Callable[[], int] = perf_counter_ns,
        row_cost: RowCost | None = None,
    ) -> None:
        """clock: seconds, for deadlines. timer: nanoseconds, for the time of drafts and passes.

        row_cost: milliseconds that a row of a prompt adds to a pass, by the tokens before it.
        """
        self.config = config = config or EngineConfig()
        self.target = target
        self.controller = controller
        self._timer = timer
        self._drafting = Drafting(target, drafters, controller, timer)
        self._sinks = tuple(sinks)
        self._eos = eos
        self._scheduler = _scheduler(config, target, clock, row_cost)
        self._clock = clock
        self._cancelled: list[str] = []
        self._in_step = False
        self._masking = Masking(SLOW_MASKS * config.max_grammar_s)
        self._restoring: dict[str, Seq] = {}  # admitted, but no part of a pass before their prefix is loaded
        self._unreported: list[tuple[Seq, Round]] = []  # of the last pass
        self._ahead: _Launched | Exception | None = None  # the next pass, or why there is none
        self._returned_ns = 0  # from the last step

    def listen(self, sink: Sink) -> None:
        """Adds a sink for every round from now on."""
        self._report_last()
        self._sinks = (*self._sinks, sink)

    def replace_drafter(self, drafter: Drafter) -> None:
        """Between two passes: running sequences continue with a drafter that has not seen them."""
        self._report_last()
        begun = [seq for seq in self._scheduler.running() if seq.id not in self._restoring]
        self._drafting.replace_drafter(drafter, begun)

    @property
    def busy(self) -> bool:
        return len(self._scheduler) > 0

    def _check_tokens(self, setting: str, tokens: Sequence[int]) -> None:
        size = self.target.vocab_size
        if strange := [token for token in tokens if not 0 <= token < size]:
            raise SettingError(setting, strange[0], f"tokens below {size}")

    def submit(self, seq: Seq, slots: int = 1) -> None:
        """slots: outputs of its request that must find room together; 0: admitted with an earlier one."""
        seq.params = seq.params.seeded()
        eos = frozenset[int]() if seq.params.ignore_eos else self._eos
        seq.end_tokens = eos.union(seq.params.stop_tokens)
        limit = self.target.max_context
        if len(seq.tokens) >= limit:
            raise PromptTooLong.of(str(len(seq.tokens)), limit, self.config.max_model_len > 0)
        self._check_tokens("prompt", seq.tokens)
        self._check_tokens("logit_bias", [token for token, _ in seq.params.logit_bias])
        self._check_tokens("stop_tokens", seq.params.stop_tokens)
        if seq.cursor is not None and seq.cursor.finished:
            raise ConstraintError("the constraint allows nothing but an empty answer")
        self._drafting.drafter(seq)  # an unknown name fails here, not in the middle of a pass
        chooser(seq.params)  # builds the native chooser now, if there is none yet
        self._scheduler.add(seq, slots)

    def give_up(self, error: PacelineError) -> list[Round]:
        """Ends every sequence with this error, whatever state the last pass left it in."""
        self._ahead = None
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
        """Ends a sequence; if it is in a pass at this moment, right after the pass."""
        self._cancelled.append(seq_id)
        if not self._in_step:
            self._carry_out_cancels()

    def _carry_out_cancels(self) -> None:
        while self._cancelled:
            removed = self._scheduler.remove(self._cancelled.pop())
            if removed is not None:
                seq, running = removed
                self._leave(seq, "cancelled", running)
        if not self.busy:  # nobody is left in the next pass, or to learn of its failure
            self._ahead = None

    def step(self) -> list[Round]:
        """One pass of the target for every running sequence."""
        self._in_step = True
        try:
            return self._step()
        finally:
            self._in_step = False
            self._carry_out_cancels()

    def _step(self) -> list[Round]:
        """Waits for the pass on its way, or for a new one, and commits what it chose.

        Where passes run beside the host, the next one is launched before this one's rounds are made and
        reported, if nothing has to happen between the two.
        """
        away_ns = self._timer() - self._returned_ns
        current, rounds = self._take_launched()
        self._report_last()
        if current.scores.running:
            self._drafting.prepare(current.scheduled)
        following = self._prepare(current, away_ns)
        rows, target_us = self._wait(current, away_ns)
        outcomes = [
            (s, self._settle(s, rows, start))
            for s, start in zip(current.scheduled, current.scores.starts, strict=True)
            if not self._dropped(s)
        ]
        self._drafting.observe(current.scheduled, current.scores)
        if following and len(outcomes) == len(following) and not any(o.finish for _, o in outcomes):
            self._launch_ahead(following)
        cost = current.cost(target_us)
        self._scheduler.took(current.scheduled, target_us / 1e6)
        self._unreported = [(s.seq, s.round(cost, outcome)) for s, outcome in outcomes]
        results = [r for _, r in self._unreported]
        if not current.scores.running or any(r.finish for r in results):
            self._report_last()
        self._returned_ns = self._timer()
        return rounds + results

    def _take_launched(self) -> tuple["_Launched", list[Round]]:
        """The pass on its way, or a new one; and the rounds of sequences that end before it."""
        launched, self._ahead = self._ahead, None
        if isinstance(launched, Exception):
            raise launched
        if launched is not None:
            return launched, launched.ended
        failed = self._expire() + self._admit()
        self._restore()
        scheduled, settled = self._schedule()
        if not scheduled and not settled:
            self._masking.wait()
        self._drafting.plan(scheduled, self._scheduler.waiting)
        launched = self._launch(scheduled)
        return launched, failed + settled + launched.ended

    def _launch(self, scheduled: list[Scheduled], ahead: bool = False) -> "_Launched":
        """Drafts, begins masks, and starts a pass. ahead: raises CacheFull instead of making room."""
        started = self._timer()
        by_drafter, read_us = self._drafting.draft(scheduled)
        drafted = self._timer()
        masks_of, masked = self._begin_masks(scheduled)
        try:
            if ahead:
                scores, ended = self._forward(scheduled, masks_of), list[Round]()
            else:
                scheduled, scores, ended = self._fitting_forward(scheduled, masks_of)
        except BaseException:
            self._masking.end_pass()
            raise
        return _Launched(scheduled, scores, ended, masked, started, drafted, by_drafter, read_us)

    def _wait(self, launched: "_Launched", away_ns: int) -> tuple["_RowsOnHost", int]:
        """The output of a pass, its masks, and its microseconds.

        away_ns: before this step. It is no part of a pass launched earlier that has ended meanwhile.
        """
        asked = self._timer()
        try:
            rows = _RowsOnHost(launched.scores)
            for s in launched.masked:
                result = self._masking.result(s.seq.id)
                s.late, s.masks = result is None, result or FREE
        finally:
            self._masking.end_pass()
        now = self._timer()
        ended_before = now - asked < INSTANT_NS and launched.drafted < self._returned_ns
        return rows, (now - launched.drafted - (away_ns if ended_before else 0)) // 1000

    def _prepare(self, current: "_Launched", away_ns: int) -> list[Scheduled]:
        """Plans the pass after this one while this one runs, if it will need nobody else; else nothing.

        Every sequence decodes and has no masks, none arrives, is cancelled or late. Not for a caller that
        took long between the last two steps: its time would count as the pass's.
        """
        if not current.scores.running or away_ns > MAX_AWAY_NS or self._cancelled or self._scheduler.waiting:
            return []
        running = self._scheduler.running()
        if len(running) != len(current.scheduled) or any(_has_masks(seq) for seq in running):
            return []
        if any(seq.held_until is not None for seq in running):
            return []
        if not all(s.scored for s in current.scheduled) or self._scheduler.expired(self._clock()):
            return []
        following = [Scheduled(s.seq, [NOT_CHOSEN], True) for s in current.scheduled]
        self._drafting.plan(following)
        return following

    def _launch_ahead(self, following: list[Scheduled]) -> None:
        """A failure is the next step's: the rounds of this one are not lost.

        So is a full cache: sequences are preempted or fail only after the rounds of this step.
        """
        try:
            for s in following:
                s.fed = s.seq.tokens[-1:]
            self._ahead = self._launch(following, ahead=True)
        except CacheFull:
            self._ahead = None
        except Exception as problem:
            self._ahead = problem

    def _dropped(self, s: Scheduled) -> bool:
        """True for a sequence that is in this pass for nothing.

        One whose masks are late loses its rows; one that has left while the pass ran has none any more.
        """
        if s.seq.id not in self._scheduler:
            return True
        if s.late:
            self.target.keep(s.seq.id, s.seq.computed)
        return s.late

    def _expire(self) -> list[Round]:
        expired = self._scheduler.expired(self._clock())
        if not expired:
            return []
        running = {seq.id for seq in self._scheduler.running()}
        return [
            self._fail(seq, TimedOut("the request's time is up"), opened=seq.id in running) for seq in expired
        ]

    def _admit(self) -> list[Round]:
        """Opens waiting sequences in the target; one that cannot be opened ends here, with its error."""
        failed = []
        if (displaced := self._scheduler.displace()) is not None:
            self._suspend(displaced)
        for seq in self._scheduler.admit():
            try:
                seq.computed = self.target.open(seq)
            except PacelineError as error:
                failed.append(self._fail(seq, error, opened=False))
            else:
                self._restoring[seq.id] = seq
        return failed

    def _restore(self) -> None:
        """Loads prefixes from slower memory: beside others, for as long as prompts may take in a pass."""
        limit_ns, started = self.config.prefill_beside_ms * 1_000_000, self._timer()
        for seq in tuple(self._restoring.values()):
            alone = len(self._restoring) == self.running
            left_ns = max(0, limit_ns - (self._timer() - started))
            found = seq.computed
            seq.computed, more = self.target.restore(seq.id, inf if alone or not limit_ns else left_ns / 1e9)
            seq.cached_on_disk += 0 if seq.preemptions else seq.computed - found
            if not more:
                del self._restoring[seq.id]
                # A preempted one finds rows of its own: they were computed for it, and are no hit.
                seq.cached = min(seq.cached, seq.computed) if seq.preemptions else seq.computed
                seq.cached_on_disk = min(seq.cached_on_disk, seq.cached)
                self._drafting.begin(seq)

    def _schedule(self) -> tuple[list[Scheduled], list[Round]]:
        """Sequences with slow masks are in a pass only once their next mask is ready.

        Returns also the ends of those whose grammar had to be waited for, to know that they end or why.
        """
        scheduled, ends = [], []
        for seq, fed in self._scheduler.pieces(self._held):
            scored = not seq.prefill and seq.computed + len(fed) == len(seq.tokens)
            ready = self._masking.ready(seq.id) if scored else None
            full = scored and self._full(seq)
            if scored and ready is None and (full or self._masking.slow(seq.id)):
                self._masking.ahead(seq.id, partial(self._masks, seq, NO_DRAFT))
            elif full or (ready is not None and seq.cursor is not None and seq.cursor.finished):
                finish: Finish = "stop" if seq.cursor is not None and seq.cursor.finished else "length"
                ends.append(Scheduled(seq, [], False).round(Pass(1, 0, 0, 0), Outcome(finish=finish)))
                self._report(seq, ends[-1])
            else:
                scheduled.append(Scheduled(seq, fed, scored, masks=FREE if ready is None else ready))
        return scheduled, ends

    def _held(self, seq: Seq) -> bool:
        return seq.id in self._restoring or self._masking.held(seq.id) or self._held_s(seq) > 0

    def _held_s(self, seq: Seq) -> float:
        """Seconds for which it waits for a draft."""
        if seq.held_until is None or seq.computed + 1 < len(seq.tokens):
            return 0.0
        return seq.held_until() - self._clock()

    @property
    def idle_s(self) -> float:
        """Seconds for which all running sequences wait for drafts, unless one arrives; 0: some do not."""
        if self._ahead is not None or self._restoring or self._scheduler.waiting:
            return 0.0
        return max(0.0, min((self._held_s(seq) for seq in self._scheduler.running()), default=0.0))

    def _forward(self, scheduled: Sequence[Scheduled], masks_of: Mapping[str, Callable[[], Masks]]) -> Scores:
        feeds = [
            Feed(s.seq.id, s.fed, s.draft, s.scored, sampler_of(s.seq, masks_of.get(s.seq.id)))
            for s in scheduled
        ]
        return self.target.forward(feeds, self._drafting.taps(scheduled))

    def _fitting_forward(
        self, scheduled: list[Scheduled], masks_of: Mapping[str, Callable[[], Masks]]
    ) -> tuple[list[Scheduled], Scores, list[Round]]:
        """One pass, for as many sequences as the cache can hold.

        Where it is full, drafts are dropped first, then sequences are preempted, whether they have a part in
        this pass or only hold a cached prefix. One that does not fit even alone ends with the error.
        """
        while scheduled:
            try:
                return scheduled, self._forward(scheduled, masks_of), []
            except CacheFull as error:
                if any(len(s.draft) for s in scheduled):
                    for s in scheduled:
                        s.draft = NO_DRAFT
                elif self.running == 1 and _awaits_mask(
                    scheduled[0]
                ):  # it may have ended: the mask will tell
                    self._masking.set_slow(scheduled[0].seq.id)
                    return [], _NO_SCORES, []
                elif self.running == 1:
                    return [], _NO_SCORES, [self._fail(scheduled[0].seq, error)]
                else:
                    preempted = self._preempt()
                    scheduled = [s for s in scheduled if s.seq is not preempted]
        return [], _NO_SCORES, []

    def _preempt(self) -> Seq:
        seq = self._scheduler.preempt()
        self._suspend(seq)
        return seq

    def _suspend(self, seq: Seq) -> None:
        """Its rows stay in the prefix cache until they are evicted."""
        self._close(seq)
        seq.computed = 0
        seq.preemptions += 1

    def _fail(self, seq: Seq, error: PacelineError, opened: bool = True) -> Round:
        r = Scheduled(seq, [], False).round(Pass(1, 0, 0, 0), Outcome(finish="error", error=error))
        if opened:
            self._report(seq, r)
        else:
            self._scheduler.remove(seq.id)
            self._leave(seq, "error", running=False)
        return r

    def _begin_masks(
        self, scheduled: Sequence[Scheduled]
    ) -> tuple[Mapping[str, Callable[[], Masks]], Sequence[Scheduled]]:
        """Masks are computed beside the pass. If the pass drops a draft, the first mask of it is still right.

        Returns those of each sequence, and the sequences that have to be waited for.
        """
        rows_of = {s.seq.id: partial(_masks_of, s) for s in scheduled if s.masks is not FREE}
        masked = [s for s in scheduled if s.scored and s.masks is FREE and _has_masks(s.seq)]
        together = self._masks_together(masked)
        self._masking.start({s.seq.id: partial(self._masks, s.seq, s.draft) for s in masked}, together)
        for s in masked:
            rows_of[s.seq.id] = partial(self._masking.rows, s.seq.id, 1 + len(s.draft))
        return rows_of, masked

    def _masks_together(self, masked: Sequence[Scheduled]) -> Callable[[], list[Masks | None]] | None:
        """Those of chains of tokens, in native calls; the copies are made now. None: there are too few."""
        if len(masked) < MANY_MASKS:
            return None
        chains = {
            s.seq.id: (copy, s.draft.tokens)
            for s in masked
            if s.seq.cursor is not None
            and s.draft.parents is None
            and (copy := s.seq.cursor.matcher_copy()) is not None
        }
        if len(chains) < MANY_MASKS:
            return None

        parts = [(s.seq, s.draft) for s in masked]  # a full cache drops drafts meanwhile

        def together() -> list[Masks | None]:
            filled = fill_batch(list(chains.values()), words(self.target.vocab_size))
            of = dict(zip(chains, filled, strict=True))
            return [
                None if (found := of.get(seq.id)) is None else self._without_ends(seq, draft, found)
                for seq, draft in parts
            ]

        return together

    def _masks(self, seq: Seq, draft: Draft, late: Callable[[], bool]) -> Masks:
        vocab = self.target.vocab_size
        result = FREE if seq.cursor is None else masks(seq.cursor, draft, words(vocab), late)
        return self._without_ends(seq, draft, result)

    def _without_ends(self, seq: Seq, draft: Draft, result: Masks) -> Masks:
        """The masks of the grammar; before `min_tokens` without the tokens that end the output."""
        if not _must_go_on(seq):
            return result
        vocab = self.target.vocab_size
        draft = draft.first(len(result.rows) - 1) if result.rows else draft
        missing = seq.params.min_tokens - (len(seq.tokens) - seq.prompt_len)
        return without_ends(result, draft, seq.end_tokens, missing, vocab)

    def _settle(self, s: Scheduled, rows: "_RowsOnHost", start: int) -> Outcome:
        """A failure here ends this output and no other."""
        try:
            return self._commit(s, rows, start)
        except PacelineError as error:
            return Outcome(finish="error", error=error)
        except Exception as problem:
            log_error(log, f"request {s.seq.id} failed", problem)
            return Outcome(finish="error", error=PacelineError(f"internal error: {problem!r}"))

    def _commit(self, s: Scheduled, rows: "_RowsOnHost", first: int) -> Outcome:
        """Verifies a draft and commits the accepted tokens. first: the sequence's first row of the pass."""
        seq, start = s.seq, len(s.seq.tokens)
        held = seq.computed + len(s.fed)
        if not s.scored:
            self.target.keep(seq.id, held)
            seq.computed, s.kept_nodes = held, ()
            return Outcome(finish="length" if held == len(seq.tokens) else None)  # the end of a prefill
        if seq.cursor is not None and seq.cursor.finished:  # which became known only with the mask
            self.target.keep(seq.id, held)
            seq.computed = held  # drafters do not see its row, which no token follows
            return Outcome(finish="stop")
        verdict, scored = rows.verdict(s, first)
        new = (*[s.draft.tokens[i] for i in verdict.path], verdict.token)
        finish = self._append(seq, new)
        committed = len(seq.tokens) - start
        rows_kept = verdict.path[: committed - 1]  # the last token stays pending, as in plain decoding
        self.target.keep(seq.id, held, rows_kept)
        seq.computed, s.kept_nodes = held + len(rows_kept), rows_kept
        s.verdict = Verdict(rows_kept, seq.tokens[-1], s.draft)
        return Outcome(verdict.path[:committed], new[:committed], finish, logprobs=scored[:committed])

    def _append(self, seq: Seq, new: Sequence[int]) -> Finish | None:
        """Commits tokens up to the first one that ends the output, or may have ended it."""
        for i, token in enumerate(new):
            if i and seq.cursor is not None and seq.cursor.unsettled:
                return None  # which the next masks will tell, computed beside the engine
            seq.tokens.append(token)
            if seq.cursor is not None and not seq.cursor.commit(token):
                raise rejected(token)
            if (reason := self._ends(seq, token)) is not None:
                return reason
        return None

    def _ends(self, seq: Seq, token: int) -> Finish | None:
        ends = token in seq.end_tokens or (seq.cursor is not None and seq.cursor.finished)
        if (seq.stopped_by is not None and seq.stopped_by(token)) or ends:
            return "stop"
        unsettled = seq.cursor is not None and seq.cursor.unsettled
        return "length" if self._full(seq) and not unsettled else None

    def _full(self, seq: Seq) -> bool:
        return len(seq.tokens) >= min(self.target.max_context, seq.prompt_len + seq.params.max_tokens)

    def _report_last(self) -> None:
        """Tells controller and sinks of the last pass: beside the next one, where a pass runs by itself."""
        last, self._unreported = self._unreported, []
        if last:
            self.controller.learn([r for _, r in last])
            for seq, r in last:
                self._report(seq, r)

    def _report(self, seq: Seq, r: Round) -> None:
        self._report_last()
        for sink in self._sinks:
            sink.round(r)
        if r.finish is not None:
            self._scheduler.remove(seq.id)
            self._leave(seq, r.finish, running=True)

    def _leave(self, seq: Seq, reason: Finish, running: bool) -> None:
        self._report_last()
        self._masking.forget(seq.id)
        if running:
            self._close(seq)
        for sink in self._sinks:
            sink.finish(seq, reason)

    def _close(self, seq: Seq) -> None:
        if self._restoring.pop(seq.id, None) is None:
            self._drafting.end(seq)
        else:  # no drafter knows it yet, and nothing of what was loaded has served it
            seq.cached_on_disk = 0
        self.target.close(seq.id)


def _masks_of(s: Scheduled) -> Masks:
    return s.masks


def _awaits_mask(s: Scheduled) -> bool:
    return s.scored and s.masks is FREE and s.seq.cursor is not None


def _has_masks(seq: Seq) -> bool:
    return seq.cursor is not None or _must_go_on(seq)


def _must_go_on(seq: Seq) -> bool:
    """True while `min_tokens` forbids the end of the output."""
    return len(seq.tokens) - seq.prompt_len < seq.params.min_tokens and bool(seq.end_tokens)


@dataclass(slots=True)
class _Launched:
    """A pass on its way."""

    scheduled: list[Scheduled]
    scores: Scores
    ended: list[Round]  # of sequences that did not fit
    masked: Sequence[Scheduled]  # whose masks are being computed
    started: int  # drafting, in nanoseconds
    drafted: int
    by_drafter: Mapping[str, int]  # microseconds
    read_us: int  # of hidden states, before that: part of the draft's time

    def cost(self, target_us: int) -> Pass:
        rows = sum([s.rows for s in self.scheduled])
        draft_us = (self.drafted - self.started) // 1000 + self.read_us
        return Pass(len(self.scheduled), rows, draft_us, target_us, self.by_drafter)


class _RowsOnHost:
    """The output of a pass: the tokens that the target chose, or logits to choose them from."""

    def __init__(self, scores: Scores) -> None:
        self._tokens, self._logits = list(scores.tokens), scores.logits
        if not self._tokens:
            self._logits = self._logits.cpu()

    def verdict(self, s: Scheduled, first: int) -> tuple[Verdict, tuple[TokenLogprob, ...]]:
        end = first + 1 + len(s.draft)
        tokens = self._tokens[first:end]
        if tokens and min(tokens) >= 0:
            return verify_choices(s.draft, tokens, s.masks), ()
        rows: Floats = self._logits[first:end].numpy(force=True)  # of this sequence alone: logits are large
        verdict = verify(s.seq, s.draft, rows, s.masks)
        return verdict, logprobs(s.seq, verdict, s.draft, rows)


def _scheduler(
    config: EngineConfig, target: Target, clock: Callable[[], float], row_cost: RowCost | None
) -> Scheduler:
    """Prompts may be cut anywhere only where the cut does not show in the bits of the rows."""
    chunk = config.prefill_chunk
    anywhere = target.invariant_rows > chunk
    beside = min(config.prefill_beside, chunk) if anywhere else chunk
    return Scheduler(
        config.max_batch,
        chunk,
        beside,
        config.max_waiting,
        anywhere,
        config.prefill_beside_ms / 1000,
        clock,
        row_cost,
    )
