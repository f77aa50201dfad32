"""The advice as JSON, and as a page: one HTML file with its charts, which refers to nothing outside."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from paceline.advise.advice import MIN_CONVERSATIONS, RouteAdvice
from paceline.advise.chart import LEFT, LETTER, RIGHT, STYLE, WIDTH, Chart, Series, svg
from paceline.advise.engine_flags import HAVE_MODEL, EngineFlags, Speculation, engine_flags
from paceline.advise.memory_estimate import MIB, MemoryEstimate
from paceline.advise.routes_file import route_yaml, routes_yaml
from paceline.target.cost import PassCost

TEMPLATE: Final = Path(__file__).parent / "report.html"
CHART_ROWS: Final = (1, 2, 3, 4, 6, 8, 12, 16)
CHART_CONTEXTS: Final = (256, 2048)
NOT_REPLAYED: Final = (
    "recycle is not compared: it drafts from the model's candidates for each token, which no recording holds"
)


@dataclass(frozen=True, slots=True)
class Training:
    """A drafter fitted for a few minutes on part of the traffic, measured on the rest: alone, greedy.

    Routes have what it adds to their lists.
    """

    kind: str
    minutes: float
    answers: int  # that it was fitted on
    measured_answers: int
    tokens_per_pass: float  # with drafts of the full length
    before: float | None  # of the drafter that it continued; None: it began anew


@dataclass(frozen=True, slots=True)
class Advice:
    """Everything that `paceline advise` found out."""

    target: str
    machine: Mapping[str, str]
    routes: tuple[RouteAdvice, ...]
    memory: MemoryEstimate
    costs: Mapping[int, Mapping[int, float]]  # context -> rows -> ms
    busy: bool  # the machine was, while passes were measured
    rejected: Mapping[str, int]  # records that are no requests, by reason
    training: Training | None = None
    draft_model: str | None = None
    single_user: bool = False  # requests that name nobody share drafters' memory
    heads: Mapping[str, str] = field(default_factory=dict)  # names of trained drafters, by kind
    head_lengths: Mapping[str, int] = field(default_factory=dict)  # tokens of their longest drafts, by kind

    @property
    def decides(self) -> bool:
        """There is enough data for a route, to be set or left off."""
        return any(one.decision != "too little data" for one in self.routes)

    @property
    def serve_command(self) -> str:
        """The server with these routes, and with the drafters that they need."""
        used = {name for one in self.routes if one.enabled for name in one.best.drafters}
        needs = [f"--trained {name}" for kind, name in self.heads.items() if kind in used]
        if self.draft_model is not None and "model" in used:
            needs.append(f"--draft-model {self.draft_model}")
        if self.single_user:
            needs.append("--single-user")
        return " ".join(["paceline serve", self.target, *needs, "--routes"])

    def routes_file(self, existing: Mapping[str, Any] | None = None) -> str:
        return routes_yaml(self.routes, existing, f"{self.serve_command} FILE", self.busy)

    @property
    def flags(self) -> dict[str, dict[str, EngineFlags]]:
        """For other engines, by route."""
        return {one.route: engine_flags(self._speculation(one)) for one in self.routes if one.enabled}

    def _speculation(self, one: RouteAdvice) -> Speculation:
        """Other engines draft a fixed length, which may depend on the batch."""
        length = max(length for *_, length in one.by_batch) or one.best.max_draft
        by_batch = one.by_batch if len(one.by_batch) > 1 else ()
        models = {kind: f"EXPORTED_{kind.upper()}" for kind in HAVE_MODEL}
        models["model"] = self.draft_model or "DRAFT_MODEL"
        return Speculation(one.best.drafters, length, models, by_batch, self.head_lengths)

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "machine": dict(self.machine),
            "routes": [one.as_dict() | {"config": route_yaml(one)} for one in self.routes],
            "routes_file": self.routes_file(),
            "memory": {
                **asdict(self.memory),
                "cache_mb": self.memory.cache_mb,
                "verdict": self.memory.verdict,
            },
            "cost_by_context": {
                str(c): {str(n): ms for n, ms in row.items()} for c, row in self.costs.items()
            },
            "busy": self.busy,
            "not_compared": NOT_REPLAYED,
            "min_conversations": MIN_CONVERSATIONS,
            "rejected": dict(self.rejected),
            "training": None if self.training is None else asdict(self.training),
            "flags": {r: {e: given.text for e, given in by.items()} for r, by in self.flags.items()},
            "flag_notes": {r: {e: given.notes for e, given in by.items()} for r, by in self.flags.items()},
        }


def cost_table(cost: PassCost) -> dict[int, dict[int, float]]:
    """The curve at a few points, for reports."""
    return {c: {n: round(cost(n, c), 3) for n in CHART_ROWS} for c in CHART_CONTEXTS}


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def html(advice: Advice) -> str:
    from jinja2 import Environment, select_autoescape

    environment = Environment(
        autoescape=select_autoescape(default=True), trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["mib"] = lambda size: f"{size / MIB:,.0f} MiB"
    environment.globals.update(counted=counted, few=MIN_CONVERSATIONS, not_replayed=NOT_REPLAYED)
    environment.filters["percent"] = lambda share: f"{100 * share:.0f} %"
    template = environment.from_string(TEMPLATE.read_text("utf-8"))
    charts = {one.route: [svg(chart) for chart in _route_charts(one)] for one in advice.routes}
    summary = [svg(_summary_chart(advice.routes)), svg(_cost_chart(advice.costs))]
    return template.render(advice=advice, charts=charts, summary=summary, chart_style=STYLE)


def _summary_chart(routes: Sequence[RouteAdvice]) -> Chart:
    decoding = Series(
        "decoding",
        [one.best.speedup.value for one in routes],
        [(one.best.speedup.low, one.best.speedup.high) for one in routes],
    )
    turns = Series(
        "whole turns",
        [one.best.turn_speedup.value for one in routes],
        [(one.best.turn_speedup.low, one.best.turn_speedup.high) for one in routes],
    )
    room = int((WIDTH - LEFT - RIGHT) / len(routes) / LETTER)  # letters under a pair of bars
    names = [one.route if len(one.route) <= room else f"{one.route[: max(1, room - 1)]}…" for one in routes]
    return Chart("Expected speed-up", "", "times plain", names, (decoding, turns), bars=True, level=1.0)


def _cost_chart(costs: Mapping[int, Mapping[int, float]]) -> Chart:
    lines = [Series(f"after {context} tokens", list(row.values())) for context, row in costs.items()]
    return Chart("A pass of the target", "rows", "ms", list(CHART_ROWS), lines)


def _route_charts(one: RouteAdvice) -> list[Chart]:
    lengths = [point.draft_length for point in one.lengths]
    by_length = Chart(
        "Drafts of a fixed length",
        "draft length",
        "times plain",
        lengths,
        (
            Series("tokens per pass", [point.tokens_per_pass for point in one.lengths]),
            Series("speed-up", [point.speedup for point in one.lengths]),
        ),
        level=1.0,
    )
    loads = [f"{point.concurrency}" for point in one.loads]
    by_load = Chart(
        "Speed-up under load",
        "outputs at once",
        "times plain",
        loads,
        (Series("speed-up", [point.speedup for point in one.loads]),),
        bars=True,
        level=1.0,
    )
    return [by_length, by_load]
