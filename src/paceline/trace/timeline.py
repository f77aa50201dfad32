"""Agent runs as time lines: the turns of a conversation one after the other, and where the time of each went.

A round is recorded with its length, not with its start: the rounds of a phase are laid out in order, and the
time between them is divided evenly. Draft and verification are the time of whole passes, which an output
waits for whoever shares them; /metrics divides passes among their sequences.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from paceline.trace.record import RequestRecord, RoundRecord, RoundTiming

SLACK_S: Final = 0.05  # a turn may seem to begin so much before the one before it ended
MIN_READ_ROWS: Final = 32  # of a pass that tells how long reading a token takes

Phase = Literal["prefill", "decode"]
Rounds = Sequence[RoundRecord | RoundTiming]


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of one turn. Their sum is the turn's time."""

    queue: float = 0.0  # until the first pass
    prefill: float = 0.0  # until the first token
    draft: float = 0.0  # after it
    verify: float = 0.0  # passes of the target after the first token
    other: float = 0.0  # sampling, sending, passes of others

    def __add__(self, other: "Phases") -> "Phases":
        return Phases(
            self.queue + other.queue,
            self.prefill + other.prefill,
            self.draft + other.draft,
            self.verify + other.verify,
            self.other + other.other,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    id: str
    start_s: float  # from the start of its run
    seconds: float
    phases: Phases
    pause_s: float | None  # until the next turn arrives; None: the last
    pause: Literal["tools", "client"]  # the turn ended with tool calls, or with an answer
    finish: str | None
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    disk_tokens: int
    output_tokens: int
    passes: int
    drafted: int
    accepted: int
    acceptance: float | None  # accepted of drafted tokens; None: nothing was drafted
    tokens_per_pass: float
    saved_s: float | None  # by prefix reuse, at least; None: no pass read enough tokens to tell
    predicted_calls: dict[str, int]  # by outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run without its turns. id: of its first turn."""

    id: str
    conversation: str
    created: float  # unix seconds
    model: str
    route: str
    drafters: tuple[str, ...]
    plain: bool  # nothing was drafted
    metadata: dict[str, str]
    turns: int
    seconds: float  # from the first arrival to the last end
    answer_s: float  # of all turns
    prompt_tokens: int
    cached_tokens: int
    reused: float | None  # share of the prompts' tokens that came from the prefix cache
    output_tokens: int
    passes: int
    drafted: int
    accepted: int
    acceptance: float | None
    tokens_per_pass: float
    predicted_calls: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    summary: RunSummary
    phases: Phases  # of all turns
    tools_s: float  # between a turn that ended with calls and the next
    client_s: float  # between the other turns
    saved_s: float | None  # by prefix reuse, at least
    turns: tuple[Turn, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def runs(records: Iterable[RequestRecord]) -> list[list[RequestRecord]]:
    """Divides requests into runs, newest first; the turns of a run are in order.

    A turn continues the run of its conversation, model and drafters that ended last before it arrived, if its
    prompt is longer than the one before.
    """
    made: list[list[RequestRecord]] = []
    for record in sorted(records, key=lambda record: record.created):
        fitting = [run for run in made if _continues(run[-1], record)] if record.conversation else []
        if fitting:
            max(fitting, key=lambda run: _end(run[-1])).append(record)
        else:
            made.append([record])
    return sorted(made, key=lambda run: run[0].created, reverse=True)


def _continues(last: RequestRecord, record: RequestRecord) -> bool:
    same = all(
        getattr(last, name) == getattr(record, name)
        for name in ("conversation", "client", "model", "drafters", "accept")
    )
    read_ahead = last.output_tokens == 0 and last.prompt_tokens == record.prompt_tokens
    longer = last.prompt_tokens < record.prompt_tokens or read_ahead
    return same and longer and _end(last) <= record.created + SLACK_S


def _end(record: RequestRecord) -> float:
    return record.created + record.seconds


def summary(records: Sequence[RequestRecord]) -> RunSummary:
    """Of one run."""
    first = records[0]
    passes, drafted, accepted, output, prompt, cached = (
        sum(getattr(record, name) for record in records)
        for name in ("passes", "drafted", "accepted", "output_tokens", "prompt_tokens", "cached_tokens")
    )
    return RunSummary(
        id=first.id,
        conversation=first.conversation,
        created=first.created,
        model=first.model,
        route=first.route,
        drafters=first.drafters,
        plain=not drafted,
        metadata=dict(first.metadata),
        turns=len(records),
        seconds=_end(records[-1]) - first.created,
        answer_s=sum(record.seconds for record in records),
        prompt_tokens=prompt,
        cached_tokens=cached,
        reused=_share(cached, prompt),
        output_tokens=output,
        passes=passes,
        drafted=drafted,
        accepted=accepted,
        acceptance=_share(accepted, drafted),
        tokens_per_pass=output / passes if passes else 0.0,
        predicted_calls=_sum_of(record.predicted_calls for record in records),
    )


def run(turns: Sequence[tuple[RequestRecord, Rounds]]) -> Run:
    """The time line of one run."""
    records = [record for record, _ in turns]
    start, read_s = records[0].created, reading_s(rounds for _, rounds in turns)
    following = [*records[1:], None]
    made = tuple(
        _turn(record, rounds, start, after, read_s)
        for (record, rounds), after in zip(turns, following, strict=True)
    )
    saved = [turn.saved_s for turn in made if turn.saved_s is not None]
    return Run(
        summary=summary(records),
        phases=sum((turn.phases for turn in made), Phases()),
        tools_s=sum(turn.pause_s or 0.0 for turn in made if turn.pause == "tools"),
        client_s=sum(turn.pause_s or 0.0 for turn in made if turn.pause == "client"),
        saved_s=sum(saved) if saved else None,
        turns=made,
    )


def _turn(
    record: RequestRecord,
    rounds: Rounds,
    start: float,
    after: RequestRecord | None,
    read_s: float | None,
) -> Turn:
    return Turn(
        id=record.id,
        start_s=record.created - start,
        seconds=record.seconds,
        phases=phases(record, rounds),
        pause_s=None if after is None else max(0.0, after.created - _end(record)),
        pause="tools" if record.finish == "tool_calls" else "client",
        finish=record.finish,
        error=record.error,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        disk_tokens=record.disk_tokens,
        output_tokens=record.output_tokens,
        passes=record.passes,
        drafted=record.drafted,
        accepted=record.accepted,
        acceptance=_share(record.accepted, record.drafted),
        tokens_per_pass=record.tokens_per_pass,
        saved_s=None if read_s is None else record.cached_tokens * read_s,
        predicted_calls=dict(record.predicted_calls),
    )


def phases(record: RequestRecord, rounds: Rounds) -> Phases:
    queue = min(record.queue_s, record.seconds)
    if record.first_token_s is None:
        return Phases(queue, record.seconds - queue)
    prefill = min(record.prefill_s or 0.0, record.seconds - queue)
    left = record.seconds - queue - prefill
    later = [r for r, phase in zip(rounds, phases_of(rounds), strict=True) if phase == "decode"]
    draft, verify = (sum(getattr(r, name) for r in later) / 1e6 for name in ("draft_us", "target_us"))
    scale = min(1.0, left / (draft + verify)) if draft + verify else 1.0
    draft, verify = draft * scale, verify * scale
    return Phases(queue, prefill, draft, verify, max(0.0, left - draft - verify))


def phases_of(rounds: Rounds) -> list[Phase]:
    """The phase of each round: as in /metrics, the pass that gives the first token still reads the prompt."""
    first = next((i for i, r in enumerate(rounds) if r.committed), len(rounds))
    return ["prefill" if i <= first else "decode" for i in range(len(rounds))]


def reading_s(turns: Iterable[Rounds]) -> float | None:
    """Seconds per prompt token in the fastest pass that read many; None: there was none.

    The fastest: what prefix reuse saved is then a lower bound.
    """
    speeds = [
        r.target_us / 1e6 / r.rows
        for rounds in turns
        for r, phase in zip(rounds, phases_of(rounds), strict=True)
        if phase == "prefill" and r.rows >= MIN_READ_ROWS
    ]
    return min(speeds, default=None)


def round_starts(record: RequestRecord, rounds: Rounds) -> list[float]:
    """Seconds from the arrival at which each round is shown: in order, with even gaps within its phase."""
    own, kinds = phases(record, rounds), phases_of(rounds)
    starts: list[float] = []
    spans: dict[Phase, tuple[float, float]] = {
        "prefill": (own.queue, own.prefill),
        "decode": (own.queue + own.prefill, own.draft + own.verify + own.other),
    }
    for phase, (at, length) in spans.items():
        members = [r for r, kind in zip(rounds, kinds, strict=True) if kind == phase]
        busy = sum(_round_s(r) for r in members)
        scale = min(1.0, length / busy) if busy else 1.0
        gap = max(0.0, length - busy) / len(members) if members else 0.0
        for r in members:
            starts.append(at)
            at += _round_s(r) * scale + gap
    return starts


def _round_s(r: RoundRecord | RoundTiming) -> float:
    return (r.draft_us + r.target_us) / 1e6


@dataclass(frozen=True, slots=True)
class TurnComparison:
    ratio: float | None  # time of the baseline's turn over that of the candidate's
    same: bool | None  # texts are identical; None: not recorded


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs of one conversation, turn by turn."""

    turns: tuple[TurnComparison, ...]  # that both have
    speedup: float | None  # of these turns, without the time between them
    same: int  # turns with identical texts
    differing: int
    unknown: int  # texts are not recorded


def compare(baseline: Sequence[RequestRecord], candidate: Sequence[RequestRecord]) -> Comparison:
    shared = list(zip(baseline, candidate, strict=False))
    turns = tuple(TurnComparison(_ratio(a.seconds, b.seconds), _same(a, b)) for a, b in shared)
    texts = [turn.same for turn in turns]
    return Comparison(
        turns,
        _ratio(sum(a.seconds for a, _ in shared), sum(b.seconds for _, b in shared)),
        texts.count(True),
        texts.count(False),
        texts.count(None),
    )


def _same(a: RequestRecord, b: RequestRecord) -> bool | None:
    return None if a.output is None or b.output is None else a.output == b.output


def _ratio(a: float, b: float) -> float | None:
    return a / b if b > 0 else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _sum_of(counts: Iterable[Any]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            total[name] = total.get(name, 0) + count
    return total
