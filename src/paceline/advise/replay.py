"""Acceptance of drafters on recorded text, without a pass of the model.

`match` lets the target choose every token by itself, so a recorded output is the output whatever is drafted:
drafts are compared with the tokens that followed. `replay` asks one drafter at a fixed length. `Simulation`
runs the engine's drafting and controller, with the times of passes from a cost curve instead of a clock.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from time import perf_counter_ns

from torch import Tensor, cat, empty

from paceline.config import EngineConfig, SpecConfig
from paceline.engine.drafting import Drafting
from paceline.engine.scheduler import Outcome, Pass, Scheduled
from paceline.types import ROOT, Ask, Controller, Draft, Drafter, Scores, Seq, Target, Verdict

NO_SCORES = Scores(empty(0, 0), ())
PassCost = Callable[[int, int], float]  # rows and context to the milliseconds of a pass


@dataclass(frozen=True, slots=True)
class ReplayStats:
    """Counts of a replay."""

    tokens: int = 0  # recorded
    passes: int = 0  # of the target, to write the same text
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0

    def __add__(self, other: "ReplayStats") -> "ReplayStats":
        return ReplayStats(
            self.tokens + other.tokens,
            self.passes + other.passes,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
        )


def replay(
    drafter: Drafter,
    prompt: Sequence[int],
    output: Sequence[int],
    budget: int = 8,
    *,
    tenant: str = "",
    prediction: Sequence[int] = (),
    tree_width: int = 1,
) -> ReplayStats:
    """Drafts along `output` as if the target were writing it.

    The drafter sees no hidden states and no scores.
    """
    spec = SpecConfig(tree_width=tree_width)
    seq = Seq("replay", list(prompt), len(prompt), spec=spec, tenant=tenant, prediction=tuple(prediction))
    stats = ReplayStats()
    drafter.begin(seq)
    while stats.tokens < len(output):
        (draft,) = drafter.draft([Ask(seq, budget)])
        rest = output[stats.tokens :]
        path = follow(draft, rest)[: len(rest) - 1]
        committed = rest[: len(path) + 1]
        seq.tokens.extend(committed)
        drafter.observe([seq], [Verdict(path, committed[-1])], NO_SCORES)
        stats += ReplayStats(len(committed), 1, len(draft), len(path))
    drafter.end(seq)
    return stats


def follow(draft: Draft, text: Sequence[int]) -> tuple[int, ...]:
    """The nodes of `draft` that match `text`."""
    path: list[int] = []
    for token in text:
        node = draft.child(path[-1] if path else ROOT, token)
        if node is None:
            break
        path.append(node)
    return tuple(path)


@dataclass(frozen=True, slots=True)
class RecordedOutput:
    """seq: as the engine has it before its first pass. hidden: layer -> [tokens, width], for heads."""

    seq: Seq
    output: tuple[int, ...]
    hidden: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decoding:
    """The decoding of one output, after the pass that ends its prompt and gives its first token."""

    tokens: int
    passes: int
    draft_ms: float
    target_ms: float  # its share of passes that several outputs share
    plain_ms: float  # the same without drafts
    by_source: Mapping[str, int]  # accepted tokens

    @property
    def ms(self) -> float:
        return self.draft_ms + self.target_ms


@dataclass(slots=True)
class _Live:
    index: int
    seq: Seq
    output: tuple[int, ...]
    hidden: Mapping[int, Tensor]
    tokens: int = 0
    passes: int = 0
    draft_ms: float = 0.0
    target_ms: float = 0.0
    plain_ms: float = 0.0
    by_source: Counter[str] = field(default_factory=Counter)

    @property
    def rest(self) -> tuple[int, ...]:
        return self.output[len(self.seq.tokens) - self.seq.prompt_len :]

    def commit(self, s: Scheduled, path: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        self.seq.tokens.extend(tokens)
        self.seq.computed += len(s.fed) + len(path)
        s.kept_nodes, s.verdict = path, Verdict(path, tokens[-1], s.draft)
        _advance(self.seq, tokens)

    def done(self) -> Decoding:
        return Decoding(
            self.tokens, self.passes, self.draft_ms, self.target_ms, self.plain_ms, self.by_source
        )


class Simulation:
    """The engine's rounds over recorded outputs, with its own drafting and controller."""

    def __init__(
        self,
        spec: SpecConfig,
        target: Target,
        drafters: Mapping[str, Drafter],
        controller: Controller,
        cost: PassCost,
        *,
        overhead_ms: float = 0.0,  # of a round, outside of drafters and target
        ask_us: float = 0.0,  # of an ask of a drafter, beyond what it takes here
        concurrency: int = 1,
        prefill_chunk: int = EngineConfig().prefill_chunk,
    ) -> None:
        self._spec, self._controller, self._cost = spec, controller, cost
        self._drafting = Drafting(target, drafters, controller)
        self._overhead_ms, self._concurrency, self._chunk = overhead_ms, concurrency, prefill_chunk
        self._ask_us = ask_us
        self.asks_us: list[float] = []  # of one ask, in each round with any

    def run(self, outputs: Sequence[RecordedOutput]) -> list[Decoding]:
        """All outputs, in this order, as many at once as the simulation has places."""
        done: dict[int, Decoding] = {}
        waiting = iter(enumerate(outputs))
        live: list[_Live] = []
        while live := [*live, *self._admitted(waiting, self._concurrency - len(live))]:
            decoding = [one for one in live if one.rest]
            if decoding:
                self._round(decoding)
            for one in live:
                if not one.rest:
                    self._drafting.end(one.seq)
                    done[one.index] = one.done()
            live = [one for one in live if one.rest]
        return [done[i] for i in range(len(outputs))]

    def _admitted(self, waiting: Iterator[tuple[int, RecordedOutput]], places: int) -> Iterator[_Live]:
        """The last pass of a prompt may have a draft as well."""
        for index, recorded in islice(waiting, places):
            seq = replace(
                recorded.seq,
                id=f"simulation {index}",
                tokens=recorded.seq.tokens[: recorded.seq.prompt_len],
                spec=self._spec,
                cursor=None if recorded.seq.cursor is None else recorded.seq.cursor.clone(),
                computed=0,
            )
            one = _Live(index, seq, recorded.output, recorded.hidden)
            self._drafting.begin(seq)
            s = self._end_of_prompt(one)
            self._drafting.observe([s], self._scores([one], [s]))
            yield one

    def _end_of_prompt(self, one: _Live) -> Scheduled:
        """The rows before it were shown to no drafter: they are shown with it."""
        seq = one.seq
        rest = (seq.prompt_len - 1) % self._chunk + 1
        s = Scheduled(seq, seq.tokens[-rest:], scored=True)
        seq.computed = seq.prompt_len - rest
        self._drafting.plan([s])
        self._drafting.draft([s])
        path = follow(s.draft, one.output)[: len(one.output) - 1]
        s.fed, seq.computed = list(seq.tokens), 0
        one.commit(s, path, one.output[: len(path) + 1])
        return s

    def _round(self, live: Sequence[_Live]) -> None:
        scheduled = [Scheduled(one.seq, one.seq.tokens[-1:], scored=True) for one in live]
        context = max(len(one.seq.tokens) for one in live)
        self._drafting.plan(scheduled)
        started = perf_counter_ns()
        by_drafter, read_us = self._drafting.draft(scheduled)
        draft_us = (perf_counter_ns() - started) // 1000
        if asks := sum(len(s.asked) for s in scheduled):
            self.asks_us.append(draft_us / asks)
            draft_us += round(asks * self._ask_us)
        rows = sum(s.rows for s in scheduled)
        plain_ms = self._cost(len(live), context)
        target_ms = max(plain_ms, self._cost(rows, context))  # curves may cross where they are extrapolated
        cost = Pass(len(live), rows, draft_us + read_us, round(1000 * target_ms), by_drafter)
        rounds = []
        for one, s in zip(live, scheduled, strict=True):
            path = follow(s.draft, one.rest)[: len(one.rest) - 1]
            tokens = one.rest[: len(path) + 1]
            one.commit(s, path, tokens)
            rounds.append(s.round(cost, Outcome(path, tokens, None if one.rest else "stop")))
            one.tokens += len(tokens)
            one.passes += 1
            one.plain_ms += len(tokens) * (plain_ms + self._overhead_ms) / len(live)
            one.target_ms += (target_ms + self._overhead_ms) / len(live)
            one.by_source.update(rounds[-1].sources[: len(path)])
        started = perf_counter_ns()
        self._drafting.observe(scheduled, self._scores(live, scheduled))
        draft_us += (perf_counter_ns() - started) // 1000
        for one in live:
            one.draft_ms += draft_us / 1000 / len(live)
        self._controller.learn(rounds)

    def _scores(self, live: Sequence[_Live], scheduled: Sequence[Scheduled]) -> Scores:
        """Hidden states of the committed rows, which follow one another in a chain; no logits."""
        taps = self._drafting.taps(scheduled)
        if not taps:
            return NO_SCORES if len(live) == 1 else replace(NO_SCORES, starts=(0,) * len(live))
        parts, rows, first = [], [], 0
        for one, s in zip(live, scheduled, strict=True):
            count = len(s.fed) + len(s.kept_nodes or ())
            parts.append((one.hidden, one.seq.computed - count, one.seq.computed))
            rows.append(first)
            first += count
        hidden = {tap: cat([states[tap][start:stop] for states, start, stop in parts]) for tap in taps}
        return Scores(NO_SCORES.logits, tuple(rows), tuple(rows), hidden)


def _advance(seq: Seq, tokens: Sequence[int]) -> None:
    """Moves the grammar state; an output that left its grammar goes on without one."""
    for token in tokens:
        if seq.cursor is None:
            return
        if seq.cursor.unsettled:
            seq.cursor.settle()
        if seq.cursor.finished or not seq.cursor.commit(token):
            seq.cursor = None
