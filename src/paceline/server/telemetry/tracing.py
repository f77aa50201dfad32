"""Sets up the export of spans from the standard OTEL environment variables."""

import logging
import os
from collections.abc import Mapping
from typing import Final

from paceline.server.telemetry.otel import NO_SPANS, PROVIDER, Spans

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
CAPTURE: Final = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_PROTOCOL: Final = "http/protobuf"

_log = logging.getLogger(__name__)


def spans_from_environment() -> Spans:
    """Spans go to the endpoint that the standard OTEL variables name, over HTTP."""
    environ = os.environ
    if not _enabled(environ):
        return NO_SPANS
    protocol = _first(environ, PROTOCOLS) or _PROTOCOL
    if protocol != _PROTOCOL:
        _log.warning("no traces: the OTLP protocol %s is not supported, only %s", protocol, _PROTOCOL)
        return NO_SPANS
    try:
        return _exporting_spans(keep_content=_true(environ, CAPTURE))
    except ImportError:
        _log.warning("no traces: an OTLP endpoint is set, but `pip install 'paceline[otel]'` is missing")
        return NO_SPANS


def _exporting_spans(keep_content: bool) -> Spans:
    """The SDK's exporter, batches and sampler read their settings from the environment."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    environ = os.environ
    named = environ.get("OTEL_SERVICE_NAME") or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    provider = TracerProvider(resource=Resource.create({} if named else {SERVICE_NAME: PROVIDER}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Spans(provider, keep_content, provider.shutdown)


def _enabled(environ: Mapping[str, str]) -> bool:
    if _true(environ, "OTEL_SDK_DISABLED") or environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return False
    return bool(_first(environ, ENDPOINTS))


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environ[name].strip() for name in names if environ.get(name, "").strip()), "")


def _true(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() == "true"
