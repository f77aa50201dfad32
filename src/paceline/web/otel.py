"""OpenTelemetry: the names of attributes, and a tracer provider as the standard OTEL variables say.

Names and units follow the semantic conventions 1.41. Their GenAI part still changes, so the names are written
here and nowhere else. Times are in seconds.
"""

import logging
import os
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from opentelemetry.trace import TracerProvider

_log = logging.getLogger(__name__)

PROVIDER: Final = "paceline"
OPERATIONS: Final = {  # by the path of the URL
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
CAPTURE: Final = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_PROTOCOL: Final = "http/protobuf"

OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
REQUEST_TOP_K: Final = "gen_ai.request.top_k"
REQUEST_SEED: Final = "gen_ai.request.seed"
REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
REQUEST_CHOICES: Final = "gen_ai.request.choice.count"
REQUEST_STREAM: Final = "gen_ai.request.stream"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
FIRST_TOKEN: Final = "gen_ai.server.time_to_first_token"
PER_TOKEN: Final = "gen_ai.server.time_per_output_token"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
ERROR_TYPE: Final = "error.type"
URL_PATH: Final = "url.path"

# As vLLM calls them.
IN_QUEUE: Final = "gen_ai.latency.time_in_queue"
IN_PREFILL: Final = "gen_ai.latency.time_in_model_prefill"
IN_DECODE: Final = "gen_ai.latency.time_in_model_decode"

# No convention speaks of speculative decoding.
ROUTE: Final = "route.name"
SPEC_METHOD: Final = "spec.method"
SPEC_MAX: Final = "spec.num_spec_tokens"
SPEC_STEPS: Final = "spec.num_steps"
SPEC_DRAFTED: Final = "spec.draft_tokens"
SPEC_ACCEPTED: Final = "spec.accepted_tokens"
SPEC_LENGTH: Final = "spec.mean_acceptance_length"
SPEC_HISTOGRAM: Final = "spec.acceptance_histogram"
SPEC_DRAFT_TIME: Final = "spec.draft_time_s"
SPEC_VERIFY_TIME: Final = "spec.verify_time_s"
SPEC_LOSSLESS: Final = "spec.lossless"


class Exporter(NamedTuple):
    """provider: None: no spans are made."""

    provider: TracerProvider | None
    keep_content: bool = False  # messages and outputs may become attributes
    shutdown: Callable[[], None] = lambda: None  # exports the spans that are left


def exporter_from_environment() -> Exporter:
    """Spans go to the endpoint that the standard OTEL variables name, over HTTP."""
    environ = os.environ
    if not _enabled(environ):
        return Exporter(None)
    protocol = _first(environ, PROTOCOLS) or _PROTOCOL
    if protocol != _PROTOCOL:
        _log.warning("no traces: the OTLP protocol %s is not supported, only %s", protocol, _PROTOCOL)
        return Exporter(None)
    try:
        return _exporter(keep_content=_true(environ, CAPTURE))
    except ImportError:
        _log.warning("no traces: an OTLP endpoint is set, but `pip install 'paceline[otel]'` is missing")
        return Exporter(None)


def _exporter(keep_content: bool) -> Exporter:
    """The SDK's exporter, batches and sampler read their settings from the environment."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    environ = os.environ
    named = environ.get("OTEL_SERVICE_NAME") or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    provider = TracerProvider(resource=Resource.create({} if named else {SERVICE_NAME: PROVIDER}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Exporter(provider, keep_content, provider.shutdown)


def _enabled(environ: Mapping[str, str]) -> bool:
    if _true(environ, "OTEL_SDK_DISABLED") or environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return False
    return bool(_first(environ, ENDPOINTS))


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environ[name].strip() for name in names if environ.get(name, "").strip()), "")


def _true(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() == "true"
