"""Prometheus metrics: a sink of rounds, and counts of requests. metric_definitions.py names them."""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Concatenate, Final, ParamSpec

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from paceline.server.telemetry.metric_definitions import (
    PacelineMetrics,
    VllmMetrics,
    disk_cache_bytes,
    disk_cache_limit,
    disk_cache_pages,
    lost_traces,
    route_rates,
    route_speedups,
)
from paceline.server.telemetry.route_accounting import RouteAccounting, RouteFigures
from paceline.target.cost import PassCost
from paceline.trace.record import RequestStats
from paceline.types import DiskCacheStats, Draft, Finish, Round, Seq
from paceline.web.api_errors import REFUSALS

P = ParamSpec("P")

DEFAULT_ROUTE: Final = "default"
OTHER: Final = "other"  # the label of every unknown name
MAX_POSITIONS: Final = 16  # with a label of their own; later ones share LATER
LATER: Final = f"{MAX_POSITIONS}+"
NONE: Final = "none"  # the label of an empty list of drafters
MAX_LISTS: Final = 32  # lists of drafters with a label of their own
MAX_ROUTES: Final = 64  # routes with a label of their own
MAX_IGNORED: Final = 64  # unknown parameters with a label of their own
SERVER_WIDE: Final = frozenset(  # metrics of no model: those of the first one count for all
    ["paceline_refused", "paceline_ignored_parameters", "paceline_traces_lost"]
)
MAX_LIVE: Final = 8192  # outputs in flight with a known route
_VLLM_REASON: Final[dict[Finish, str]] = {
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "error": "error",
}

_log = logging.getLogger(__name__)


def _counted(
    event: Callable[Concatenate["Metrics", P], None],
) -> Callable[Concatenate["Metrics", P], None]:
    """Counts an exception instead of raising it: metrics must never disturb a request."""

    def safely(self: "Metrics", /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            event(self, *args, **kwargs)
        except Exception:
            self._paceline.faults.inc()
            _log.debug("an event could not be counted", exc_info=True)

    return safely


class Metrics:
    """A sink of rounds. Unknown routes and drafters share one label, so that no client can add labels."""

    def __init__(
        self,
        model: str,
        drafters: Collection[str],
        running: Callable[[], float],
        waiting: Callable[[], float],
        cache_use: Callable[[], float],
        routes: Collection[str] = (),
        lost: Callable[[], Mapping[str, int]] | None = None,
        clock: Callable[[], float] = perf_counter,
        accounting: RouteAccounting | None = None,
        disk: Callable[[], DiskCacheStats | None] = lambda: None,
    ) -> None:
        self.accounting = accounting or RouteAccounting()
        registry = CollectorRegistry()
        self._exposed = _WithoutCreated(registry)
        if lost is not None:
            registry.register(_LostTraces(lost))
        registry.register(_RouteSpeedups(self.accounting))
        registry.register(_DiskCache(disk))
        self._vllm = VllmMetrics(registry, model)
        self._paceline = PacelineMetrics(registry)
        self._drafters = frozenset(drafters)
        self._routes: dict[str, _Route] = {}
        self._live: dict[str, _Live] = {}
        self._lists: set[str] = set()  # of drafters, that may be labels
        self._ignored: set[str] = set()  # parameters that may be labels
        self._passes = _Passes()
        self._clock = clock
        self.add_routes((DEFAULT_ROUTE, OTHER, *routes))
        _read(self._vllm.running, running)
        _read(self._vllm.waiting, waiting)
        _read(self._vllm.cache_use, cache_use)
        _read(self._paceline.cache_use, cache_use)

    def set_model(self, drafters: Collection[str], cost: PassCost | None) -> None:
        """The model was loaded: its drafters, and the cost of its passes."""
        self._drafters = frozenset(drafters)
        self.accounting.cost = cost

    def add_routes(self, names: Iterable[str]) -> None:
        """Adds names that may be labels; those after the first MAX_ROUTES stay unknown."""
        for name in names:
            if name not in self._routes and len(self._routes) < MAX_ROUTES:
                self._routes[name] = _Route(self._paceline, name)

    @_counted
    def set_route(self, seq_id: str, route: str) -> None:
        """Must be called before the output's first round."""
        self._add(seq_id, route)

    @_counted
    def round(self, r: Round) -> None:
        live = self._live.get(r.request) or self._add(r.request, DEFAULT_ROUTE)
        if r.tokens and live.last_tokens_at is not None:
            self.accounting.add(live.route.name, r)
        self._time(r, live)
        if r.tokens:
            self._vllm.generation_tokens.inc(len(r.tokens))
            drafters = live.route.drafters(self._list(r.drafters))
            drafters.tokens_per_pass.observe(len(r.tokens))
            if not len(r.draft):
                drafters.plain_rounds.inc()
        if len(r.draft):
            self._count_draft(r, live.route)
        for name in r.draft.rejected_sources:
            self._paceline.rejected_by_grammar.labels(live.route.name, self._drafter(name)).inc()

    @_counted
    def finish(self, seq: Seq, reason: Finish) -> None:
        self._live.pop(seq.id, None)

    @_counted
    def finished(self, stats: RequestStats) -> None:
        vllm = self._vllm
        vllm.ended(_VLLM_REASON[stats.finish or "cancelled"]).inc()
        vllm.request.observe(stats.seconds)
        if stats.passes:
            vllm.prompt_tokens.inc(stats.prompt_tokens)
            vllm.cache_queries.inc(stats.prompt_tokens)
            vllm.cache_hits.inc(stats.cached_tokens)
            self._paceline.cache_hits.labels("memory").inc(stats.cached_tokens - stats.disk_tokens)
            self._paceline.cache_hits.labels("disk").inc(stats.disk_tokens)
            vllm.queue.observe(stats.queue_s)
        if stats.first_token_s is not None and stats.prefill_s is not None:
            vllm.first_token.observe(stats.first_token_s)
            vllm.prefill.observe(stats.prefill_s)
            vllm.decode.observe(stats.decode_s)
        if stats.token_s is not None:
            vllm.per_token.observe(stats.token_s)
        if stats.lossy:
            self._route(stats.route).lossy_requests.inc()

    @_counted
    def tool_calls(self, calls: int, undeclared: int, rejected: Iterable[str]) -> None:
        """Of one output. undeclared: calls in another form than the model's template declares."""
        self._paceline.tool_calls.labels("declared").inc(calls - undeclared)
        self._paceline.tool_calls.labels("other").inc(undeclared)
        for reason in rejected:
            self._paceline.rejected_tool_calls.labels(reason).inc()

    @_counted
    def predicted_tool_calls(self, outcomes: Mapping[str, int]) -> None:
        """outcomes: right, wrong, unknown (the answer did not end) and missed (written, not predicted)."""
        for outcome, calls in outcomes.items():
            self._paceline.predicted_tool_calls.labels(outcome).inc(calls)

    @_counted
    def refused(self, reason: str) -> None:
        """A request was not admitted."""
        self._paceline.refused.labels(reason if reason in REFUSALS else OTHER).inc()

    @_counted
    def ignored_parameter(self, name: str) -> None:
        """Names after the first MAX_IGNORED share a label, so that no client can add any number."""
        if name not in self._ignored and len(self._ignored) < MAX_IGNORED:
            self._ignored.add(name)
        self._paceline.ignored_parameters.labels(name if name in self._ignored else OTHER).inc()

    @_counted
    def model_load(self, outcome: str) -> None:
        """outcome: loaded, failed or unloaded."""
        self._paceline.model_loads.labels(outcome).inc()

    @_counted
    def training_sample(self) -> None:
        self._paceline.training_samples.inc()

    @_counted
    def training_steps(self, steps: int) -> None:
        self._paceline.training_steps.inc(steps)

    @_counted
    def training_outcome(self, outcome: str) -> None:
        """outcome: made, refused or failed."""
        self._paceline.training_outcomes.labels(outcome).inc()

    @_counted
    def drafter_version(self, drafter: str, version: int) -> None:
        self._paceline.drafter_version.labels(drafter).set(version)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The body and its content type: OpenMetrics if the Accept header asks for it."""
        encode, content_type = choose_encoder(accept)
        return encode(self._exposed), content_type

    def collect(self) -> Iterable[Metric]:
        """All that `render` shows."""
        return self._exposed.collect()

    def _add(self, seq_id: str, route: str) -> "_Live":
        while len(self._live) >= MAX_LIVE:
            self._live.pop(next(iter(self._live)), None)
        live = self._live[seq_id] = _Live(self._route(route))
        return live

    def _route(self, name: str) -> "_Route":
        return self._routes.get(name) or self._routes[OTHER]

    def _drafter(self, name: str) -> str:
        return name if name in self._drafters else OTHER

    def _list(self, drafters: Sequence[str]) -> str:
        """The label of a list of drafters; lists after the first MAX_LISTS share one."""
        name = "+".join(self._drafter(drafter) for drafter in drafters) or NONE
        if name not in self._lists and len(self._lists) < MAX_LISTS:
            self._lists.add(name)
        return name if name in self._lists else OTHER

    def _time(self, r: Round, live: "_Live") -> None:
        if self._passes.begins(r):
            self._paceline.batch_size.observe(r.batch)
        reads_prompt = not r.tokens or live.last_tokens_at is None
        drafters = live.route.drafters(self._list(r.drafters))
        spent = live.route.prefill_seconds if reads_prompt else drafters.verify_seconds
        spent.inc(target_share(r))
        for name, seconds in draft_shares(r).items():
            live.route.draft_seconds(self._drafter(name)).inc(seconds)
        if r.tokens:
            now = self._clock()
            if live.last_tokens_at is not None:
                self._vllm.inter_token.observe(now - live.last_tokens_at)
            live.last_tokens_at = now

    def _count_draft(self, r: Round, route: "_Route") -> None:
        self._vllm.drafts.inc()
        self._vllm.draft_tokens.inc(len(r.draft))
        self._vllm.accepted_tokens.inc(len(r.path))
        depths = _depths(r.draft)
        for position in range(min(max(depths), MAX_POSITIONS)):
            reached = self._vllm.accepted_at(position)  # exists from the first draft of that length
            if position < len(r.path):
                reached.inc()
        path = set(r.path)
        for node, depth in enumerate(depths):
            source = r.draft.sources[node] if r.draft.sources else OTHER
            drafted, accepted = route.nodes(self._drafter(source), depth - 1)
            drafted.inc()
            if node in path:
                accepted.inc()


class ServerMetrics(Collector):
    """The metrics of all models of a server. Of several, every sample of a model has its name as a label."""

    def __init__(self, by_model: Mapping[str, Metrics]) -> None:
        self._by_model = dict(by_model)
        self._first = next(iter(by_model.values()))

    def refused(self, reason: str) -> None:
        """A request was not admitted, whatever model it was for."""
        self._first.refused(reason)

    def ignored_parameter(self, name: str) -> None:
        """A lenient server ignored an unknown parameter of a request."""
        self._first.ignored_parameter(name)

    def measured(self) -> dict[str, RouteFigures]:
        """Of late, by route; of several models, by model and route."""
        if len(self._by_model) == 1:
            return self._first.accounting.measured()
        return {
            f"{model} {route}": figures
            for model, metrics in self._by_model.items()
            for route, figures in metrics.accounting.measured().items()
        }

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The body and its content type: OpenMetrics if the Accept header asks for it."""
        encode, content_type = choose_encoder(accept)
        return encode(self), content_type

    def collect(self) -> Iterable[Metric]:
        """All that `render` shows."""
        if len(self._by_model) == 1:
            return self._first.collect()
        families: dict[str, Metric] = {}
        for model, metrics in self._by_model.items():
            for family in metrics.collect():
                if family.name not in SERVER_WIDE:
                    family.samples = [_of_model(sample, model) for sample in family.samples]
                elif metrics is not self._first:
                    continue
                families.setdefault(family.name, _without_samples(family)).samples += family.samples
        return families.values()


def _of_model(sample: Sample, model: str) -> Sample:
    return sample._replace(labels={"model_name": model, **sample.labels})


def _without_samples(family: Metric) -> Metric:
    return Metric(family.name, family.documentation, family.type, family.unit)


@dataclass(slots=True)
class _Live:
    """An output being written."""

    route: "_Route"
    last_tokens_at: float | None = None


class _Route:
    """The paceline metrics of one route, looked up once."""

    def __init__(self, paceline: PacelineMetrics, name: str) -> None:
        self.name = name
        self.prefill_seconds = paceline.prefill_seconds.labels(name)
        self.lossy_requests = paceline.lossy_requests.labels(name)
        self._paceline = paceline
        self._lists: dict[str, _DrafterList] = {}
        self._seconds: dict[str, Counter] = {}
        self._nodes: dict[tuple[str, int], tuple[Counter, Counter]] = {}

    def drafters(self, names: str) -> "_DrafterList":
        if names not in self._lists:
            self._lists[names] = _DrafterList(self._paceline, self.name, names)
        return self._lists[names]

    def draft_seconds(self, drafter: str) -> Counter:
        if drafter not in self._seconds:
            self._seconds[drafter] = self._paceline.draft_seconds.labels(self.name, drafter)
        return self._seconds[drafter]

    def nodes(self, drafter: str, position: int) -> tuple[Counter, Counter]:
        """The counters of drafted and of accepted tokens."""
        key = (drafter, min(position, MAX_POSITIONS))
        counters = self._nodes.get(key)
        if counters is None:
            labels = (self.name, drafter, str(position) if position < MAX_POSITIONS else LATER)
            counters = self._paceline.drafted.labels(*labels), self._paceline.accepted.labels(*labels)
            self._nodes[key] = counters
        return counters


class _DrafterList:
    """The paceline metrics of one route and one list of drafters."""

    def __init__(self, paceline: PacelineMetrics, route: str, drafters: str) -> None:
        self.verify_seconds = paceline.verify_seconds.labels(route, drafters)
        self.plain_rounds = paceline.plain_rounds.labels(route, drafters)
        self.tokens_per_pass = paceline.tokens_per_pass.labels(route, drafters)


class _Passes:
    """Finds the first round of each pass: a pass reports one round for each of its outputs, in a row."""

    def __init__(self) -> None:
        self._cost = (0, 0, 0, 0)
        self._remaining = 0

    def begins(self, r: Round) -> bool:
        if not r.rows:  # an output that failed before any pass
            return False
        cost = (r.batch, r.rows, r.draft_us, r.target_us)
        first = self._remaining == 0 or cost != self._cost
        self._remaining = (r.batch if first else self._remaining) - 1
        self._cost = cost
        return first


class _WithoutCreated(Collector):
    """Drops `_created` samples; some clients sum them by mistake."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family


class _LostTraces(Collector):
    """Counts that another thread keeps."""

    def __init__(self, lost: Callable[[], Mapping[str, int]]) -> None:
        self._lost = lost

    def collect(self) -> Iterable[Metric]:
        family = lost_traces()
        for reason, requests in self._lost().items():
            family.add_metric([reason], requests)
        yield family


class _DiskCache(Collector):
    """Nothing where the KV cache has no disk tier."""

    def __init__(self, stats: Callable[[], DiskCacheStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        if stats is None:
            return
        pages = disk_cache_pages()
        for event in ("written", "dropped", "evicted", "damaged"):
            pages.add_metric([event], getattr(stats, event))
        held, limit = disk_cache_bytes(), disk_cache_limit()
        held.add_metric([], stats.bytes)
        limit.add_metric([], stats.limit_bytes)
        yield from (pages, held, limit)


class _RouteSpeedups(Collector):
    """Predicted and measured, of the routes that have them."""

    def __init__(self, accounting: RouteAccounting) -> None:
        self._accounting = accounting

    def collect(self) -> Iterable[Metric]:
        predicted, measured = self._accounting.predictions(), self._accounting.measured()
        rates, speedups = route_rates(), route_speedups()
        for route, one in predicted.items():
            rates.add_metric([route, "predicted"], one.tokens_per_pass)
            speedups.add_metric([route, "predicted"], one.speedup)
        for route, figures in measured.items():
            rates.add_metric([route, "measured"], figures.tokens_per_pass)
            speedups.add_metric([route, "measured"], figures.speedup)
        yield from (rates, speedups)


def draft_share(r: Round) -> float:
    """Seconds. The shares of a pass add up to its time."""
    return r.draft_us / 1e6 / max(1, r.batch)


def draft_shares(r: Round) -> dict[str, float]:
    """Seconds by drafter; the time to choose among their drafts belongs to none of them: ""."""
    rest = r.draft_us - sum(r.draft_us_by.values())
    return {name: us / 1e6 / max(1, r.batch) for name, us in {**r.draft_us_by, "": rest}.items() if us > 0}


def target_share(r: Round) -> float:
    return r.target_us / 1e6 / max(1, r.batch)


def _depths(draft: Draft) -> list[int]:
    """The depth of each node; those without a parent have 1."""
    if draft.parents is None:
        return list(range(1, len(draft) + 1))
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def _read(gauge: Gauge, value: Callable[[], float]) -> None:
    def safely() -> float:
        try:
            return float(value())
        except Exception:  # the other gauges stay readable
            return math.nan

    gauge.set_function(safely)
