"""A leg out of the bytes of an answer."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.gate.leg_recorder import MAX_EVENT, MAX_STREAM, LegRecorder
from paceline.gate.pair import Leg, ToolCall

SPEC = {
    "passes": 5,
    "speculative_decoding": {
        "acceptance_histogram": [1, 0, 2],
        "num_draft_tokens": 6,
        "num_accepted_draft_tokens": 4,
    },
}


def ticking() -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += 1.0


def event(data: object) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def chunk(delta: dict[str, Any], reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return event({"id": "c1", "model": "m", "choices": [choice]})


def call(index: int, name: str | None, arguments: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "function": {"name": name, "arguments": arguments}}]}


STREAM = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"content": "Hel"}),
    chunk({"content": "lo"}),
    chunk(call(0, "find", '{"a"')),
    chunk(call(0, None, ": 1}")),
    chunk({}, "tool_calls"),
    event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 7}, "metrics": SPEC}),
    b"data: [DONE]\n\n",
]


def recorded(parts: list[bytes]) -> Leg:
    recorder = LegRecorder("up", ticking().__next__)
    recorder.status(200)
    for part in parts:
        recorder.feed(part)
    return recorder.leg()


def test_a_stream_becomes_a_leg() -> None:
    leg = recorded(STREAM)
    assert leg.ok
    assert leg.chunk_s == (2.0, 3.0, 4.0, 5.0)  # the role alone is no content
    assert leg.seconds == 8.0
    assert (leg.text, leg.tool_calls) == ("Hello", (ToolCall("find", '{"a": 1}'),))
    assert (leg.prompt_tokens, leg.completion_tokens, leg.finish_reason) == (9, 7, "tool_calls")
    assert (leg.passes, leg.draft_tokens, leg.accepted_tokens) == (5, 6, 4)
    assert leg.acceptance_histogram == (1, 0, 2)


def with_usage(part: bytes, tokens: int) -> bytes:
    data = json.loads(part.removeprefix(b"data: "))
    return event({**data, "usage": {"completion_tokens": tokens}})


def test_tokens_of_chunks_come_from_their_usage_or_from_their_characters() -> None:
    counted = recorded([with_usage(STREAM[1], 4), with_usage(STREAM[2], 5), *STREAM[5:]])
    assert (counted.chunk_tokens, counted.completion_tokens) == ((4, 1), 7)
    assert counted.tpot_s == pytest.approx(1 / 3)  # of the tokens after the first chunk
    divided = recorded(STREAM)
    assert sum(divided.chunk_tokens) == 7
    assert divided.chunk_tokens == (1, 1, 3, 2)  # 3, 2, 8 and 4 characters


def test_a_first_chunk_of_many_tokens_is_no_speed() -> None:
    """Eight tokens by two passes of a second each, seven of them at once: first or last."""
    early = recorded([with_usage(STREAM[1], 7), with_usage(STREAM[2], 8), *STREAM[7:]])
    late = recorded([with_usage(STREAM[1], 1), with_usage(STREAM[2], 8), *STREAM[7:]])
    assert early.tpot_s == 1.0
    assert late.tpot_s == pytest.approx(1 / 7)
    assert recorded([with_usage(STREAM[1], 8), *STREAM[7:]]).tpot_s is None


def test_an_event_or_a_stream_without_end_is_not_held_in_memory() -> None:
    recorder = LegRecorder("up")
    recorder.status(200)
    for _ in range(MAX_EVENT // 2**16 + 1):
        recorder.feed(b"x" * 2**16)
    assert recorder.leg().error == "malformed"
    assert len(recorder._sse._rest) <= MAX_EVENT
    recorder = LegRecorder("up")
    recorder.status(200)
    part = chunk({"content": "y" * 2**18})
    assert [recorder.feed(part) for _ in range(MAX_STREAM // len(part) + 1)].count(False) == 1
    assert recorder.leg().error == "answer_too_large"


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_bytes_may_be_cut_anywhere(size: int, line_end: bytes) -> None:
    stream = b"".join(STREAM).replace(b"\n", line_end)
    leg = recorded([stream[i : i + size] for i in range(0, len(stream), size)])
    assert leg.ok
    assert leg.text == "Hello"
    assert leg.tool_calls == (ToolCall("find", '{"a": 1}'),)


def test_comments_are_no_chunks() -> None:
    assert recorded([b": keep-alive\n\n", *STREAM]).text == "Hello"


def test_a_stream_that_stops_before_its_end_is_incomplete() -> None:
    assert recorded(STREAM[:3]).error == "incomplete"


def test_an_error_inside_a_stream_is_the_legs() -> None:
    assert recorded([STREAM[1], event({"error": {"message": "secret"}})]).error == "upstream_error"


@pytest.mark.parametrize("part", [b"data: {oops\n\n", event([1]), event({"choices": [3]})])
def test_a_malformed_event_never_raises(part: bytes) -> None:
    assert recorded([part, *STREAM]).error == "malformed"


def test_a_status_of_failure_is_an_error() -> None:
    recorder = LegRecorder("up")
    recorder.status(503)
    assert recorder.leg().error == "http_503"


def test_a_whole_body_becomes_a_leg() -> None:
    recorder = LegRecorder("up", ticking().__next__)
    recorder.status(200)
    message = {"content": "Hi", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    recorder.body({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})
    leg = recorder.leg()
    assert leg.ok
    assert (leg.text, leg.calls, leg.cached_tokens, leg.ttft_s) == ("Hi", 1, 1, 1.0)


def test_a_plain_completion_becomes_a_leg() -> None:
    choice = {"index": 0, "text": "abc", "finish_reason": "length"}
    leg = recorded([event({"choices": [choice]}), b"data: [DONE]\n\n"])
    assert (leg.text, leg.finish_reason) == ("abc", "length")


def test_a_stream_of_responses_becomes_a_leg() -> None:
    items = [
        {"type": "message", "content": [{"type": "output_text", "text": "Hi"}]},
        {"type": "function_call", "name": "f", "arguments": "{}"},
    ]
    end = {
        "type": "response.completed",
        "response": {"id": "r", "output": items, "usage": {"input_tokens": 4, "output_tokens": 3}},
    }
    leg = recorded([event({"type": "response.output_text.delta", "delta": "Hi"}), event(end)])
    assert leg.ok
    assert (leg.text, leg.finish_reason, leg.completion_tokens) == ("Hi", "tool_calls", 3)
    assert leg.tool_calls == (ToolCall("f", "{}"),)
