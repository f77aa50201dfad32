"""From traffic to advice: for each route the drafters and the length to use, or the reason for none."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from random import Random
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from paceline.advise.pass_times import (
    MIN_PASSES,
    PassTimes,
    corrected,
    decoding_passes,
)
from paceline.advise.replay import Decoding, Simulation
from paceline.advise.speedup import MAX_LENGTH, Costs, best_length
from paceline.advise.target_outputs import (
    OutputLimits,
    Progress,
    TargetOutput,
    host_factor,
    host_ms,
    prefill_ms,
    prompt_row_ms,
    reading_times,
    target_outputs,
    with_hidden,
)
from paceline.advise.traffic import Classify, TracedRequest, Traffic, Workload, sample, turns_before, workload
from paceline.config import SpecConfig, require_between, require_min, require_positive, require_whole
from paceline.drafters import model_free
from paceline.errors import UsageError
from paceline.target.cost import PassCost
from paceline.trace.record import RoundRecord, round_record
from paceline.types import Controller, Drafter, Round

if TYPE_CHECKING:
    from paceline.llm import LLM

FREE_LISTS: Final = (("grammar", "suffix", "ngram"), ("grammar", "suffix"), ("grammar", "ngram"))
DEFAULT_LENGTH: Final = 8
LENGTHS: Final = (4, 16)  # tried besides for the best list
FIXED_LENGTHS: Final = (1, 2, 4, 8, 16)  # of the curve by length
CURVE_OUTPUTS: Final = 32  # replayed for each point of it
LOADS: Final = (1, 4, 16)
PLAIN: Final = SpecConfig((), max_draft=0)
MIN_GAIN: Final = 1.03  # speed-up below which speculation is left off
NEAR_BEST: Final = 0.95  # share of the best speed-up at which the default list and length are preferred
SHORT: Final = 16  # tokens of a median answer that counts as short
UNPREDICTABLE: Final = 1.15  # tokens per pass below which a text is called so
CONFIDENCE: Final = 0.9  # of intervals
MIN_CONVERSATIONS: Final = 5  # fewer make no interval
MAX_WIDTH: Final = 0.1  # of the interval of a speed-up, as a share of it, where it holds MIN_GAIN
MAX_TOOLS: Final = 16  # in the conditions of a route
COVERED: Final = 0.9  # of the requests of a route that its conditions may be for, at least


Decision = Literal["speculate", "leave it off", "too little data"]


@dataclass(frozen=True, slots=True)
class AdviceConfig:
    requests: int = 96  # of each route, that are answered and replayed
    concurrency: int = 0  # outputs at once that are planned for; 0: as recorded
    seed: int = 0  # of the sample and the intervals
    resamples: int = 1000  # of the bootstrap
    limits: OutputLimits = field(default_factory=OutputLimits)

    def __post_init__(self) -> None:
        require_whole(self, "requests", "concurrency", "seed", "resamples")
        require_min(self, requests=1, concurrency=0, seed=0, resamples=1)
        require_between(self.limits, 1, 1 << 20, "max_tokens", "max_prompt")
        require_positive(self.limits, "seconds")


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, and the interval that the bootstrap over conversations gives."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A list of drafters at one length, replayed on the traffic of a route at the planned load."""

    drafters: tuple[str, ...]
    max_draft: int
    tokens_per_pass: Interval  # after the first token
    speedup: Interval  # of decoding
    turn_speedup: Interval  # of whole turns, reading of the prompt included
    accepted_by_source: Mapping[str, int]

    @property
    def name(self) -> str:
        return "+".join(self.drafters)


@dataclass(frozen=True, slots=True)
class LengthPoint:
    """Drafts that are always this long, where the drafters have as many tokens."""

    draft_length: int
    tokens_per_pass: float
    speedup: float


@dataclass(frozen=True, slots=True)
class LoadPoint:
    concurrency: int
    speedup: float
    tokens_per_pass: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Rounds that the traces hold: they ran with the settings of that time."""

    tokens_per_pass: float
    speedup: float  # of decoding, against plain passes of this machine's cost curve


@dataclass(frozen=True, slots=True)
class TrainingGain:
    """The default list with a fitted drafter, on conversations that it was not fitted on."""

    outputs: int
    conversations: int
    tokens_per_pass: Interval
    speedup: Interval  # of decoding, over plain
    gain: Interval  # of decoding, over the best list without it


@dataclass(frozen=True, slots=True)
class RouteAdvice:
    route: str
    workload: Workload
    decision: Decision
    reason: str
    best: Candidate
    candidates: tuple[Candidate, ...]
    lengths: tuple[LengthPoint, ...]
    loads: tuple[LoadPoint, ...]
    concurrency: int  # planned for
    prefill_ms: float  # mean
    decode_ms: float  # mean, without drafts
    outputs: int  # replayed
    replayed: int  # conversations
    left_out: Mapping[str, int]  # requests without an output, by reason
    own_text: bool  # the outputs were recorded; else the target answered now
    measured: Measured | None  # in the traces
    answered: Measured | None  # by the answers written now, with the default list
    match: Mapping[str, Any]  # conditions of the route for a routes file; {}: takes everything
    by_batch: tuple[tuple[int, int, int], ...]  # first and last batch, and the length for them
    training: TrainingGain | None = None  # None: no drafter was fitted, or it has seen every conversation

    @property
    def enabled(self) -> bool:
        return self.decision == "speculate"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "enabled": self.enabled}


@dataclass(frozen=True, slots=True)
class FittedDrafter:
    """Fitted on part of the traffic, to tell what training would bring. It is not kept: no route gets it."""

    drafter: Drafter
    seen: frozenset[str]  # openings of the conversations that it was fitted on


@dataclass(frozen=True, slots=True)
class Engine:
    """What the advice is computed with. drafters: those with weights, by name."""

    llm: "LLM"
    controller: Callable[[], Controller]  # a new one for each replay
    fixed: Callable[[], Controller]  # one that always drafts as far as the request allows
    cost: PassCost
    classify: Classify
    drafters: Mapping[str, Drafter] = field(default_factory=dict)
    fitted: FittedDrafter | None = None

    def lists(self) -> list[tuple[str, ...]]:
        """The lists that are compared: without weights, and the default one with each of the others."""
        return [*FREE_LISTS, *((*FREE_LISTS[0], name) for name in self.drafters)]

    def taps(self) -> list[int]:
        """The layers whose hidden states the drafters read."""
        fitted = [] if self.fitted is None else [self.fitted.drafter]
        return sorted({tap for drafter in (*self.drafters.values(), *fitted) for tap in drafter.taps})


def advise_routes(
    engine: Engine,
    traffic: Traffic,
    config: AdviceConfig | None = None,
    progress: Progress = lambda *_: None,
) -> list[RouteAdvice]:
    """Advice for every route with traffic; the time for answers is shared evenly among them."""
    config = config or AdviceConfig()
    traffic.require_requests()
    routes = traffic.routes()
    advised, started = list[RouteAdvice](), time.monotonic()
    for number, (route, requests) in enumerate(routes.items()):
        left = config.limits.seconds - (time.monotonic() - started)
        share = max(1.0, left / (len(routes) - number))
        limits = OutputLimits(config.limits.max_tokens, config.limits.max_prompt, share)
        others = [r for other, rs in routes.items() if other != route for r in rs]
        one = _RouteAdvisor(engine, config, limits, progress).advise(route, requests, others)
        if one is not None:
            advised.append(one)
    if not advised:
        raise UsageError("no request of this traffic could be answered or replayed: see the target's context")
    return advised


class _RouteAdvisor:
    def __init__(
        self, engine: Engine, config: AdviceConfig, limits: OutputLimits, progress: Progress
    ) -> None:
        self._engine, self._config, self._limits, self._progress = engine, config, limits, progress
        self._host_factor, self._planned, self._times = 1.0, 1, PassTimes(engine.cost)
        self._plain: list[Decoding] = []  # of each output, without drafts

    def advise(
        self, route: str, requests: Sequence[TracedRequest], others: Sequence[TracedRequest]
    ) -> RouteAdvice | None:
        chosen = sample(requests, self._config.requests, Random(f"{self._config.seed} {route}"))

        def report(what: str, done: int, of: int) -> None:
            self._progress(f"{route}: {what}", done, of)

        outputs, left_out = target_outputs(
            self._engine.llm, chosen, self._limits, report, before=turns_before(requests)
        )
        outputs = [one for one in outputs if len(one.recorded.output) > 1]
        if not outputs:
            return None
        outputs = self._with_hidden(outputs, report)
        answered = [_records(one.rounds) for one in outputs if one.rounds]
        figures = workload(requests, [one.tokenized for one in outputs])
        if written := [one.recorded for one in outputs if one.rounds]:
            held = sum(one.cached for one in written) / sum(one.seq.prompt_len for one in written)
            figures = replace(figures, prefix_overlap=held)
        self._planned = planned = self._config.concurrency or max(1, round(figures.concurrency))
        self._times = self._pass_times(outputs, [request.rounds for request in requests])
        self._time_host(outputs)
        busy = _with_copies(outputs, planned)
        self._plain = self._simulate(busy, PLAIN, planned)
        candidates = self._candidates(busy, report)
        best = _best(candidates)
        loads = self._loads(outputs, best)
        lengths = self._lengths(outputs, best.drafters)
        plain_ms = fmean(d.ms for d in self._plain)
        replayed = len({one.conversation for one in outputs})
        decision, reason = verdict(best, figures, loads, planned, prefill_ms(outputs), plain_ms, replayed)
        return RouteAdvice(
            route=route,
            workload=figures,
            decision=decision,
            reason=reason,
            best=best,
            candidates=tuple(candidates),
            lengths=tuple(lengths),
            loads=tuple(loads),
            concurrency=planned,
            prefill_ms=prefill_ms(outputs),
            decode_ms=plain_ms,
            outputs=len(outputs),
            replayed=replayed,
            left_out=left_out,
            own_text=not any(one.rounds for one in outputs),
            measured=measured([request.rounds for request in requests], self._times),
            answered=measured(answered, self._times),
            match=conditions(requests, others, self._engine.classify),
            by_batch=length_by_batch(lengths, self._times, int(figures.prompt_tokens.median)),
            training=self._training_gain(outputs, best),
        )

    def _pass_times(
        self, outputs: Sequence[TargetOutput], recorded: Sequence[Sequence[RoundRecord]]
    ) -> PassTimes:
        """From answers that were written now, else from the rounds in the traces."""
        written = [one for one in outputs if one.rounds]
        if not written:
            return PassTimes(corrected(self._engine.cost, [decoding_passes(rounds) for rounds in recorded]))
        timed = [[*decoding_passes(_records(one.rounds)), *one.plain] for one in written]
        cost = corrected(self._engine.cost, timed)
        return PassTimes(cost, prompt_row_ms(written, cost))

    def _with_hidden(self, outputs: list[TargetOutput], report: Progress) -> list[TargetOutput]:
        taps = self._engine.taps()
        if not taps:
            return outputs
        read = []
        for number, one in enumerate(outputs):
            report("hidden states", number, len(outputs))
            read.append(with_hidden(self._engine.llm, one, taps))
        return read

    def _candidates(self, outputs: Sequence[TargetOutput], report: Progress) -> list[Candidate]:
        tried: list[Candidate] = []
        lists = self._engine.lists()
        for number, drafters in enumerate(lists):
            report("replays", number, len(lists) + len(LENGTHS))
            tried.append(self._candidate(outputs, drafters, DEFAULT_LENGTH))
        best = _best(tried)
        for number, length in enumerate(LENGTHS, len(lists)):
            report("replays", number, len(lists) + len(LENGTHS))
            tried.append(self._candidate(outputs, best.drafters, length))
        report("replays", len(lists) + len(LENGTHS), len(lists) + len(LENGTHS))
        return tried

    def _candidate(
        self, outputs: Sequence[TargetOutput], drafters: tuple[str, ...], length: int
    ) -> Candidate:
        decodings = self._simulate(outputs, SpecConfig(drafters, length), self._planned)
        sources: dict[str, int] = {}
        for decoding in decodings:
            for name, count in decoding.by_source.items():
                sources[name] = sources.get(name, 0) + count
        figures = [
            (d.tokens, d.passes, plain.ms, d.ms, reading + plain.ms, reading + d.ms)
            for d, plain, reading in zip(decodings, self._plain, reading_times(outputs), strict=True)
        ]
        return Candidate(drafters, length, *self._intervals(outputs, figures), sources)

    def _training_gain(self, outputs: Sequence[TargetOutput], best: Candidate) -> TrainingGain | None:
        fitted, planned = self._engine.fitted, self._planned
        if fitted is None:
            return None
        unseen = [one for one in outputs if one.tokenized.request.opening not in fitted.seen]
        if not unseen:
            return None
        name, busy = fitted.drafter.name, _with_copies(unseen, planned)
        others = {**self._engine.drafters, name: fitted.drafter}  # in place of one of its kind
        plain = self._simulate(busy, PLAIN, planned)
        without = self._simulate(busy, SpecConfig(best.drafters, best.max_draft), planned)
        fast = self._simulate(
            busy, SpecConfig((*FREE_LISTS[0], name), DEFAULT_LENGTH), planned, drafters=others
        )
        figures = [
            (d.tokens, d.passes, p.ms, d.ms, w.ms, d.ms) for d, p, w in zip(fast, plain, without, strict=True)
        ]
        conversations = len({one.conversation for one in unseen})
        return TrainingGain(len(unseen), conversations, *self._intervals(busy, figures))

    def _simulate(
        self,
        outputs: Sequence[TargetOutput],
        spec: SpecConfig,
        concurrency: int = 1,
        fixed: bool = False,
        drafters: Mapping[str, Drafter] | None = None,
    ) -> list[Decoding]:
        """drafters: those with weights; None: all but the fitted one."""
        engine = self._engine
        simulation = Simulation(
            spec,
            engine.llm.target,
            {**model_free(), **(engine.drafters if drafters is None else drafters)},
            (engine.fixed if fixed else engine.controller)(),
            self._times,
            host_factor=self._host_factor,
            concurrency=concurrency,
        )
        return simulation.run([one.recorded for one in outputs])

    def _time_host(self, outputs: Sequence[TargetOutput]) -> None:
        """What everything but the target takes between two passes, and not in a replay of the same answers.

        The weights that a pass reads drive everything else out of the processor's caches: all of it takes a
        multiple of its time, as drafting does. What is left of the difference is the same in every pass.
        """
        written = [one for one in outputs if len(one.rounds) > 1]
        if sum(len(one.rounds) - 1 for one in written) < MIN_PASSES:
            return
        replayed = self._simulate(written, SpecConfig(FREE_LISTS[0], DEFAULT_LENGTH))
        self._host_factor = host_factor(written, replayed)
        left = host_ms(written) - self._host_factor * median(d.host_ms for d in replayed)
        self._times = replace(self._times, beside_ms=max(0.0, left))

    def _intervals(
        self,
        outputs: Sequence[TargetOutput],
        figures: Sequence[tuple[float, float, float, float, float, float]],
    ) -> tuple[Interval, Interval, Interval]:
        groups = [one.conversation for one in outputs]
        first, second, third = ratios(groups, figures, self._config.seed, self._config.resamples)
        return first, second, third

    def _lengths(self, outputs: Sequence[TargetOutput], drafters: tuple[str, ...]) -> list[LengthPoint]:
        points, some = [LengthPoint(0, 1.0, 1.0)], outputs[:CURVE_OUTPUTS]
        plain = _ms(self._simulate(some, PLAIN))
        for length in FIXED_LENGTHS:
            done = self._simulate(some, SpecConfig(drafters, length, adaptive=False), fixed=True)
            points.append(LengthPoint(length, _rate(done), plain / max(1e-9, _ms(done))))
        return points

    def _loads(self, outputs: Sequence[TargetOutput], best: Candidate) -> list[LoadPoint]:
        points = []
        for level in sorted({*LOADS, self._planned}):
            if level == self._planned:
                points.append(LoadPoint(level, best.speedup.value, best.tokens_per_pass.value))
                continue
            some = _with_copies(outputs, level)[: 4 * level + 8]
            spec = SpecConfig(best.drafters, best.max_draft)
            plain, fast = self._simulate(some, PLAIN, level), self._simulate(some, spec, level)
            points.append(LoadPoint(level, _ms(plain) / max(1e-9, _ms(fast)), _rate(fast)))
        return points


def ratios(
    groups: Sequence[str], figures: Sequence[Sequence[float]], seed: int = 0, resamples: int = 1000
) -> list[Interval]:
    """Of the sums of each two columns, with intervals from resampled groups.

    groups: the conversation of each row. Turns of one resemble each other, so conversations are resampled.
    """
    rng = np.random.default_rng(seed)
    totals: dict[str, np.ndarray[Any, Any]] = {}
    for group, row in zip(groups, figures, strict=True):
        totals[group] = totals.get(group, 0) + np.array(row, np.float64)
    table = np.stack(list(totals.values()))
    sums = table[rng.integers(0, len(table), (resamples, len(table)))].sum(axis=1)
    return [_interval(table, sums, column) for column in range(0, table.shape[1], 2)]


def _interval(table: np.ndarray[Any, Any], sums: np.ndarray[Any, Any], column: int) -> Interval:
    above, below = table.sum(axis=0)[column : column + 2]
    found = sums[:, column] / np.maximum(sums[:, column + 1], 1e-9)
    low, high = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(above / max(below, 1e-9)), float(low), float(high))


def _rate(decodings: Sequence[Decoding]) -> float:
    return sum(d.tokens for d in decodings) / max(1, sum(d.passes for d in decodings))


def _ms(decodings: Sequence[Decoding]) -> float:
    return sum(d.ms for d in decodings)


def _best(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest; the default list and length if they are about as fast."""
    top = max(c.speedup.value for c in candidates)
    good = [c for c in candidates if c.speedup.value >= NEAR_BEST * top]
    default = FREE_LISTS[0]
    return min(good, key=lambda c: (c.drafters != default, c.max_draft != DEFAULT_LENGTH, -c.speedup.value))


def verdict(
    best: Candidate,
    figures: Workload,
    loads: Sequence[LoadPoint],
    planned: int,
    reading_ms: float,
    decoding_ms: float,
    conversations: int,
) -> tuple[Decision, str]:
    """The decision for a route, and its reason."""
    if shortage := _shortage(best, conversations):
        return "too little data", shortage
    on, reason = _gains(best, figures, loads, planned, reading_ms, decoding_ms)
    return "speculate" if on else "leave it off", reason


def _shortage(best: Candidate, conversations: int) -> str:
    """Why the sample decides nothing; "": it does."""
    speedup = best.speedup
    if conversations < MIN_CONVERSATIONS:
        return (
            f"{conversations} of at least {MIN_CONVERSATIONS} conversations could be replayed "
            f"({speedup.value:.2f} x so far)"
        )
    if speedup.low < MIN_GAIN <= speedup.high and speedup.high - speedup.low > MAX_WIDTH * speedup.value:
        return (
            f"decoding is between {speedup.low:.2f} x and {speedup.high:.2f} x as fast: the interval "
            f"includes less than the {100 * (MIN_GAIN - 1):.0f} % that count as a gain"
        )
    return ""


def _gains(
    best: Candidate,
    figures: Workload,
    loads: Sequence[LoadPoint],
    planned: int,
    reading_ms: float,
    decoding_ms: float,
) -> tuple[bool, str]:
    speedup, turns = best.speedup.value, best.turn_speedup.value
    single = LoadPoint(1, speedup, best.tokens_per_pass.value)
    alone = next((point for point in loads if point.concurrency == 1), single)
    share = reading_ms / max(1e-9, reading_ms + decoding_ms)
    if speedup < MIN_GAIN <= alone.speedup:
        return False, (
            f"saturated by load: {alone.speedup:.2f} x for one output alone, {speedup:.2f} x "
            f"for {planned} at once"
        )
    if speedup < MIN_GAIN and alone.tokens_per_pass < UNPREDICTABLE:
        return False, (
            f"unpredictable text: {alone.tokens_per_pass:.2f} tokens per pass at best, "
            "so drafts save less than they cost"
        )
    if speedup < MIN_GAIN:
        return False, "drafts save as much time as they cost on this machine"
    if turns < MIN_GAIN and figures.output_tokens.median < SHORT:
        return False, (
            f"short answers: {figures.output_tokens.median:.0f} tokens in the median, whole turns gain "
            f"{100 * (turns - 1):.1f} %"
        )
    if turns < MIN_GAIN:
        return False, (
            f"prefill-bound: {100 * share:.0f} % of a turn is reading, whole turns gain "
            f"{100 * (turns - 1):.1f} %"
        )
    return True, (
        f"{best.tokens_per_pass.value:.2f} tokens per pass: decoding {speedup:.2f} x, "
        f"whole turns {turns:.2f} x{f', {planned} at once' if planned > 1 else ''}"
    )


def _with_copies(outputs: Sequence[TargetOutput], at_once: int) -> list[TargetOutput]:
    """At least twice as many as run at once. Copies are other tenants': no memory of one serves another."""
    copies = -(-2 * at_once // len(outputs)) if at_once > 1 else 1
    return [_of_tenant(one, copy) for copy in range(copies) for one in outputs]


def _of_tenant(one: TargetOutput, copy: int) -> TargetOutput:
    seq = one.recorded.seq
    return replace(one, recorded=replace(one.recorded, seq=replace(seq, tenant=f"{seq.tenant} {copy}")))


def measured(outputs: Sequence[Sequence[RoundRecord]], times: PassTimes) -> Measured | None:
    """From the rounds of outputs, from their second token on; None: there are none."""
    tokens = passes = 0
    spent_ms = plain_ms = 0.0
    for rounds in outputs:
        for r in [r for r in rounds if r.committed][1:]:
            tokens, passes = tokens + r.committed, passes + 1
            spent_ms += (r.draft_us + r.target_us) / 1000 / max(1, r.batch)
            plain_ms += r.committed * times([(1, r.start)] * r.batch) / max(1, r.batch)
    return Measured(tokens / passes, plain_ms / spent_ms) if passes and spent_ms else None


def _records(rounds: Sequence[Round]) -> list[RoundRecord]:
    return [round_record(r, i) for i, r in enumerate(rounds)]


def conditions(
    requests: Sequence[TracedRequest], others: Sequence[TracedRequest], classify: Classify
) -> dict[str, Any]:
    """Conditions of a routes file that tell these requests from the others; {}: no others, or no difference.

    The class of nearly all prompts, else tools that only these requests offer, else the path.
    """
    if not others:
        return {}
    ((prompt, count),) = Counter(classify(request.body) for request in requests).most_common(1)
    if count >= COVERED * len(requests) and prompt not in {classify(request.body) for request in others}:
        return {"prompt": prompt}
    foreign = {name for request in others for name in request.tools}
    if own := _cover([set(request.tools) - foreign for request in requests]):
        return {"tools": own}
    paths = {request.endpoint for request in requests}
    if len(paths) == 1 and paths.isdisjoint({request.endpoint for request in others}):
        return {"path": paths.pop()}
    return {}


def _cover(offered: Sequence[set[str]]) -> list[str]:
    """A few tools of which nearly every request offers one; []: there are none such."""
    left, names = list(offered), list[str]()
    while len(names) < MAX_TOOLS and (counts := Counter(name for tools in left for name in tools)):
        names.append(min(counts, key=lambda name: (-counts[name], name)))
        left = [tools for tools in left if names[-1] not in tools]
    return sorted(names) if len(offered) - len(left) >= COVERED * len(offered) else []


def length_by_batch(
    lengths: Sequence[LengthPoint], times: PassTimes, context: int
) -> tuple[tuple[int, int, int], ...]:
    """The best length for each number of sequences in a pass, in ranges, from tokens by length."""
    known = [point.draft_length for point in lengths]
    tokens = [point.tokens_per_pass for point in lengths]
    curve = [float(np.interp(k, known, tokens)) for k in range(MAX_LENGTH + 1)]
    batches = range(1, 65)
    best = [best_length(curve, _costs(times, batch, context)) for batch in batches]
    falling = np.maximum.accumulate(best[::-1])[::-1].tolist()  # a fuller pass never gets longer drafts
    ranges: list[tuple[int, int, int]] = []
    for batch, length in zip(batches, falling, strict=True):
        if ranges and ranges[-1][2] == length:
            ranges[-1] = (ranges[-1][0], batch, length)
        else:
            ranges.append((batch, batch, length))
    return tuple(ranges)


def _costs(times: PassTimes, batch: int, context: int) -> Costs:
    """Of passes in which every sequence has as many rows."""
    return Costs(lambda rows, sequences: times([(rows // sequences, context)] * sequences), batch=batch)
