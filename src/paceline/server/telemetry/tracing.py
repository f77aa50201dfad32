"""One OpenTelemetry span for each request, if the environment asks for it; else nothing, at no cost."""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from paceline.config import SamplingParams
from paceline.server.finished import RequestStats
from paceline.server.spec_metrics import SpecWork

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
CAPTURE: Final = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_SPOKEN: Final = "http/protobuf"

_log = logging.getLogger(__name__)


class RequestSpan(Protocol):
    """One request. Either `end` or `fail` closes it; what is told after that is ignored."""

    @property
    def keeps_content(self) -> bool: ...
    def asked(self, params: SamplingParams, choices: int = 1, stream: bool = False) -> None: ...
    def content(self, messages: str, output: str) -> None:
        """JSON of what was said; kept only if the environment allows it."""

    def end(
        self,
        outputs: Sequence[RequestStats],
        spec: Mapping[str, Any] | None = None,
        work: SpecWork | None = None,
        response_id: str = "",
    ) -> None: ...
    def fail(self, error_type: str) -> None:
        """error_type: one of a few words, never a message."""


class Spans(Protocol):
    """Where spans come from."""

    def start(self, endpoint: str, model: str, headers: Mapping[str, str]) -> RequestSpan: ...
    def close(self) -> None:
        """Sends what is left."""


class _NoSpan(RequestSpan):
    __slots__ = ()
    keeps_content = False

    def asked(self, params: SamplingParams, choices: int = 1, stream: bool = False) -> None:
        return

    def content(self, messages: str, output: str) -> None:
        return

    def end(
        self,
        outputs: Sequence[RequestStats],
        spec: Mapping[str, Any] | None = None,
        work: SpecWork | None = None,
        response_id: str = "",
    ) -> None:
        return

    def fail(self, error_type: str) -> None:
        return


class _NoSpans(Spans):
    def start(self, endpoint: str, model: str, headers: Mapping[str, str]) -> RequestSpan:
        return _NO_SPAN

    def close(self) -> None:
        return


_NO_SPAN: Final = _NoSpan()
NO_SPANS: Final[Spans] = _NoSpans()


def spans_from_environment() -> Spans:
    """Spans go to the endpoint that the standard OTEL variables name, over HTTP."""
    environ = os.environ
    if not _wanted(environ):
        return NO_SPANS
    protocol = _first(environ, PROTOCOLS) or _SPOKEN
    if protocol != _SPOKEN:
        _log.warning("no traces: the OTLP protocol %s is not spoken here, only %s", protocol, _SPOKEN)
        return NO_SPANS
    try:
        from paceline.server.telemetry.otel import exporting_spans
    except ImportError:
        _log.warning("no traces: an OTLP endpoint is set, but `pip install 'paceline[otel]'` is missing")
        return NO_SPANS
    return exporting_spans(keep_content=_true(environ, CAPTURE))


def _wanted(environ: Mapping[str, str]) -> bool:
    if _true(environ, "OTEL_SDK_DISABLED") or environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return False
    return bool(_first(environ, ENDPOINTS))


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environ[name].strip() for name in names if environ.get(name, "").strip()), "")


def _true(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() == "true"
