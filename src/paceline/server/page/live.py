"""GET /page/live and /page/hour: requests in flight, the figures of `/metrics`, the last hour of the store.

Figures are read from the same registry that `/metrics` shows, those of requests from `RequestOutput.stats`.
A key sees the requests it sent, an operator those of all.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from prometheus_client import Metric
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.errors import StoreError
from paceline.server.admission import Admission, RequestContext
from paceline.server.request_log import REFUSED, RequestLog
from paceline.trace.record import RequestRecord
from paceline.web.api_errors import ApiError

if TYPE_CHECKING:  # a server without traces starts without a database
    from paceline.trace.store import Store

FIGURES_S: Final = 0.5  # how long figures are shared by all who look
HOUR_S: Final = 3600
HOUR_EVERY_S: Final = 10.0  # how long the last hour is shared
MAX_REQUESTS: Final = 100  # in flight, that are listed
MAX_RECORDS: Final = 4000  # of the last hour, newest first: more would take time from the engine
Figures = dict[str, Any]


class LiveServing:
    """store: None: traces are off, and there is no last hour."""

    def __init__(
        self,
        admission: Admission,
        log: RequestLog,
        store: "Store | None" = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._admission, self._log = admission, log
        self._store, self._clock = store, clock
        self._figures: tuple[float, Figures] = (-1.0, {})
        self._hours: dict[str | None, tuple[float, Figures]] = {}  # by key; None: of all
        self._reading = asyncio.Lock()  # one reader of the store at a time: answers come first

    async def live(self, http: Request) -> Response:
        now = self._clock()
        if now - self._figures[0] >= FIGURES_S or now < self._figures[0]:
            self._figures = now, self._read_figures()
        shown = self._visible(http)
        listed = sorted(shown, key=lambda context: context.arrived)[:MAX_REQUESTS]
        requests = [_in_flight(context) for context in listed]
        more = len(shown) - len(listed)
        return JSONResponse({"at": now, "requests": requests, "more": more, "figures": self._figures[1]})

    async def hour(self, http: Request) -> Response:
        """The requests that ended in the last hour, by minute and route."""
        operator, key = self._admission.is_operator(http.state.key), http.state.key
        if self._store is None or (key is None and not operator):
            return JSONResponse(
                {"stored": self._store is not None, "minutes": [], "routes": [], "total": None}
            )
        client = None if operator else key.name
        async with self._reading:
            made, found = self._hours.get(client, (-HOUR_EVERY_S, {}))
            if not 0 <= self._clock() - made < HOUR_EVERY_S:
                found = await asyncio.to_thread(self._read_hour, self._store, client)
                self._hours = {who: old for who, old in self._hours.items() if who in self._known()}
                self._hours[client] = self._clock(), found
        return JSONResponse(found)

    def _known(self) -> set[str | None]:
        """Those whose last hour is kept: a key that is gone leaves nothing behind."""
        return {None, *self._admission.key_names}

    def _visible(self, http: Request) -> list[RequestContext]:
        key, all_of_them = http.state.key, list(self._admission.in_flight.values())
        if self._admission.is_operator(key):
            return all_of_them
        return [context for context in all_of_them if key is not None and context.client == key.name]

    def _read_figures(self) -> Figures:
        metrics = self._log.metrics
        return read_figures(metrics.collect()) | {
            "routes": {name: asdict(figures) for name, figures in metrics.measured().items()}
        }

    def _read_hour(self, store: "Store", client: str | None) -> Figures:
        now = self._clock()
        try:
            records = store.list(MAX_RECORDS, client=client, since=now - HOUR_S)
        except StoreError:
            raise ApiError(
                503, "the trace store cannot be read now", "server_error", retry_after=5, refusal=None
            ) from None
        begin = records[-1].created if len(records) == MAX_RECORDS else now - HOUR_S
        return {"stored": True, "since": begin, "until": now, **by_minute(records)}


def _in_flight(context: RequestContext) -> Figures:
    """One request; its figures are those of all its choices, its progress that of the first."""
    outputs = context.outputs
    stats = [output.stats() for output in outputs]
    shown: Figures = {
        "id": context.id,
        "endpoint": context.endpoint,
        "model": context.model.name,
        "route": context.route.name,
        "client": context.client,
        "stream": context.request.streams,
        "seconds": time.perf_counter() - context.arrived,
        "choices": len(outputs),
        "state": "loading" if context.loaded is None else "preparing",
    }
    if not outputs:
        return shown
    seq, first = outputs[0].seq, stats[0]
    room = max(1, min(seq.params.max_tokens, context.engine.llm.target.max_context - seq.prompt_len))
    state = "queued" if not first.passes else "reading" if first.first_token_s is None else "writing"
    return shown | {
        "state": state,
        "drafters": list(seq.spec.drafters),
        "prompt_tokens": first.prompt_tokens,
        "cached_tokens": first.cached_tokens,
        "read_tokens": min(seq.computed, seq.prompt_len),
        "output_tokens": sum(one.output_tokens for one in stats),
        "max_tokens": room * len(outputs),
        "tokens_per_pass": first.tokens_per_pass,
        "first_token_s": first.first_token_s,
        "token_s": first.token_s,
    }


class Samples:
    """The samples of a registry, to be summed over labels."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for family in families:
            for sample in family.samples:
                self._samples[sample.name].append((sample.labels, sample.value))

    def total(self, name: str) -> float:
        return sum(value for _, value in self._samples[name])

    def by(self, name: str, label: str) -> Counter[str]:
        sums: Counter[str] = Counter()
        for labels, value in self._samples[name]:
            sums[labels[label]] += value  # type: ignore[assignment]
        return sums

    def buckets(self, name: str) -> list[tuple[float, float]]:
        """Upper bounds, and the observations up to each: of all labels together."""
        sums = self.by(f"{name}_bucket", "le")
        return sorted((float(bound), count) for bound, count in sums.items())


def histogram_quantile(p: float, buckets: Sequence[tuple[float, float]]) -> float | None:
    """Linear within a bucket, as PromQL's function of this name; None without observations."""
    if not buckets or not buckets[-1][1]:
        return None
    rank, lower, before = p * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * ((rank - before) / (count - before) if count > before else 1.0)
        lower, before = bound, count
    return lower


def read_figures(families: Iterable[Metric]) -> Figures:
    """Sums since the start of the server, and gauges as they are now, from the families of `/metrics`."""
    found = Samples(families)
    rounds = found.total("paceline_tokens_per_pass_count")
    batch = found.buckets("paceline_batch_size")
    counts = [(b, n - m) for (_, m), (b, n) in pairwise([(0.0, 0.0), *batch])]
    queries = found.total("vllm:prefix_cache_queries_total")
    return {
        "running": found.total("vllm:num_requests_running"),
        "waiting": found.total("vllm:num_requests_waiting"),
        "cache_use": found.total("paceline_cache_use"),
        "cached_share": found.total("vllm:prefix_cache_hits_total") / queries if queries else None,
        "cached_by_tier": dict(found.by("paceline_prefix_cache_hits_total", "tier")),
        "generation_tokens": found.total("vllm:generation_tokens_total"),
        "prompt_tokens": found.total("vllm:prompt_tokens_total"),
        "rounds": rounds,
        "plain_rounds": found.total("paceline_plain_rounds_total"),
        "tokens_per_pass": found.total("paceline_tokens_per_pass_sum") / rounds if rounds else None,
        "batch_size": [["inf" if bound == float("inf") else bound, count] for bound, count in counts],
        "passes": found.total("paceline_batch_size_count"),
        "ended": dict(found.by("vllm:request_success_total", "finished_reason")),
        "refused": dict(found.by("paceline_refused_total", "reason")),
        "acceptance": {
            label: _rates(
                found.by("paceline_drafted_total", label), found.by("paceline_accepted_total", label)
            )
            for label in ("position", "drafter", "route")
        },
        "first_token_s": _quantiles(found.buckets("vllm:time_to_first_token_seconds")),
        "token_s": _quantiles(found.buckets("vllm:request_time_per_output_token_seconds")),
    }


def _quantiles(buckets: Sequence[tuple[float, float]]) -> dict[str, float | None]:
    return {f"p{p}": histogram_quantile(p / 100, buckets) for p in (50, 95)}


def _exact_quantiles(values: Sequence[float]) -> dict[str, float | None]:
    return {f"p{p}": float(np.quantile(values, p / 100)) if values else None for p in (50, 95)}


def _rates(drafted: Mapping[str, float], accepted: Mapping[str, float]) -> list[Figures]:
    return [
        {"name": name, "drafted": total, "accepted": accepted.get(name, 0.0)}
        for name, total in drafted.items()
        if total
    ]


def by_minute(records: Sequence[RequestRecord]) -> Figures:
    """Totals, one row for each minute that has requests, and one for each route."""
    minutes: defaultdict[int, list[RequestRecord]] = defaultdict(list)
    routes: defaultdict[str, list[RequestRecord]] = defaultdict(list)
    for record in records:
        minutes[int(record.created // 60) * 60].append(record)
        routes[record.route].append(record)
    return {
        "minutes": [{"at": at, **_sums(minutes[at])} for at in sorted(minutes)],
        "routes": [{"route": route, **_sums(routes[route])} for route in sorted(routes)],
        "total": _sums(records),
    }


def _sums(records: Sequence[RequestRecord]) -> Figures:
    ran = [record for record in records if record.finish != REFUSED]
    firsts = [record.first_token_s for record in ran if record.first_token_s is not None]
    per_token = [record.token_s for record in ran if record.token_s is not None]
    passes, drafted = sum(r.passes for r in ran), sum(r.drafted for r in ran)
    return {
        "requests": len(ran),
        "refused": len(records) - len(ran),
        "errors": sum(record.finish == "error" for record in ran),
        "prompt_tokens": sum(record.prompt_tokens for record in ran),
        "cached_tokens": sum(record.cached_tokens for record in ran),
        "output_tokens": sum(record.output_tokens for record in ran),
        "tokens_per_pass": sum(r.output_tokens for r in ran) / passes if passes else None,
        "acceptance": sum(record.accepted for record in ran) / drafted if drafted else None,
        "first_token_s": _exact_quantiles(firsts),
        "token_s": _exact_quantiles(per_token),
    }
