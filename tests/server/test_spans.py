import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from paceline.config import SamplingParams
from paceline.server.request_log import speculative_metrics
from paceline.server.telemetry.otel import NO_SPANS, Spans, SpecWork, spans_from_environment
from paceline.trace.record import RequestStats
from paceline.types import Draft, Finish, Round
from paceline.web import otel as names
from paceline.web.otel import CAPTURE

CHAT = "/v1/chat/completions"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(autouse=True)
def _no_otel_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        "OTEL_EXPORTER_OTLP_PROTOCOL",
        "OTEL_SDK_DISABLED",
        "OTEL_SERVICE_NAME",
        "OTEL_RESOURCE_ATTRIBUTES",
        "OTEL_TRACES_EXPORTER",
        CAPTURE,
    ):
        monkeypatch.delenv(name, raising=False)


def recording(keep_content: bool = False) -> tuple[Spans, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Spans(provider, keep_content), exporter


def a_finished(reason: Finish = "stop", first: float | None = 0.5, tokens: int = 10) -> RequestStats:
    return RequestStats(
        model="m",
        route="agents",
        endpoint=CHAT,
        prompt_tokens=40,
        cached_tokens=32,
        output_tokens=tokens,
        queue_s=0.2,
        first_token_s=first,
        decode_s=0.9,
        seconds=1.5,
        finish=reason,
    )


def a_spec() -> dict[str, Any]:
    draft = Draft((1, 2, 3), None, ("ngram",) * 3)
    r = Round("a", 5, ("suffix", "ngram"), draft, (0, 1), (1, 2, 9), 3, 1, 4, 100, 2000)
    return speculative_metrics([r], detailed=False)


def the_span(exporter: InMemorySpanExporter) -> tuple[ReadableSpan, dict[str, Any]]:
    (span,) = exporter.get_finished_spans()
    return span, dict(span.attributes or {})


def test_a_request_is_one_server_span() -> None:
    spans, exporter = recording()
    span = spans.start(CHAT, "m", {})
    span.set_request(
        SamplingParams(max_tokens=7, temperature=0.5, seed=3, stop=("secret",)), choices=2, stream=True
    )
    span.end([a_finished()], a_spec(), SpecWork("suffix+ngram", 0.01, 0.2), "chatcmpl-1")
    told, attributes = the_span(exporter)
    assert told.name == "chat m"
    assert told.kind is SpanKind.SERVER
    assert told.status.status_code is StatusCode.UNSET
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "paceline",
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.seed": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": True,
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 32,
        "gen_ai.server.time_to_first_token": 0.5,
        "gen_ai.server.time_per_output_token": pytest.approx(0.1),
        "gen_ai.latency.time_in_queue": 0.2,
        "gen_ai.latency.time_in_model_prefill": pytest.approx(0.3),
        "gen_ai.latency.time_in_model_decode": 0.9,
        "url.path": CHAT,
        "route.name": "agents",
        "spec.lossless": True,
        "spec.method": "suffix+ngram",
        "spec.draft_time_s": 0.01,
        "spec.verify_time_s": 0.2,
        "spec.num_spec_tokens": 3,
        "spec.num_steps": 1,
        "spec.draft_tokens": 3,
        "spec.accepted_tokens": 2,
        "spec.mean_acceptance_length": 3.0,
        "spec.acceptance_histogram": (0, 0, 1, 0),
    }


def test_tokens_of_all_outputs_are_added_up_and_prompts_counted_once() -> None:
    spans, exporter = recording()
    outputs = [a_finished(), replace(a_finished("length", tokens=7), choice=1), a_finished(tokens=2)]
    spans.start(CHAT, "m", {}).end(outputs)
    _, attributes = the_span(exporter)
    assert attributes[names.FINISH_REASONS] == ("stop", "length", "stop")
    assert [attributes[n] for n in (names.INPUT_TOKENS, names.CACHED_TOKENS, names.OUTPUT_TOKENS)] == [
        80,
        64,
        19,
    ]
    assert attributes[names.PER_TOKEN] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("endpoint", "name"),
    [("/v1/completions", "text_completion m"), ("/v1/responses", "chat m"), (CHAT, "chat m")],
)
def test_the_name_tells_the_operation(endpoint: str, name: str) -> None:
    spans, exporter = recording()
    spans.start(endpoint, "m", {}).end([a_finished()])
    assert the_span(exporter)[0].name == name


def test_the_callers_trace_goes_on() -> None:
    spans, exporter = recording()
    spans.start(CHAT, "m", {"Traceparent": f"00-{TRACE}-{PARENT}-01"}).end([a_finished()])
    told, _ = the_span(exporter)
    assert told.context is not None
    assert told.parent is not None
    assert f"{told.context.trace_id:032x}" == TRACE
    assert f"{told.parent.span_id:016x}" == PARENT


@pytest.mark.parametrize("header", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01"])
def test_a_bad_traceparent_starts_a_trace(header: str) -> None:
    spans, exporter = recording()
    spans.start(CHAT, "m", {"traceparent": header}).end([a_finished()])
    assert the_span(exporter)[0].parent is None


def test_a_caller_who_does_not_sample_is_honoured() -> None:
    spans, exporter = recording()
    spans.start(CHAT, "m", {"traceparent": f"00-{TRACE}-{PARENT}-00"}).end([a_finished()])
    assert not exporter.get_finished_spans()


def test_content_is_exported_only_if_allowed() -> None:
    for keep in (False, True):
        spans, exporter = recording(keep)
        span = spans.start(CHAT, "m", {})
        span.set_content('["secret"]', '["answer"]')
        span.end([a_finished()], a_spec())
        attributes = the_span(exporter)[1]
        assert ("secret" in str(attributes)) == keep
        assert (names.OUTPUT_MESSAGES in attributes) == keep


def test_what_was_not_measured_is_left_out() -> None:
    spans, exporter = recording()
    spans.start(CHAT, "m", {}).end([a_finished("cancelled", first=None, tokens=0)])
    attributes = the_span(exporter)[1]
    assert names.FIRST_TOKEN not in attributes
    assert names.PER_TOKEN not in attributes
    assert attributes[names.FINISH_REASONS] == ("cancelled",)


def test_failures() -> None:
    spans, exporter = recording()
    refused = spans.start(CHAT, "m", {})
    refused.fail("queue_full")
    refused.fail("again")
    refused.end([a_finished()])
    spans.start(CHAT, "m", {}).end([a_finished("error")])
    first, second = exporter.get_finished_spans()
    assert (first.attributes or {})[names.ERROR_TYPE] == "queue_full"
    assert first.status.status_code is second.status.status_code is StatusCode.ERROR
    assert (second.attributes or {})[names.INPUT_TOKENS] == 40


def use_the_silent_ones() -> None:
    span = spans_from_environment().start(CHAT, "m", {})
    span.set_request(SamplingParams())
    span.set_content("", "")
    span.end([a_finished()])
    span.fail("x")


def test_without_an_endpoint_there_are_no_spans() -> None:
    assert spans_from_environment() is NO_SPANS
    assert not NO_SPANS.start(CHAT, "m", {}).recording
    use_the_silent_ones()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_SDK_DISABLED", "true"),
        ("OTEL_TRACES_EXPORTER", "none"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", " "),
    ],
)
def test_they_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(name, value)
    assert spans_from_environment() is NO_SPANS


def test_without_the_packages_there_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with caplog.at_level(logging.WARNING):
        assert spans_from_environment() is NO_SPANS
    assert len(caplog.records) == 1
    assert "paceline[otel]" in caplog.text


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A URL, and the path and body of each request it got."""
    got: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", got
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(("service", "expected"), [("", "paceline"), ("my-agents", "my-agents")])
def test_spans_arrive_over_http(
    monkeypatch: pytest.MonkeyPatch,
    collector: tuple[str, list[tuple[str, bytes]]],
    service: str,
    expected: str,
) -> None:
    url, got = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    if service:
        monkeypatch.setenv("OTEL_SERVICE_NAME", service)
    spans = spans_from_environment()
    span = spans.start(CHAT, "m", {"traceparent": f"00-{TRACE}-{PARENT}-01"})
    span.set_content("secret", "secret")
    span.end([a_finished()], a_spec())
    spans.close()
    ((path, body),) = got
    assert path == "/v1/traces"
    assert b"secret" not in body
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    told = {a.key: a.value for a in resource.resource.attributes}
    assert told["service.name"].string_value == expected
    arrived = resource.scope_spans[0].spans[0]
    assert arrived.name == "chat m"
    assert arrived.trace_id.hex() == TRACE
    attributes = {a.key: a.value for a in arrived.attributes}
    assert attributes[names.FIRST_TOKEN].double_value == 0.5
    assert attributes[names.SPEC_ACCEPTED].int_value == 2


def test_a_collector_that_is_away_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    spans = spans_from_environment()
    spans.start(CHAT, "m", {}).end([a_finished()])
    spans.close()
