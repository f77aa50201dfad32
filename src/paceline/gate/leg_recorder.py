"""Makes a leg of an OpenAI-compatible answer: the bytes of a stream as they come, or a whole body.

The gateway feeds it with the bytes that it passes on; `upstream.run_leg` with those of a mirrored or replayed
request. A malformed event never raises: it ends as the leg's error.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Any, Final

from paceline.gate.pair import Leg, ToolCall

MALFORMED: Final = "malformed"  # the code of an answer that is no JSON, or not of the expected shape
UPSTREAM_ERROR: Final = "upstream_error"  # of an error object inside a stream
INCOMPLETE: Final = "incomplete"  # of a stream that stopped before its end
TOO_LARGE: Final = "answer_too_large"
MAX_STREAM: Final = 32 * 2**20  # bytes of a stream that are read
MAX_EVENT: Final = 2**20  # bytes that are held until their event is complete
_CONTENT_EVENTS: Final = ("response.output_text.delta", "response.function_call_arguments.delta")
_END_EVENTS: Final = ("response.completed", "response.incomplete", "response.failed")


class SseParser:
    """The data of server-sent events, out of pieces of bytes cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> Iterator[bytes]:
        """The data of each event that is complete by now. One that grows too large is a ValueError."""
        buffer = (self._rest + data).replace(b"\r\n", b"\n")
        held = b"\r" if buffer.endswith(b"\r") else b""  # the half of a line end
        *events, rest = buffer[: len(buffer) - len(held)].split(b"\n\n")
        if len(rest) > MAX_EVENT:
            self._rest = b""
            raise ValueError
        self._rest = rest + held
        for event in events:
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)


class LegRecorder:
    """clock: monotonic seconds. The leg starts when the recorder is made."""

    def __init__(self, upstream: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._start = clock, clock()
        self._sse, self._fed = SseParser(), 0
        self._fields: dict[str, Any] = {"upstream": upstream}
        self._chunk_s: list[float] = []
        self._chunk_size: list[int] = []  # characters
        self._written: list[int] = []  # tokens by the end of each chunk, where each has a usage
        self._text: list[str] = []
        self._calls: dict[int, list[str]] = {}  # name, arguments
        self._seconds: float | None = None
        self._done = False

    @property
    def done(self) -> bool:
        """The answer came to its regular end."""
        return self._done

    @property
    def begun(self) -> bool:
        """Content has come: from here on no other upstream can take over."""
        return bool(self._chunk_s)

    def status(self, status: int) -> None:
        self._fields["status"] = status
        if status >= 400:
            self.fail(f"http_{status}")

    def feed(self, data: bytes) -> bool:
        """Bytes of an event stream. False: it is too long, and the rest is not recorded."""
        self._fed += len(data)
        if self._fed > MAX_STREAM:
            self.fail(TOO_LARGE)
            return False
        now = self._clock() - self._start
        try:
            for event in self._sse.push(data):
                self._data(event, now)
        except ValueError:
            self.fail(MALFORMED)
        return True

    def _data(self, event: bytes, now: float) -> None:
        if event == b"[DONE]":
            self._end(now)
            return
        try:
            self._event(json.loads(event), now)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            self.fail(MALFORMED)

    def body(self, body: bytes | Mapping[str, Any]) -> None:
        """A whole answer, not streamed: its TTFT is its end."""
        now = self._clock() - self._start
        try:
            answer = body if isinstance(body, Mapping) else json.loads(body)
            self._head(answer)
            if "output" in answer:
                self._response_items(answer)
            else:
                choice = answer["choices"][0]
                self._content(choice.get("message") or {"content": choice.get("text")}, now)
                self._fields["finish_reason"] = choice.get("finish_reason")
            if not self._chunk_s:
                self._chunk(now, 0)
            self._end(now)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            self.fail(MALFORMED)

    def fail(self, error: str) -> None:
        """error: a code. The first one stays."""
        self._fields.setdefault("error", error)
        self._seconds = self._clock() - self._start

    def set(self, **fields: Any) -> None:
        """Figures from elsewhere: retries, fallback, gpu_s."""
        self._fields.update(fields)

    def leg(self) -> Leg:
        """The leg so far; `seconds` is now where it has not ended."""
        calls = tuple(ToolCall(name, arguments) for _, (name, arguments) in sorted(self._calls.items()))
        fields = dict(self._fields)
        if not self._done and "finish_reason" not in fields:
            fields.setdefault("error", INCOMPLETE)
        return Leg(
            **fields,
            seconds=self._clock() - self._start if self._seconds is None else self._seconds,
            chunk_s=tuple(self._chunk_s),
            chunk_tokens=self._chunk_tokens(fields.get("completion_tokens")),
            text="".join(self._text),
            tool_calls=calls,
            calls=len(calls),
        )

    def _chunk_tokens(self, tokens: int | None) -> tuple[int, ...]:
        """Of each chunk: by `continuous_usage_stats`, or else all tokens divided by characters."""
        if tokens is None or not self._chunk_s:
            return ()
        by_end = self._written
        if len(by_end) != len(self._chunk_s):
            share = tokens / max(1, sum(self._chunk_size))
            by_end = [round(share * characters) for characters in accumulate(self._chunk_size)]
        return tuple(after - before for before, after in pairwise([0, *by_end]))

    def _end(self, now: float) -> None:
        self._done, self._seconds = True, now

    def _event(self, event: Mapping[str, Any], now: float) -> None:
        kind = event.get("type")
        if "error" in event and event["error"] is not None:
            self.fail(UPSTREAM_ERROR)
        elif isinstance(kind, str):
            self._response_event(kind, event, now)
        else:
            self._completion_chunk(event, now)

    def _completion_chunk(self, chunk: Mapping[str, Any], now: float) -> None:
        """Of /v1/chat/completions and /v1/completions; only the first choice is recorded."""
        self._head(chunk)
        chunks = len(self._chunk_s)
        for choice in chunk.get("choices") or ():
            if choice.get("index", 0) != 0:
                continue
            if "delta" in choice:
                self._content(choice["delta"] or {}, now)
            else:
                self._content({"content": choice.get("text")}, now)
            if choice.get("finish_reason") is not None:
                self._fields["finish_reason"] = choice["finish_reason"]
                self._seconds = now
        if len(self._chunk_s) > chunks and chunk.get("usage"):
            self._written.append(self._fields.get("completion_tokens", 0))

    def _content(self, delta: Mapping[str, Any], now: float) -> None:
        calls = delta.get("tool_calls") or ()
        content = delta.get("content") or ""
        thinking = delta.get("reasoning_content") or delta.get("reasoning") or ""
        size = len(content) + len(thinking)
        for i, call in enumerate(calls):
            function = call.get("function") or {}
            known = self._calls.setdefault(call.get("index", i), ["", ""])
            known[0] += function.get("name") or ""
            known[1] += function.get("arguments") or ""
            size += len(function.get("name") or "") + len(function.get("arguments") or "")
        if content:
            self._text.append(content)
        if content or calls or thinking:
            self._chunk(now, size)

    def _chunk(self, now: float, size: int) -> None:
        self._chunk_s.append(now)
        self._chunk_size.append(size)

    def _head(self, answer: Mapping[str, Any]) -> None:
        for name, field in (("id", "response_id"), ("model", "model")):
            if isinstance(answer.get(name), str):
                self._fields[field] = answer[name]
        if usage := answer.get("usage"):
            self._fields.update(usage_figures(usage))
        if metrics := answer.get("metrics"):
            self._fields.update(speculation_figures(metrics))
        if timings := answer.get("timings"):  # of llama.cpp
            self._fields.update(_counted(timings, draft_tokens="draft_n", accepted_tokens="draft_n_accepted"))

    def _response_event(self, kind: str, event: Mapping[str, Any], now: float) -> None:
        """Of /v1/responses."""
        if kind in _CONTENT_EVENTS:
            self._chunk(now, len(event.get("delta") or ""))
        elif kind in _END_EVENTS:
            response = event["response"]
            self._head(response)
            self._response_items(response)
            self._end(now)
            if kind == "response.failed":
                self.fail(UPSTREAM_ERROR)

    def _response_items(self, response: Mapping[str, Any]) -> None:
        for i, item in enumerate(response["output"]):
            if item.get("type") == "function_call":
                self._calls[i] = [item["name"], item["arguments"]]
            self._text += [part["text"] for part in item.get("content") or () if "text" in part]
        reason = (response.get("incomplete_details") or {}).get("reason")
        length = "length" if reason == "max_output_tokens" else reason
        self._fields["finish_reason"] = length or ("tool_calls" if self._calls else "stop")


def usage_figures(usage: Mapping[str, Any]) -> dict[str, int]:
    """The token counts of OpenAI's `usage`, of completions and of responses."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return {
        **_counted(usage, prompt_tokens="input_tokens", completion_tokens="output_tokens"),
        **_counted(usage, prompt_tokens="prompt_tokens", completion_tokens="completion_tokens"),
        **_counted(details, cached_tokens="cached_tokens"),
    }


def speculation_figures(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a response's `metrics` in vLLM's shape; paceline adds `passes`."""
    figures: dict[str, Any] = _counted(metrics, passes="passes")
    spec = metrics.get("speculative_decoding")
    if isinstance(spec, Mapping):
        figures |= _counted(
            spec, draft_tokens="num_draft_tokens", accepted_tokens="num_accepted_draft_tokens"
        )
        histogram = spec.get("acceptance_histogram")
        if isinstance(histogram, list) and all(type(count) is int for count in histogram):
            figures["acceptance_histogram"] = tuple(histogram)
    for name in ("gpu_s", "gpu_utilization"):
        if isinstance(metrics.get(name), int | float):
            figures[name] = float(metrics[name])
    return figures


def _counted(values: Mapping[str, Any], **names: str) -> dict[str, int]:
    """Those of the named values that are counts."""
    return {field: values[name] for field, name in names.items() if type(values.get(name)) is int}
