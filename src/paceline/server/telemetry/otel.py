"""One OpenTelemetry span for each request, exported as the standard OTEL environment variables say.

`input_messages` and `output_messages` write the content of a request as the semantic conventions have it:
messages made of parts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from opentelemetry.propagate import extract
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, StatusCode, TracerProvider
from opentelemetry.util.types import AttributeValue

from paceline.config import SamplingParams
from paceline.output import RequestOutput
from paceline.trace.record import RequestStats, write_json
from paceline.web.otel import (
    CACHED_TOKENS,
    ERROR_TYPE,
    FINISH_REASONS,
    FIRST_TOKEN,
    IN_DECODE,
    IN_PREFILL,
    IN_QUEUE,
    INPUT_MESSAGES,
    INPUT_TOKENS,
    OPERATION_NAME,
    OPERATIONS,
    OUTPUT_MESSAGES,
    OUTPUT_TOKENS,
    PER_TOKEN,
    PROVIDER,
    PROVIDER_NAME,
    REQUEST_CHOICES,
    REQUEST_FREQUENCY_PENALTY,
    REQUEST_MAX_TOKENS,
    REQUEST_MODEL,
    REQUEST_PRESENCE_PENALTY,
    REQUEST_SEED,
    REQUEST_STREAM,
    REQUEST_TEMPERATURE,
    REQUEST_TOP_K,
    REQUEST_TOP_P,
    RESPONSE_ID,
    RESPONSE_MODEL,
    ROUTE,
    SPEC_ACCEPTED,
    SPEC_DRAFT_TIME,
    SPEC_DRAFTED,
    SPEC_HISTOGRAM,
    SPEC_LENGTH,
    SPEC_LOSSLESS,
    SPEC_MAX,
    SPEC_METHOD,
    SPEC_STEPS,
    SPEC_VERIFY_TIME,
    URL_PATH,
    exporter_from_environment,
)

_FROM_SPEC: Final = {  # keys of a response's `metrics.speculative_decoding`
    SPEC_MAX: "num_spec_tokens",
    SPEC_STEPS: "num_spec_steps",
    SPEC_DRAFTED: "num_draft_tokens",
    SPEC_ACCEPTED: "num_accepted_draft_tokens",
    SPEC_LENGTH: "mean_acceptance_length",
    SPEC_HISTOGRAM: "acceptance_histogram",
}

Attributes = dict[str, AttributeValue]


@dataclass(frozen=True, slots=True)
class SpecWork:
    """The drafters of an output, and its share of the time of its passes."""

    method: str  # drafters in their order, joined by "+"
    draft_s: float
    verify_s: float


class Spans:
    """Makes request spans. keep_content: messages and outputs become attributes. No provider: no spans."""

    def __init__(
        self,
        provider: TracerProvider | None,
        keep_content: bool = False,
        shutdown: Callable[[], None] = lambda: None,
    ) -> None:
        self._tracer = None if provider is None else provider.get_tracer("paceline.server")
        self._keep_content = keep_content
        self._shutdown = shutdown

    def start(self, endpoint: str, model: str, headers: Mapping[str, str]) -> "RequestSpan":
        if self._tracer is None:  # the headers, which are a client's, are not even parsed
            return RequestSpan(INVALID_SPAN, False)
        operation = OPERATIONS.get(endpoint, "chat")
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=extract({name.lower(): value for name, value in headers.items()}),
            kind=SpanKind.SERVER,
            attributes={
                OPERATION_NAME: operation,
                PROVIDER_NAME: PROVIDER,
                REQUEST_MODEL: model,
                URL_PATH: endpoint,
            },
        )
        return RequestSpan(span, self._keep_content)

    def close(self) -> None:
        """Exports the spans that are left."""
        self._shutdown()


NO_SPANS: Final = Spans(None)


def spans_from_environment() -> Spans:
    """Spans go to the endpoint that the standard OTEL variables name, over HTTP."""
    exporter = exporter_from_environment()
    return NO_SPANS if exporter.provider is None else Spans(*exporter)


class RequestSpan:
    """The span of one request. `end` or `fail` closes it; later calls do nothing."""

    __slots__ = ("_keep_content", "_span")

    def __init__(self, span: Span, keep_content: bool) -> None:
        self._span = span
        self._keep_content = keep_content

    @property
    def recording(self) -> bool:
        """False: no provider, not sampled, or closed."""
        return self._span.is_recording()

    @property
    def keeps_content(self) -> bool:
        return self._keep_content and self.recording

    def set_request(self, params: SamplingParams, choices: int = 1, stream: bool = False) -> None:
        if self.recording:
            self._span.set_attributes(_request_attributes(params, choices, stream))

    def set_content(self, messages: str, output: str) -> None:
        """JSON of the messages and outputs; dropped unless the environment allows it."""
        if self.keeps_content:
            self._span.set_attributes({INPUT_MESSAGES: messages, OUTPUT_MESSAGES: output})

    def end(
        self,
        outputs: Sequence[RequestStats],
        spec: Mapping[str, Any] | None = None,
        work: SpecWork | None = None,
        response_id: str = "",
    ) -> None:
        if not self.recording:
            return
        attributes = _output_attributes(outputs)
        if response_id:
            attributes[RESPONSE_ID] = response_id
        if spec is not None:
            attributes |= {name: spec[key] for name, key in _FROM_SPEC.items()}
        if work is not None:
            attributes |= _work_attributes(work)
        self._span.set_attributes(attributes)
        if any(output.finish == "error" for output in outputs):
            self.fail("error")
        else:
            self._span.end()

    def fail(self, error_type: str) -> None:
        """error_type: an error code, never a message."""
        if self.recording:
            self._span.set_attributes({ERROR_TYPE: error_type})
            self._span.set_status(StatusCode.ERROR)
            self._span.end()


def _request_attributes(params: SamplingParams, choices: int, stream: bool) -> Attributes:
    attributes: Attributes = {
        REQUEST_MAX_TOKENS: params.max_tokens,
        REQUEST_TEMPERATURE: float(params.temperature),
        REQUEST_TOP_P: float(params.top_p),
        REQUEST_FREQUENCY_PENALTY: float(params.frequency_penalty),
        REQUEST_PRESENCE_PENALTY: float(params.presence_penalty),
        REQUEST_STREAM: stream,
    }
    if params.top_k:
        attributes[REQUEST_TOP_K] = float(params.top_k)
    if params.noise_seed < 2**63:  # more does not fit into an attribute
        attributes[REQUEST_SEED] = params.noise_seed
    if choices != 1:
        attributes[REQUEST_CHOICES] = choices
    return attributes


def _output_attributes(outputs: Sequence[RequestStats]) -> Attributes:
    """Tokens of all outputs, each prompt's once; times of the first."""
    first = outputs[0]
    prompts = [output for output in outputs if output.choice == 0]
    attributes: Attributes = {
        RESPONSE_MODEL: first.model,
        FINISH_REASONS: [output.finish or "cancelled" for output in outputs],
        INPUT_TOKENS: sum(output.prompt_tokens for output in prompts),
        OUTPUT_TOKENS: sum(output.output_tokens for output in outputs),
        CACHED_TOKENS: sum(output.cached_tokens for output in prompts),
        IN_QUEUE: first.queue_s,
        IN_DECODE: first.decode_s,
        ROUTE: first.route,
        SPEC_LOSSLESS: not first.lossy,
    }
    measured = {
        FIRST_TOKEN: first.first_token_s,
        PER_TOKEN: first.token_s,
        IN_PREFILL: first.prefill_s,
    }
    return attributes | {name: value for name, value in measured.items() if value is not None}


def _work_attributes(work: SpecWork) -> Attributes:
    return {
        SPEC_METHOD: work.method,
        SPEC_DRAFT_TIME: work.draft_s,
        SPEC_VERIFY_TIME: work.verify_s,
    }


def input_messages(messages: Sequence[Any] | None, prompt: Any) -> str:
    """JSON of a chat, or of a prompt or several."""
    if messages is not None:
        return write_json([_message(message) for message in messages])
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    prompts = prompt if several else [prompt]
    return write_json([{"role": "user", "parts": _texts(one)} for one in prompts])


def output_messages(outputs: Sequence[RequestOutput]) -> str:
    """JSON of every output."""
    return write_json([_answer(output) for output in outputs])


def _answer(output: RequestOutput) -> dict[str, Any]:
    calls = [{"type": "tool_call", "name": name, "arguments": arguments} for name, arguments in output.calls]
    return {
        "role": "assistant",
        "parts": [*_texts(output.content), *calls],
        "finish_reason": output.finish_reason if output.finish in ("stop", "length") else "error",
    }


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if message.get("role") == "tool":
        answer = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}
        return {"role": "tool", "parts": [answer]}
    calls = [{"type": "tool_call", **_call(call)} for call in message.get("tool_calls") or ()]
    return {"role": message.get("role"), "parts": [*_texts(content), *calls]}


def _call(call: Any) -> dict[str, Any]:
    """Templates take calls of many shapes; one of an unknown shape is empty here."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return {}
    return {"id": call.get("id"), "name": function.get("name"), "arguments": function.get("arguments")}


def _texts(content: Any) -> list[dict[str, Any]]:
    if not content:
        return []
    parts = content if isinstance(content, list) and isinstance(content[0], Mapping) else [{"text": content}]
    return [{"type": "text", "content": part.get("text")} for part in parts if isinstance(part, Mapping)]
