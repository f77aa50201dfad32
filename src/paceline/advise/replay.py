"""Acceptance of drafters on recorded text, without a pass of the model.

`match` lets the target choose every token by itself, so a recorded output is the output whatever is drafted:
drafts are compared with the tokens that followed. `replay` asks one drafter at a fixed length. `Simulation`
runs the engine itself, on a target that knows the outputs and takes its times from a cost curve.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import thread_time_ns
from typing import Final

from torch import Tensor, cat, empty

from paceline.advise.pass_times import PassTimes
from paceline.config import EngineConfig, SpecConfig
from paceline.engine.engine import Engine
from paceline.types import (
    ROOT,
    Ask,
    CacheStats,
    Controller,
    Cursor,
    Draft,
    Drafter,
    Feed,
    Round,
    Scores,
    Seq,
    Target,
    Verdict,
)

NO_SCORES: Final = Scores(empty(0, 0), ())


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
    cached: int = 0  # tokens of its prompt that the prefix cache held


@dataclass(frozen=True, slots=True)
class Decoding:
    """The decoding of one output, after the pass that ends its prompt and gives its first token."""

    tokens: int
    passes: int
    ms: float  # from the first token to the last
    target_ms: float  # the part of it in passes of the target
    draft_ms: float  # the part of it in which drafts were made
    by_source: Mapping[str, int]  # accepted tokens

    @property
    def host_ms(self) -> float:
        """Of a pass, outside of the target."""
        return (self.ms - self.target_ms) / max(1, self.passes)


class ReplayClock:
    """Nanoseconds: the time that the thread has computed, and the times of passes that were not run."""

    def __init__(self, host_factor: float) -> None:
        self._host_factor, self._passes_ns = host_factor, 0

    def __call__(self) -> int:
        return round(self._host_factor * thread_time_ns()) + self._passes_ns

    def set(self, ns: int) -> None:
        self._passes_ns += ns - self()


class ReplayTarget:
    """Gives the tokens of recorded outputs for those of the model, in the time that a cost curve says."""

    bytes_held = 0

    def __init__(self, target: Target, times: PassTimes, clock: ReplayClock) -> None:
        self.vocab_size, self.fingerprint = target.vocab_size, target.fingerprint
        self.max_context, self.capacity = target.max_context, target.capacity
        self.invariant_rows = target.invariant_rows
        self._times, self._clock = times, clock
        self._outputs: dict[str, RecordedOutput] = {}
        self._held: dict[str, int] = {}  # rows in the cache

    def add(self, seq_id: str, recorded: RecordedOutput) -> None:
        self._outputs[seq_id] = recorded

    @property
    def cache_stats(self) -> CacheStats:
        return CacheStats(0, 0, 0, 0, 0, 0, 0)

    def describe(self) -> str:
        return "recorded outputs"

    def open(self, seq: Seq) -> int:
        self._held[seq.id] = min(self._outputs[seq.id].cached, seq.prompt_len - 1)
        return self._held[seq.id]

    def restore(self, seq_id: str, seconds: float) -> tuple[int, bool]:
        return self._held[seq_id], False

    def forward(self, feeds: Sequence[Feed], taps: Sequence[int] = ()) -> Scores:
        ends = self._clock() + round(1e6 * self._pass_ms(feeds))
        tokens, starts, rows, hidden = list[int](), list[int](), list[int](), list[list[int]]()
        outputs = [self._outputs[feed.seq_id] for feed in feeds]
        for feed, recorded in zip(feeds, outputs, strict=True):
            starts.append(len(tokens))
            rows.append(sum(map(len, hidden)))
            held = self._held[feed.seq_id]
            after = held + len(feed.tokens)
            rest = recorded.output[after - recorded.seq.prompt_len :] if feed.scored else ()
            path = follow(feed.draft, rest)
            if feed.scored:
                tokens += _choices(feed.draft, path, rest)
            nodes = {node: after + depth for depth, node in enumerate(path)}
            hidden.append([*range(held, after), *(nodes.get(i, held) for i in range(len(feed.draft)))])
        states = {tap: cat([o.hidden[tap][i] for o, i in zip(outputs, hidden, strict=True)]) for tap in taps}
        self._clock.set(ends)
        return Scores(NO_SCORES.logits, tuple(starts), tuple(rows), states, tokens)

    def _pass_ms(self, feeds: Sequence[Feed]) -> float:
        """Prompts have a time of their own, where it is known."""
        decoding = [feed for feed in feeds if len(feed.tokens) == 1 or not self._times.prompt_row_ms]
        rows, all_rows = (sum(len(f.tokens) + len(f.draft) for f in some) for some in (decoding, feeds))
        sequences = [(len(f.tokens) + len(f.draft), self._held[f.seq_id]) for f in decoding]
        return self._times(sequences, all_rows - rows)

    def keep(self, seq_id: str, length: int, path: Sequence[int] = ()) -> None:
        self._held[seq_id] = length + len(path)

    def close(self, seq_id: str) -> None:
        del self._held[seq_id]

    def forget(self, tenant: str) -> None:
        return


def _choices(draft: Draft, path: Sequence[int], rest: Sequence[int]) -> list[int]:
    """The token after the text and after each node; any where no text gets to."""
    tokens = [0] * (1 + len(draft))
    for depth, node in enumerate((ROOT, *path)):
        if depth < len(rest):
            tokens[node + 1] = rest[depth]
    return tokens


class Simulation:
    """The engine over recorded outputs: its own rounds, in the time that a cost curve says."""

    def __init__(
        self,
        spec: SpecConfig,
        target: Target,
        drafters: Mapping[str, Drafter],
        controller: Controller,
        times: PassTimes,
        *,
        host_factor: float = 1.0,  # on the time of all that is not the target's
        concurrency: int = 1,
    ) -> None:
        self._spec, self._concurrency = spec, concurrency
        self._clock = clock = ReplayClock(host_factor)
        self._target = ReplayTarget(target, times, clock)
        config = EngineConfig(max_batch=concurrency)
        self._engine = Engine(
            self._target,
            drafters,
            controller,
            config=config,
            clock=lambda: clock() / 1e9,
            timer=clock,
            row_cost=times.row_ms,
        )

    def run(self, outputs: Sequence[RecordedOutput]) -> list[Decoding]:
        """All outputs, in this order, as many at once as the simulation has places."""
        live, waiting = [_Timed() for _ in outputs], list(enumerate(outputs))[::-1]
        while waiting or self._engine.busy:
            while waiting and self._engine.running + self._engine.waiting < self._concurrency:
                index, recorded = waiting.pop()
                self._target.add(_name(index), recorded)
                self._engine.submit(self._seq(index, recorded))
            rounds = self._engine.step()
            now = self._clock()
            for r in rounds:
                if r.error is not None:
                    raise r.error
                live[int(r.request.rpartition(" ")[2])].add(r, now)
        return [one.done() for one in live]

    def _seq(self, index: int, recorded: RecordedOutput) -> Seq:
        seq, count = recorded.seq, len(recorded.output)
        params = replace(seq.params, ignore_eos=True, stop_tokens=(), min_tokens=0, logprobs=None)
        params = replace(params, max_tokens=max(params.max_tokens, count))
        return replace(
            seq,
            id=_name(index),
            tokens=seq.tokens[: seq.prompt_len],
            params=params,
            spec=self._spec,
            cursor=_cursor(recorded),
            stopped_by=_EndOf(count),
            computed=0,
        )


def _name(index: int) -> str:
    return f"simulation {index}"


class _EndOf:
    """Ends an output where the recorded one ends, for whatever reason it did."""

    def __init__(self, tokens: int) -> None:
        self._left = tokens

    def __call__(self, token: int) -> bool:
        self._left -= 1
        return self._left <= 0


@dataclass(slots=True)
class _Timed:
    """The rounds of one output, and when they ended."""

    rounds: list[Round] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)  # nanoseconds

    def add(self, r: Round, now: int) -> None:
        if r.tokens:
            self.rounds.append(r)
            self.ended.append(now)

    def done(self) -> Decoding:
        decoding, sources = self.rounds[1:], Counter[str]()
        for r in decoding:
            sources.update(r.sources[: len(r.path)])
        return Decoding(
            sum(len(r.tokens) for r in decoding),
            len(decoding),
            (self.ended[-1] - self.ended[0]) / 1e6 if decoding else 0.0,
            sum(r.target_us for r in decoding) / 1000,
            sum(r.draft_us for r in decoding) / 1000,
            sources,
        )


def _cursor(recorded: RecordedOutput) -> Cursor | None:
    """An output that does not follow its grammar is replayed without one."""
    if recorded.seq.cursor is None:
        return None
    walked = recorded.seq.cursor.clone()
    for token in recorded.output:
        if walked.unsettled:
            walked.settle()
        if walked.finished or not walked.commit(token):
            return None
    return recorded.seq.cursor.clone()
