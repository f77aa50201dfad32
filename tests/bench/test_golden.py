"""bench golden compares what was said, and nothing that differs from run to run."""

import json

from bench.golden import requests, stream_text, without_ids


def event(**delta: object) -> str:
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


def test_chunks_are_put_together_however_they_were_cut() -> None:
    first = {"index": 0, "id": "call_1", "function": {"name": "find", "arguments": ""}}
    rest = [{"index": 0, "function": {"arguments": piece}} for piece in ('{"a"', ": 1}")]
    lines = [event(content="On"), event(content="e."), event(tool_calls=[first])]
    lines += [event(tool_calls=[one]) for one in rest]
    lines += ['data: {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}', "data: [DONE]"]
    assert stream_text("\n\n".join(lines)) == ["One.", [["find", '{"a": 1}']], "tool_calls"]


def test_ids_and_usage_are_left_out() -> None:
    body = [{"id": "call_7", "text": "yes", "deeper": {"call_id": "x", "usage": 3, "kept": [1]}}]
    assert without_ids(body) == [{"text": "yes", "deeper": {"kept": [1]}}]


def test_every_request_has_a_name_of_its_own() -> None:
    names = [name for name, _, _ in requests()]
    assert len(names) == len(set(names)) > 90
