"""The gate's Prometheus metrics."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.samples import Sample

from paceline.gate.gateway.circuit_breaker import STATES
from paceline.gate.gateway.upstream_client import UpstreamState
from paceline.gate.upstream_metrics import UpstreamCounters

_SECONDS: Final = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    *(163.84, 327.68),
)
_PREFIX: Final = "paceline_gate_"


class GateMetrics:
    """Counters are without their `_total`, which the wire format adds."""

    def __init__(self, states: Callable[[], Mapping[str, UpstreamState]]) -> None:
        self._registry, self._states = CollectorRegistry(), states

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, meaning, labels, registry=self._registry)

        def gauge(name: str, meaning: str, *labels: str) -> Gauge:
            return Gauge(_PREFIX + name, meaning, labels, registry=self._registry)

        def seconds(name: str, meaning: str) -> Histogram:
            labels = ("route", "upstream")
            return Histogram(
                f"{_PREFIX}{name}_seconds", meaning, labels, registry=self._registry, buckets=_SECONDS
            )

        self._requests = counter("requests", "Requests by their end", "route", "upstream", "outcome")
        self._first_byte = seconds("first_byte", "Arrival to the first event or the whole answer")
        self._request = seconds("request", "Arrival to end")
        self._failures = counter("upstream_failures", "Failed attempts", "route", "upstream", "code")
        self._retries = counter("retries", "Attempts after the first", "route")
        self._refused = counter("refused", "Requests not admitted", "reason")
        self._mirrored = counter("mirror", "Second legs by outcome", "route", "outcome")
        self._feedback = counter("feedback", "Words of users", "arm", "kind")
        self._breaker = gauge("breaker_state", "0 closed, 1 half-open, 2 open", "upstream")
        self._in_flight = gauge("upstream_requests", "Requests in flight", "upstream")
        self.mirror_waiting = gauge("mirror_waiting", "Second legs that wait")
        self.mirror_running = gauge("mirror_running", "Second legs in flight")
        self._share = gauge("candidate_share", "Of users, by rollout", "experiment")
        self._figures = gauge("upstream_figure", "By the upstream's own counters", "upstream", "figure")

    def finished(
        self,
        route: str,
        upstream: str,
        outcome: str,
        first_byte_s: float | None,
        seconds: float,
        attempts: int,
    ) -> None:
        self._requests.labels(route, upstream, outcome).inc()
        self._request.labels(route, upstream).observe(seconds)
        if first_byte_s is not None:
            self._first_byte.labels(route, upstream).observe(first_byte_s)
        if attempts > 1:
            self._retries.labels(route).inc(attempts - 1)

    def failure(self, route: str, upstream: str, code: str) -> None:
        self._failures.labels(route, upstream, code).inc()

    def refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def mirrored(self, route: str, outcome: str) -> None:
        """outcome: "recorded", or why there is no pair."""
        self._mirrored.labels(route, outcome).inc()

    def mirror_health(self, route: str) -> dict[str, Any]:
        """Requests of the route, second legs by outcome, and those that wait or run, of all routes."""
        requests = sum(_values(self._requests, route=route))
        outcomes = {
            sample.labels["outcome"]: int(sample.value) for sample in _samples(self._mirrored, route=route)
        }
        recorded = outcomes.get("recorded", 0)
        return {
            "requests": int(requests),
            "outcomes": outcomes,
            "recorded_share": recorded / requests if requests else None,
            "waiting": int(sum(_values(self.mirror_waiting))),
            "running": int(sum(_values(self.mirror_running))),
        }

    def feedback(self, arm: str, kind: str) -> None:
        self._feedback.labels(arm, kind).inc()

    def candidate_share(self, experiment: str, share: float) -> None:
        self._share.labels(experiment).set(share)

    def upstream_read(self, upstream: str, growth: UpstreamCounters, seconds: float) -> None:
        """Figures of the last seconds: those that the upstream reports."""
        figures = {"tokens_per_second": growth.generated_tokens / seconds if seconds > 0 else None}
        if growth.generated_tokens:
            figures["tokens_per_pass"] = growth.tokens_per_pass
        if growth.draft_tokens:
            figures["acceptance"] = growth.acceptance
        if (gpu_s := growth.gpu_s(seconds)) is not None:
            figures["gpu_utilization"] = gpu_s / (seconds * max(1, growth.gpus)) if seconds > 0 else None
        for name, value in figures.items():
            if value is not None:
                self._figures.labels(upstream, name).set(value)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """accept: the header. The body and its content type."""
        for name, state in self._states().items():
            self._breaker.labels(name).set(STATES.index(state.breaker.state))
            self._in_flight.labels(name).set(state.in_flight)
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type


def _samples(metric: Counter | Gauge, **labels: str) -> list[Sample]:
    """Those with these labels, without the times of their creation."""
    found = [sample for family in metric.collect() for sample in family.samples]
    return [
        sample
        for sample in found
        if not sample.name.endswith("_created") and labels.items() <= sample.labels.items()
    ]


def _values(metric: Counter | Gauge, **labels: str) -> list[float]:
    return [sample.value for sample in _samples(metric, **labels)]
