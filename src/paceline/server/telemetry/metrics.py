"""Counts of everything the server does, for Prometheus."""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Concatenate, Final, ParamSpec

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from paceline.server.telemetry.metric_definitions import Common, Own
from paceline.trace.record import RequestStats
from paceline.types import Draft, Finish, Round, Seq
from paceline.web.api_errors import REFUSALS

P = ParamSpec("P")

DEFAULT_ROUTE: Final = "default"
OTHER: Final = "other"  # stands for every name that is not known
POSITIONS: Final = 16  # told apart; a guess further ahead is at DEEPER
DEEPER: Final = f"{POSITIONS}+"
NONE: Final = "none"  # a list of drafters that is empty
MOST_LISTS: Final = 32  # of drafters, used as a label
MOST_ROUTES: Final = 64  # names ever used as a label
MOST_LIVE: Final = 8192  # outputs remembered at once
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
    """Whatever goes wrong in counting must not reach those who generate."""

    def safely(self: "Metrics", /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            event(self, *args, **kwargs)
        except Exception:
            self._own.faults.inc()
            _log.debug("an event could not be counted", exc_info=True)

    return safely


class Metrics:
    """A sink of rounds. Names of routes and drafters that are not known are counted together."""

    def __init__(
        self,
        model: str,
        drafters: Collection[str],
        running: Callable[[], float],
        waiting: Callable[[], float],
        cache_use: Callable[[], float],
        routes: Collection[str] = (),
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        registry = CollectorRegistry()
        self._exposed = _WithoutBirths(registry)
        self._common = Common(registry, model)
        self._own = Own(registry)
        self._drafters = frozenset(drafters)
        self._routes: dict[str, _Route] = {}
        self._live: dict[str, _Live] = {}
        self._lists: set[str] = set()  # of drafters, that may be labels
        self._passes = _Passes()
        self._clock = clock
        self.add_routes((DEFAULT_ROUTE, OTHER, *routes))
        _read(self._common.running, running)
        _read(self._common.waiting, waiting)
        _read(self._common.cache_use, cache_use)
        _read(self._own.cache_use, cache_use)

    def add_routes(self, names: Iterable[str]) -> None:
        """Adds names that may be labels; those after the first MOST_ROUTES stay unknown."""
        for name in names:
            if name not in self._routes and len(self._routes) < MOST_ROUTES:
                self._routes[name] = _Route(self._own, name)

    @_counted
    def set_route(self, seq_id: str, route: str) -> None:
        """To be told before the output's first round."""
        self._remember(seq_id, route)

    @_counted
    def round(self, r: Round) -> None:
        live = self._live.get(r.request) or self._remember(r.request, DEFAULT_ROUTE)
        self._time(r, live)
        if r.tokens:
            self._common.generation_tokens.inc(len(r.tokens))
            asked = live.route.asked(self._list(r.drafters))
            asked.tokens_per_pass.observe(len(r.tokens))
            if not len(r.draft):
                asked.plain_rounds.inc()
        if len(r.draft):
            self._count_draft(r, live.route)
        for name in r.draft.rejected_sources:
            self._own.rejected_by_grammar.labels(live.route.name, self._drafter(name)).inc()

    @_counted
    def finish(self, seq: Seq, reason: Finish) -> None:
        self._live.pop(seq.id, None)

    @_counted
    def finished(self, stats: RequestStats) -> None:
        common = self._common
        common.ended(_VLLM_REASON[stats.finish or "cancelled"]).inc()
        common.request.observe(stats.seconds)
        if stats.passes:
            common.prompt_tokens.inc(stats.prompt_tokens)
            common.cache_queries.inc(stats.prompt_tokens)
            common.cache_hits.inc(stats.cached_tokens)
            common.queue.observe(stats.queue_s)
        if stats.first_token_s is not None and stats.prefill_s is not None:
            common.first_token.observe(stats.first_token_s)
            common.prefill.observe(stats.prefill_s)
            common.decode.observe(stats.decode_s)
        if stats.token_s is not None:
            common.per_token.observe(stats.token_s)
        if stats.lossy:
            self._route(stats.route).lossy_requests.inc()

    @_counted
    def refused(self, reason: str) -> None:
        """A request was not admitted."""
        self._own.refused.labels(reason if reason in REFUSALS else OTHER).inc()

    @_counted
    def learn_text(self) -> None:
        self._own.learn_texts.inc()

    @_counted
    def learn_steps(self, steps: int) -> None:
        self._own.learn_steps.inc(steps)

    @_counted
    def learn_outcome(self, outcome: str) -> None:
        """made, refused or failed."""
        self._own.learn_versions.labels(outcome).inc()

    @_counted
    def drafter_version(self, drafter: str, version: int) -> None:
        self._own.drafter_version.labels(drafter).set(version)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The body and its content type: OpenMetrics if the Accept header asks for it."""
        encode, content_type = choose_encoder(accept)
        return encode(self._exposed), content_type

    def _remember(self, seq_id: str, route: str) -> "_Live":
        while len(self._live) >= MOST_LIVE:
            self._live.pop(next(iter(self._live)), None)
        live = self._live[seq_id] = _Live(self._route(route))
        return live

    def _route(self, name: str) -> "_Route":
        return self._routes.get(name) or self._routes[OTHER]

    def _drafter(self, name: str) -> str:
        return name if name in self._drafters else OTHER

    def _list(self, drafters: Sequence[str]) -> str:
        """A label for those who were to be asked; lists after the first MOST_LISTS are counted together."""
        name = "+".join(self._drafter(drafter) for drafter in drafters) or NONE
        if name not in self._lists and len(self._lists) < MOST_LISTS:
            self._lists.add(name)
        return name if name in self._lists else OTHER

    def _time(self, r: Round, live: "_Live") -> None:
        if self._passes.begins(r):
            self._own.batch_size.observe(r.batch)
        reads_prompt = not r.tokens or live.wrote_at is None
        asked = live.route.asked(self._list(r.drafters))
        spent = live.route.prefill_seconds if reads_prompt else asked.verify_seconds
        spent.inc(target_share(r))
        for name, seconds in draft_shares(r).items():
            live.route.draft_seconds(self._drafter(name)).inc(seconds)
        if r.tokens:
            now = self._clock()
            if live.wrote_at is not None:
                self._common.inter_token.observe(now - live.wrote_at)
            live.wrote_at = now

    def _count_draft(self, r: Round, route: "_Route") -> None:
        self._common.drafts.inc()
        self._common.draft_tokens.inc(len(r.draft))
        self._common.accepted_tokens.inc(len(r.path))
        depths = _depths(r.draft)
        for position in range(min(max(depths), POSITIONS)):
            reached = self._common.accepted_at(position)  # shown from the first time it was guessed
            if position < len(r.path):
                reached.inc()
        kept = set(r.path)
        for node, depth in enumerate(depths):
            source = r.draft.sources[node] if r.draft.sources else OTHER
            drafted, accepted = route.nodes(self._drafter(source), depth - 1)
            drafted.inc()
            if node in kept:
                accepted.inc()


@dataclass(slots=True)
class _Live:
    """An output being written."""

    route: "_Route"
    wrote_at: float | None = None  # when its last tokens came


class _Route:
    """The own metrics of one route, looked up once."""

    def __init__(self, own: Own, name: str) -> None:
        self.name = name
        self.prefill_seconds = own.prefill_seconds.labels(name)
        self.lossy_requests = own.lossy_requests.labels(name)
        self._own = own
        self._lists: dict[str, _Asked] = {}
        self._seconds: dict[str, Counter] = {}
        self._nodes: dict[tuple[str, int], tuple[Counter, Counter]] = {}

    def asked(self, drafters: str) -> "_Asked":
        if drafters not in self._lists:
            self._lists[drafters] = _Asked(self._own, self.name, drafters)
        return self._lists[drafters]

    def draft_seconds(self, drafter: str) -> Counter:
        if drafter not in self._seconds:
            self._seconds[drafter] = self._own.draft_seconds.labels(self.name, drafter)
        return self._seconds[drafter]

    def nodes(self, drafter: str, position: int) -> tuple[Counter, Counter]:
        """Those drafted and those accepted."""
        key = (drafter, min(position, POSITIONS))
        found = self._nodes.get(key)
        if found is None:
            labels = (self.name, drafter, str(position) if position < POSITIONS else DEEPER)
            found = self._own.drafted.labels(*labels), self._own.accepted.labels(*labels)
            self._nodes[key] = found
        return found


class _Asked:
    """The own metrics of one route and one list of drafters."""

    def __init__(self, own: Own, route: str, drafters: str) -> None:
        self.verify_seconds = own.verify_seconds.labels(route, drafters)
        self.plain_rounds = own.plain_rounds.labels(route, drafters)
        self.tokens_per_pass = own.tokens_per_pass.labels(route, drafters)


class _Passes:
    """Tells the first round of each pass: a pass reports one round for each of its outputs, in one go."""

    def __init__(self) -> None:
        self._cost = (0, 0, 0, 0)
        self._to_come = 0

    def begins(self, r: Round) -> bool:
        if not r.rows:  # an output that failed before any pass
            return False
        cost = (r.batch, r.rows, r.draft_us, r.target_us)
        first = self._to_come == 0 or cost != self._cost
        self._to_come = (r.batch if first else self._to_come) - 1
        self._cost = cost
        return first


class _WithoutBirths(Collector):
    """Leaves out when each counter was made: there are clients who add up every line of a name."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family


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
    """How many guesses lead to each node, itself among them."""
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
        except Exception:  # one gauge that cannot be read leaves the others readable
            return math.nan

    gauge.set_function(safely)
