"""One round, top to bottom: who runs, how far to guess, guess, one pass, choose, accept, commit.

Plain decoding is a round with an empty draft; a prompt is a round with many pending tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from time import perf_counter_ns

from paceline.config import EngineConfig
from paceline.drafters.first_of import FirstOf
from paceline.engine.judge import judge, logprobs
from paceline.engine.scheduler import Scheduler
from paceline.errors import PromptTooLong, SettingError
from paceline.sampling import Floats
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


@dataclass(slots=True)
class Turn:
    """One sequence's part in a pass."""

    seq: Seq
    fed: list[int]  # pending tokens that go in
    scored: bool  # False: more of the prompt is still to come
    budget: int = 0
    draft: Draft = NO_DRAFT
    verdict: Verdict | None = None

    @property
    def rows(self) -> int:
        return len(self.fed) + len(self.draft)


@dataclass(frozen=True, slots=True)
class Pass:
    """What one forward cost, shared by its sequences."""

    batch: int
    rows: int
    draft_us: int
    target_us: int


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
        self._drafter(seq)
        self._scheduler.add(seq)

    def cancel(self, seq_id: str) -> None:
        found = self._scheduler.remove(seq_id)
        if found is not None:
            seq, running = found
            self._leave(seq, "cancelled", running)

    def step(self) -> list[Round]:
        """One pass of the target for every running sequence."""
        turns = self._schedule()
        if not turns:
            return []
        self._plan(turns)
        started = perf_counter_ns()
        self._draft(turns)
        drafted = perf_counter_ns()
        feeds = [Feed(t.seq.id, t.fed, t.draft, t.scored) for t in turns]
        scores = self.target.forward(feeds, self._taps(turns))
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
        return rounds

    def _schedule(self) -> list[Turn]:
        for seq in self._scheduler.admit():
            seq.computed = seq.shared = self.target.open(seq)
            self._drafter(seq).begin(seq)
        turns = []
        for seq in self._scheduler.running():
            fed = self._scheduler.piece(seq)
            turns.append(Turn(seq, fed, scored=seq.computed + len(fed) == len(seq.tokens)))
        return turns

    def _plan(self, turns: Sequence[Turn]) -> None:
        rows = sum(len(t.fed) for t in turns)
        for turn, budget in zip(turns, self.controller.plan([t.seq for t in turns], rows), strict=True):
            seq = turn.seq
            room = min(seq.prompt_len + seq.params.max_tokens, self.target.max_context) - len(seq.tokens) - 1
            rows_left = self.target.invariant_rows - len(turn.fed)
            turn.budget = max(0, min(budget, seq.spec.max_draft, room, rows_left)) if turn.scored else 0

    def _draft(self, turns: Sequence[Turn]) -> None:
        asking = [t for t in turns if t.budget]
        for _, group in _by_drafters(asking):
            asks = [Ask(t.seq, t.budget) for t in group]
            for turn, draft in zip(group, self._drafter(group[0].seq).draft(asks), strict=True):
                turn.draft = self._usable(draft.first(turn.budget))

    def _settle(self, turn: Turn, rows: Floats, cost: Pass) -> Round:
        """Judges a draft and commits what is kept."""
        seq, start = turn.seq, len(turn.seq.tokens)
        held = seq.computed + len(turn.fed)
        done = Round(
            seq.id,
            start,
            turn.draft,
            (),
            (),
            turn.budget,
            cost.batch,
            cost.rows,
            cost.draft_us,
            cost.target_us,
        )
        if not turn.scored:
            self.target.keep(seq.id, held)
            seq.computed = held
            return done
        verdict = turn.verdict = judge(seq, turn.draft, rows)
        scored = logprobs(seq, verdict, turn.draft, rows)
        new = [*(turn.draft.tokens[i] for i in verdict.path), verdict.token]
        finish = self._append(seq, new)
        kept = len(seq.tokens) - start
        rows_kept = verdict.path[: kept - 1]  # the last token stays pending, as in plain decoding
        self.target.keep(seq.id, held, rows_kept)
        seq.computed = held + len(rows_kept)
        return replace(
            done, path=verdict.path[:kept], tokens=tuple(new[:kept]), finish=finish, logprobs=scored[:kept]
        )

    def _append(self, seq: Seq, new: Sequence[int]) -> Finish | None:
        """Commits tokens up to the first one that ends the output."""
        for token in new:
            seq.tokens.append(token)
            if (reason := self._ends(seq, token)) is not None:
                return reason
        return None

    def _ends(self, seq: Seq, token: int) -> Finish | None:
        ends = token in seq.params.stop_tokens or (token in self._eos and not seq.params.ignore_eos)
        if (seq.stopped_by is not None and seq.stopped_by(token)) or ends:
            return "stop"
        full = len(seq.tokens) >= self.target.max_context
        return "length" if full or len(seq.tokens) - seq.prompt_len >= seq.params.max_tokens else None

    def _observe(self, turns: Sequence[Turn], scores: Scores) -> None:
        start_of = {t.seq.id: start for t, start in zip(turns, scores.starts, strict=True)}
        for _, group in _by_drafters([t for t in turns if t.verdict is not None]):
            starts = tuple(start_of[t.seq.id] for t in group)
            verdicts = [t.verdict for t in group if t.verdict is not None]
            self._drafter(group[0].seq).observe(
                [t.seq for t in group], verdicts, replace(scores, starts=starts)
            )

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
            self._lists[names] = FirstOf([self._drafters[n] for n in names])
        return self._lists[names]

    def _taps(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        return tuple(sorted({tap for t in turns for tap in self._drafter(t.seq).taps}))

    def _usable(self, draft: Draft) -> Draft:
        """The draft up to the first token the target does not have."""
        bad = (i for i, token in enumerate(draft.tokens) if not 0 <= token < self.target.vocab_size)
        return draft.first(next(bad, len(draft)))


def _by_drafters(turns: Sequence[Turn]) -> Iterator[tuple[tuple[str, ...], list[Turn]]]:
    ordered = sorted(turns, key=lambda t: t.seq.spec.drafters)
    for names, group in groupby(ordered, key=lambda t: t.seq.spec.drafters):
        yield names, list(group)
