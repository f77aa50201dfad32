"""Every Prometheus metric: name, type, labels and buckets. Counters end in `_total` on the wire.

Those with the prefix `vllm:` have vLLM's names, meaning and buckets, so that its dashboards work.
"""

from collections.abc import Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

_FIRST_TOKEN: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
    *(40.0, 80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
    *(40.0, 80.0),
)
_REQUEST: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0),
    *(480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS_PER_PASS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48)
_BATCH: Final = (1, 2, 4, 8, 16, 32, 64, 128)


class VllmMetrics:
    """Metrics that vLLM has too, for one model."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        labels = ["model_name"]

        def gauge(name: str, meaning: str) -> Gauge:
            return Gauge(f"vllm:{name}", meaning, labels, registry=registry).labels(model)

        def counter(name: str, meaning: str) -> Counter:
            return Counter(f"vllm:{name}", meaning, labels, registry=registry).labels(model)

        def seconds(name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
            name = f"vllm:{name}_seconds"
            return Histogram(name, meaning, labels, registry=registry, buckets=buckets).labels(model)

        self.running = gauge("num_requests_running", "Outputs being written")
        self.waiting = gauge("num_requests_waiting", "Outputs waiting to be scheduled")
        self.cache_use = gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1")
        self.cache_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self.cache_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of ended outputs")
        self.generation_tokens = counter("generation_tokens", "Tokens written")
        self.drafts = counter("spec_decode_num_drafts", "Drafts verified")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens verified")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Draft tokens accepted")
        self.first_token = seconds("time_to_first_token", "Arrival to first token", _FIRST_TOKEN)
        self.inter_token = seconds("inter_token_latency", "Between rounds that wrote tokens", _PER_TOKEN)
        self.per_token = seconds("request_time_per_output_token", "Per token after the first", _PER_TOKEN)
        self.request = seconds("e2e_request_latency", "Arrival to end", _REQUEST)
        self.queue = seconds("request_queue_time", "Arrival to the first pass", _REQUEST)
        self.prefill = seconds("request_prefill_time", "First pass to first token", _REQUEST)
        self.decode = seconds("request_decode_time", "First token to last", _REQUEST)
        self._model = model
        self._ended = Counter(
            "vllm:request_success",
            "Ended outputs by reason",
            [*labels, "finished_reason"],
            registry=registry,
        )
        self._accepted_at = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts in which this position was accepted; the first is 0",
            [*labels, "position"],
            registry=registry,
        )
        self._positions: dict[int, Counter] = {}
        for reason in ("stop", "length", "abort", "error"):
            self.ended(reason)

    def ended(self, reason: str) -> Counter:
        return self._ended.labels(self._model, reason)

    def accepted_at(self, position: int) -> Counter:
        if position not in self._positions:
            self._positions[position] = self._accepted_at.labels(self._model, str(position))
        return self._positions[position]


class PacelineMetrics:
    """Metrics that only paceline has."""

    def __init__(self, registry: CollectorRegistry) -> None:
        route, drafter, node = ["route"], ["route", "drafter"], ["route", "drafter", "position"]

        def counter(name: str, meaning: str, labels: Sequence[str]) -> Counter:
            return Counter(f"paceline_{name}", meaning, labels, registry=registry)

        def histogram(name: str, meaning: str, labels: Sequence[str], buckets: Sequence[float]) -> Histogram:
            return Histogram(f"paceline_{name}", meaning, labels, registry=registry, buckets=buckets)

        self.drafted = counter("drafted", "Tokens drafted", node)
        self.accepted = counter("accepted", "Draft tokens accepted", node)
        self.rejected_by_grammar = counter(
            "rejected_by_grammar", "Drafted tokens that the output's grammar forbids", drafter
        )
        self.draft_seconds = counter("draft_seconds", "Time spent drafting", drafter)
        self.prefill_seconds = counter("prefill_seconds", "Time of passes that read prompts", route)
        self.verify_seconds = counter("verify_seconds", "Time of passes that decode", drafter)
        self.plain_rounds = counter("plain_rounds", "Rounds with tokens and without a draft", drafter)
        self.lossy_requests = counter(
            "lossy_requests", "Outputs whose accept rule may change the text", route
        )
        self.tool_calls = counter("tool_calls", "Tool calls in answers", ["form"])
        self.rejected_tool_calls = counter(
            "rejected_tool_calls", "Texts that looked like tool calls and were none", ["reason"]
        )
        self.predicted_tool_calls = counter(
            "predicted_tool_calls", "Tool calls predicted before they were written", ["outcome"]
        )
        self.refused = counter("refused", "Requests that were not admitted", ["reason"])
        self.ignored_parameters = counter(
            "ignored_parameters", "Requests in which a lenient server ignored a parameter", ["parameter"]
        )
        self.model_loads = counter(
            "model_loads", "Loads of a model on demand, and how often it was unloaded", ["outcome"]
        )
        self.training_samples = counter("learn_texts", "Samples for online training", [])
        self.training_steps = counter("learn_steps", "Steps of online training", [])
        self.training_outcomes = counter("learn_versions", "Outcomes of online training", ["outcome"])
        self.drafter_version = Gauge(
            "paceline_drafter_version",
            "Version of a trained drafter in use; 0: as it was trained",
            ["drafter"],
            registry=registry,
        )
        self.faults = counter("metrics_faults", "Events that could not be counted", [])
        self.tokens_per_pass = histogram(
            "tokens_per_pass", "Tokens one output gained in a pass", drafter, _TOKENS_PER_PASS
        )
        self.batch_size = histogram("batch_size", "Outputs in a pass", [], _BATCH)
        self.cache_hits = counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache, by where it had them", ["tier"]
        )
        self.cache_use = Gauge(
            "paceline_cache_use", "Share of the KV cache in use, 0 to 1", registry=registry
        )


def disk_cache_pages() -> CounterMetricFamily:
    """Of the disk tier of the KV cache, which counts by itself; so are the next two."""
    return CounterMetricFamily(
        "paceline_disk_cache_pages",
        "Pages of the KV cache on the disk that were written, dropped, evicted or found damaged",
        labels=["event"],
    )


def disk_cache_bytes() -> GaugeMetricFamily:
    return GaugeMetricFamily("paceline_disk_cache_bytes", "Bytes of the KV cache on the disk, all models")


def disk_cache_limit() -> GaugeMetricFamily:
    return GaugeMetricFamily("paceline_disk_cache_limit_bytes", "The bound of these bytes")


def lost_traces() -> CounterMetricFamily:
    """Of the traces' recorder, which counts by itself."""
    return CounterMetricFamily(
        "paceline_traces_lost", "Requests that are not in the trace store", labels=["reason"]
    )


def route_rates() -> GaugeMetricFamily:
    return GaugeMetricFamily(
        "paceline_route_tokens_per_pass",
        "Tokens per decoding pass, predicted and measured of late",
        labels=["route", "figure"],
    )


def route_speedups() -> GaugeMetricFamily:
    return GaugeMetricFamily(
        "paceline_route_speedup",
        "Times plain decoding, predicted and measured of late",
        labels=["route", "figure"],
    )
