"""One round, top to bottom: who runs, how far to guess, guess, one pass, choose, accept, commit.

Plain decoding is a round with an empty draft; a prompt is a round with many pending tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter_ns
from typing import Final

import torch

from paceline.config import EngineConfig
from paceline.constraints.walk import masks, refused, words
from paceline.drafters.relay import Relay
from paceline.engine.judge import judge, logprobs
from paceline.engine.scheduler import Scheduler
from paceline.engine.turn import Pass, Turn, a_round, by_drafters
from paceline.errors import CacheFull, ConstraintError, PacelineError, PromptTooLong, SettingError
from paceline.sampling import Floats, chooser
from paceline.types import (
    NO_DRAFT,
    Ask,
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
    Verdict,
)

_NOTHING: Final = Scores(torch.empty(0, 0), ())
MOST_CERTAIN: Final = 32  # guesses that cannot be wrong, in one draft


class Engine:
    def __init__(
        self,
        target: Target,
        drafters: Mapping[str, Drafter],
        controller: Controller,
        sinks: Sequence[Sink] = (),
        config: EngineConfig | None = None,
        eos: frozenset[int] = frozenset(),
    ) -> None:
        config = config or EngineConfig()
        self.target = target
        self.controller = controller
        self._drafters = dict(drafters)
        self._lists: dict[tuple[str, ...], Drafter] = {}
        self._sinks = tuple(sinks)
        self._eos = eos
        self._scheduler = Scheduler(config.max_batch, config.prefill_chunk)
        self._cancelled: list[str] = []
        self._in_step = False
        self._walks = ThreadPoolExecutor(1, "paceline-grammar")

    @property
    def busy(self) -> bool:
        return len(self._scheduler) > 0

    def submit(self, seq: Seq) -> None:
        limit = self.target.max_context
        if len(seq.tokens) >= limit:
            raise PromptTooLong(
                f"the prompt has {len(seq.tokens)} tokens and the model's context holds {limit}, "
                "one of them for the answer: shorten the prompt"
            )
        strange = [t for t in seq.tokens if not 0 <= t < self.target.vocab_size]
        strange += [t for t, _ in seq.params.logit_bias if not 0 <= t < self.target.vocab_size]
        if strange:
            raise SettingError(f"token {strange[0]} is not one of the model's {self.target.vocab_size}")
        if seq.cursor is not None and seq.cursor.finished:
            raise ConstraintError("the constraint allows nothing but an empty answer")
        self._drafter(seq)  # an unknown name is refused here, not in the middle of a pass
        chooser(seq.params)  # likewise what must be built for it is built now
        self._scheduler.add(seq)

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
        failed = self._admit()
        turns = self._turns()
        self._plan(turns)
        started = perf_counter_ns()
        self._draft(turns)
        drafted = perf_counter_ns()
        with self._constrained(turns):
            turns, scores, ended = self._forward(turns)
            logits = scores.logits.numpy(force=True)
        cost = Pass(
            len(turns),
            sum(t.rows for t in turns),
            (drafted - started) // 1000,
            (perf_counter_ns() - drafted) // 1000,
        )
        rounds = [
            self._settle(t, logits[start:], cost) for t, start in zip(turns, scores.starts, strict=True)
        ]
        self._observe(turns, scores)
        self.controller.learn(rounds)
        for turn, r in zip(turns, rounds, strict=True):
            self._report(turn.seq, r)
        return failed + ended + rounds

    def _admit(self) -> list[Round]:
        """Opens what was waiting; a sequence that cannot be opened ends here, with its error."""
        failed = []
        for seq in self._scheduler.admit():
            try:
                seq.computed = seq.shared = self.target.open(seq)
            except PacelineError as error:
                failed.append(self._fail(seq, error, opened=False))
            else:
                self._drafter(seq).begin(seq)
        return failed

    def _turns(self) -> list[Turn]:
        turns = []
        for seq in self._scheduler.running():
            fed = self._scheduler.piece(seq)
            turns.append(Turn(seq, fed, scored=seq.computed + len(fed) == len(seq.tokens)))
        return turns

    def _forward(self, turns: list[Turn]) -> tuple[list[Turn], Scores, list[Round]]:
        """The pass, for as many sequences as the cache can hold.

        Where it is full, guesses go first, then the last to come go back to waiting. One that does not even
        fit alone ends with the error.
        """
        while turns:
            feeds = [Feed(t.seq.id, t.fed, t.draft, t.scored) for t in turns]
            try:
                return turns, self.target.forward(feeds, self._taps(turns)), []
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
        self._drafter(seq).end(seq)
        self.target.close(seq.id)
        seq.computed = 0
        self._scheduler.put_back(seq)

    def _fail(self, seq: Seq, error: PacelineError, opened: bool = True) -> Round:
        r = a_round(Turn(seq, [], False), Pass(1, 0, 0, 0), finish="error", error=error)
        if opened:
            self._report(seq, r)
        else:
            self._scheduler.remove(seq.id)
            self._leave(seq, "error", running=False)
        return r

    def _plan(self, turns: Sequence[Turn]) -> None:
        rows = sum(len(t.fed) for t in turns)
        for turn, budget in zip(turns, self.controller.plan([t.seq for t in turns], rows), strict=True):
            seq = turn.seq
            room = min(seq.prompt_len + seq.params.max_tokens, self.target.max_context) - len(seq.tokens) - 1
            room = min(room, self.target.invariant_rows - len(turn.fed)) if turn.scored else 0
            turn.budget = max(0, min(budget, seq.spec.max_draft, room))
            if seq.cursor is not None and seq.spec.max_draft:
                turn.certain = max(0, min(MOST_CERTAIN, room - turn.budget))

    def _draft(self, turns: Sequence[Turn]) -> None:
        asking = [t for t in turns if t.budget or t.certain]
        for group in by_drafters(asking):
            asks = [Ask(t.seq, t.budget, cursor=t.seq.cursor, certain=t.certain) for t in group]
            drafter = self._drafter(group[0].seq)
            for turn, draft in zip(group, drafter.draft(asks), strict=True):
                turn.draft = self._usable(draft.first(turn.budget + turn.certain), drafter.name)
        rows = sum(len(t.fed) for t in turns)
        kept = self.controller.trim([t.seq for t in asking], [t.draft for t in asking], rows)
        for turn, nodes in zip(asking, kept, strict=True):
            turn.draft = turn.draft.first(nodes)

    @contextmanager
    def _constrained(self, turns: Sequence[Turn]) -> Iterator[None]:
        """Masks are found beside the pass. Should it drop a draft, the draft's first mask is still right."""
        bound = [(t, t.seq.cursor) for t in turns if t.seq.cursor is not None and t.scored]
        walks = [
            (turn, self._walks.submit(masks, cursor, turn.draft, words(self.target.vocab_size)))
            for turn, cursor in bound
        ]
        yield
        for turn, walk in walks:
            turn.masks = walk.result()

    def _settle(self, turn: Turn, rows: Floats, cost: Pass) -> Round:
        try:
            return self._commit(turn, rows, cost)
        except ConstraintError as error:  # ends this output and no other
            return a_round(turn, cost, finish="error", error=error)

    def _commit(self, turn: Turn, rows: Floats, cost: Pass) -> Round:
        """Judges a draft and commits what is kept."""
        seq, start = turn.seq, len(turn.seq.tokens)
        held = seq.computed + len(turn.fed)
        if not turn.scored:
            self.target.keep(seq.id, held)
            seq.computed = held
            return a_round(turn, cost)
        verdict = judge(seq, turn.draft, rows, turn.masks)
        scored = logprobs(seq, verdict, turn.draft, rows)
        new = (*(turn.draft.tokens[i] for i in verdict.path), verdict.token)
        finish = self._append(seq, new)
        kept = len(seq.tokens) - start
        rows_kept = verdict.path[: kept - 1]  # the last token stays pending, as in plain decoding
        self.target.keep(seq.id, held, rows_kept)
        seq.computed = held + len(rows_kept)
        turn.verdict = Verdict(rows_kept, seq.tokens[-1])
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

    def _observe(self, turns: Sequence[Turn], scores: Scores) -> None:
        start_of = {t.seq.id: start for t, start in zip(turns, scores.starts, strict=True)}
        for group in by_drafters([t for t in turns if t.verdict is not None]):
            starts = tuple(start_of[t.seq.id] for t in group)
            verdicts = [t.verdict for t in group if t.verdict is not None]
            of_group = scores if starts == scores.starts else replace(scores, starts=starts)
            self._drafter(group[0].seq).observe([t.seq for t in group], verdicts, of_group)

    def _report(self, seq: Seq, r: Round) -> None:
        for sink in self._sinks:
            sink.round(r)
        if r.finish is not None:
            self._scheduler.remove(seq.id)
            self._leave(seq, r.finish, running=True)

    def _leave(self, seq: Seq, reason: Finish, running: bool) -> None:
        if running:
            self._drafter(seq).end(seq)
            self.target.close(seq.id)
        for sink in self._sinks:
            sink.finish(seq, reason)

    def _drafter(self, seq: Seq) -> Drafter:
        """The request's list of drafters, as one drafter."""
        names = seq.spec.drafters
        if names not in self._lists:
            unknown = [n for n in names if n not in self._drafters]
            if unknown:
                known = ", ".join(sorted(self._drafters))
                raise SettingError(f"no drafter is called {unknown[0]!r}. Known here: {known}")
            self._lists[names] = Relay([self._drafters[n] for n in names])
        return self._lists[names]

    def _taps(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        return tuple(sorted({tap for t in turns for tap in self._drafter(t.seq).taps}))

    def _usable(self, draft: Draft, name: str) -> Draft:
        """The draft up to the first token the target does not have, each node with a source."""
        if not draft.sources:
            draft = replace(draft, sources=(name,) * len(draft))
        bad = (i for i, token in enumerate(draft.tokens) if not 0 <= token < self.target.vocab_size)
        return draft.first(next(bad, len(draft)))
