"""Spans by the OpenTelemetry SDK. Imported only when they are wanted."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.util.types import AttributeValue

from paceline.config import SamplingParams
from paceline.server.finished import RequestStats
from paceline.server.spec_metrics import SpecWork
from paceline.server.telemetry import span_names as names
from paceline.server.telemetry.tracing import RequestSpan, Spans

_FROM_SPEC: Final = {
    names.SPEC_MAX: "num_spec_tokens",
    names.SPEC_STEPS: "num_spec_steps",
    names.SPEC_DRAFTED: "num_draft_tokens",
    names.SPEC_ACCEPTED: "num_accepted_draft_tokens",
    names.SPEC_LENGTH: "mean_acceptance_length",
    names.SPEC_HISTOGRAM: "acceptance_histogram",
}

Attributes = dict[str, AttributeValue]


def exporting_spans(keep_content: bool) -> "OtelSpans":
    """The exporter, its batches and the sampler read their settings from the environment."""
    provider = TracerProvider(resource=_resource())
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return OtelSpans(provider, keep_content)


def _resource() -> Resource:
    given = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    return Resource.create({} if given else {SERVICE_NAME: names.PROVIDER})


class OtelSpans(Spans):
    def __init__(self, provider: TracerProvider, keep_content: bool = False) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("paceline.server")
        self._keep_content = keep_content

    def start(self, endpoint: str, model: str, headers: Mapping[str, str]) -> RequestSpan:
        operation = names.OPERATIONS.get(endpoint, "chat")
        attributes: Attributes = {
            names.OPERATION_NAME: operation,
            names.PROVIDER_NAME: names.PROVIDER,
            names.REQUEST_MODEL: model,
            names.URL_PATH: endpoint,
        }
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=extract({name.lower(): value for name, value in headers.items()}),
            kind=SpanKind.SERVER,
            attributes=attributes,
        )
        return _OtelSpan(span, self._keep_content)

    def close(self) -> None:
        self._provider.shutdown()


class _OtelSpan(RequestSpan):
    __slots__ = ("_keep_content", "_span")

    def __init__(self, span: Span, keep_content: bool) -> None:
        self._span = span
        self._keep_content = keep_content

    @property
    def keeps_content(self) -> bool:
        return self._keep_content and self._span.is_recording()

    def asked(self, params: SamplingParams, choices: int = 1, stream: bool = False) -> None:
        self._tell(_request_attributes(params, choices, stream))

    def content(self, messages: str, output: str) -> None:
        if self._keep_content:
            self._tell({names.INPUT_MESSAGES: messages, names.OUTPUT_MESSAGES: output})

    def end(
        self,
        outputs: Sequence[RequestStats],
        spec: Mapping[str, Any] | None = None,
        work: SpecWork | None = None,
        response_id: str = "",
    ) -> None:
        if not self._span.is_recording():  # not sampled, or closed already
            return
        if response_id:
            self._tell({names.RESPONSE_ID: response_id})
        self._tell(_finished_attributes(outputs))
        if spec is not None:
            self._tell({name: spec[key] for name, key in _FROM_SPEC.items()})
        if work is not None:
            self._tell(_work_attributes(work))
        if any(output.reason == "error" for output in outputs):
            self.fail("error")
        else:
            self._span.end()

    def fail(self, error_type: str) -> None:
        if self._span.is_recording():
            self._tell({names.ERROR_TYPE: error_type})
            self._span.set_status(StatusCode.ERROR)
            self._span.end()

    def _tell(self, attributes: Attributes) -> None:
        if self._span.is_recording():
            self._span.set_attributes(attributes)


def _request_attributes(params: SamplingParams, choices: int, stream: bool) -> Attributes:
    attributes: Attributes = {
        names.REQUEST_MAX_TOKENS: params.max_tokens,
        names.REQUEST_TEMPERATURE: float(params.temperature),
        names.REQUEST_TOP_P: float(params.top_p),
        names.REQUEST_FREQUENCY_PENALTY: float(params.frequency_penalty),
        names.REQUEST_PRESENCE_PENALTY: float(params.presence_penalty),
        names.REQUEST_STREAM: stream,
    }
    if params.top_k:
        attributes[names.REQUEST_TOP_K] = float(params.top_k)
    if params.seed < 2**63:  # more does not fit into an attribute
        attributes[names.REQUEST_SEED] = params.seed
    if choices != 1:
        attributes[names.REQUEST_CHOICES] = choices
    return attributes


def _finished_attributes(outputs: Sequence[RequestStats]) -> Attributes:
    """Tokens of all outputs, each prompt's once; times of the first."""
    finished = outputs[0]
    firsts = [output for output in outputs if output.choice == 0]
    attributes: Attributes = {
        names.RESPONSE_MODEL: finished.model,
        names.FINISH_REASONS: [output.reason for output in outputs],
        names.INPUT_TOKENS: sum(output.prompt_tokens for output in firsts),
        names.OUTPUT_TOKENS: sum(output.output_tokens for output in outputs),
        names.CACHED_TOKENS: sum(output.cached_tokens for output in firsts),
        names.IN_QUEUE: finished.queue_s,
        names.IN_DECODE: finished.decode_s,
        names.ROUTE: finished.route,
        names.SPEC_LOSSLESS: not finished.lossy,
    }
    measured = {
        names.FIRST_TOKEN: finished.first_token_s,
        names.PER_TOKEN: finished.token_s,
        names.IN_PREFILL: finished.prefill_s,
    }
    return attributes | {name: value for name, value in measured.items() if value is not None}


def _work_attributes(work: SpecWork) -> Attributes:
    return {
        names.SPEC_METHOD: work.method,
        names.SPEC_DRAFT_TIME: work.draft_s,
        names.SPEC_VERIFY_TIME: work.verify_s,
    }
