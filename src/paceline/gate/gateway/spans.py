"""OpenTelemetry spans of the gate: one for each request, and below it one for each attempt and second leg.

The two legs of a pair carry its id and share a trace: a team's own tracing shows both on one timeline. Token
counts also have OpenInference's names (`llm.token_count.*`).
"""

from collections.abc import Iterable, Mapping
from typing import Final

from opentelemetry.propagate import extract, inject
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, StatusCode, set_span_in_context

from paceline.gate.gateway.request_context import RequestContext
from paceline.gate.gateway.upstream_client import UpstreamState
from paceline.gate.pair import Leg
from paceline.web import otel
from paceline.web.otel import Exporter

PAIR: Final = "mirror.pair_id"
EXPERIMENT: Final = "mirror.experiment"
ROLE: Final = "route.role"  # "baseline" or "candidate"
RETRIES: Final = "route.retries"
PROMPT_COUNT: Final = "llm.token_count.prompt"
COMPLETION_COUNT: Final = "llm.token_count.completion"


class GateSpans:
    def __init__(self, exporter: Exporter) -> None:
        provider = exporter.provider
        self._tracer = None if provider is None else provider.get_tracer("paceline.gate")
        self._shutdown = exporter.shutdown
        self._requests: dict[str, Span] = {}  # in progress, by id

    def start(self, context: RequestContext, headers: Mapping[str, str]) -> None:
        if self._tracer is None:
            return
        operation, model = otel.OPERATIONS.get(context.path, "chat"), str(context.body.get("model") or "")
        self._requests[context.id] = self._tracer.start_span(
            f"{operation} {model}".strip(),
            context=extract(dict(headers)),
            kind=SpanKind.SERVER,
            attributes={
                otel.OPERATION_NAME: operation,
                otel.PROVIDER_NAME: otel.PROVIDER,
                otel.REQUEST_MODEL: model,
                otel.REQUEST_STREAM: context.streams,
                otel.ROUTE: context.route.name,
                otel.URL_PATH: context.path,
            },
        )

    def request(self, context: RequestContext) -> Span:
        return self._requests.get(context.id, INVALID_SPAN)

    def leg(self, context: RequestContext, state: UpstreamState, parent: Span | None = None) -> Span:
        """A request to an upstream."""
        if self._tracer is None:
            return INVALID_SPAN
        above = self.request(context) if parent is None else parent
        return self._tracer.start_span(
            f"upstream {state.name}",
            context=set_span_in_context(above),
            kind=SpanKind.CLIENT,
            attributes={
                otel.OPERATION_NAME: otel.OPERATIONS.get(context.path, "chat"),
                otel.PROVIDER_NAME: otel.PROVIDER,
                otel.REQUEST_MODEL: str(state.upstream.model or context.body.get("model") or ""),
                otel.ROUTE: context.route.name,
                "server.address": state.config.url,
            },
        )

    def propagated(self, headers: Iterable[tuple[str, str]], span: Span) -> list[tuple[str, str]]:
        """With the context of the span, for the upstream's own spans."""
        carrier: dict[str, str] = {}
        if self._tracer is not None:
            inject(carrier, set_span_in_context(span))
        return [*headers, *carrier.items()]

    def finish(self, context: RequestContext, error: str | None) -> None:
        span = self._requests.pop(context.id, None)
        if span is None:
            return
        span.set_attribute(RETRIES, max(0, len(context.tried) - 1))
        if error is not None:
            span.set_attribute(otel.ERROR_TYPE, error)
            span.set_status(StatusCode.ERROR)
        span.end()

    def close(self) -> None:
        self._shutdown()


def set_leg(span: Span, leg: Leg) -> None:
    """The figures of a leg, on its span."""
    if not span.is_recording():
        return
    figures = {
        otel.RESPONSE_ID: leg.response_id,
        otel.RESPONSE_MODEL: leg.model,
        otel.INPUT_TOKENS: leg.prompt_tokens,
        PROMPT_COUNT: leg.prompt_tokens,
        otel.OUTPUT_TOKENS: leg.completion_tokens,
        COMPLETION_COUNT: leg.completion_tokens,
        otel.CACHED_TOKENS: leg.cached_tokens,
        otel.FIRST_TOKEN: leg.ttft_s,
        otel.PER_TOKEN: leg.tpot_s,
        otel.FINISH_REASONS: None if leg.finish_reason is None else [leg.finish_reason],
        otel.SPEC_DRAFTED: leg.draft_tokens,
        otel.SPEC_ACCEPTED: leg.accepted_tokens,
        otel.ERROR_TYPE: leg.error,
    }
    span.set_attributes({name: value for name, value in figures.items() if value is not None})
