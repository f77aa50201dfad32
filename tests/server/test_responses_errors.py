"""Requests that /v1/responses refuses, as the `openai` client sees them."""

from typing import Any

import openai
import pytest

from support.servers import Running


@pytest.fixture(scope="module")
def server(toy_server: Running) -> Running:
    return toy_server


WEATHER: dict[str, Any] = {"type": "function", "name": "get_weather", "parameters": {}, "strict": True}


def allowed(*names: str) -> dict[str, Any]:
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": "auto", "tools": tools}


UNKNOWN = {"type": "object", "properties": {"a": {"type": "string", "format": "hue"}}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"store": "yes"}, "store"),
    ({"truncation": "middle"}, "truncation"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"include": ["message.output_text.colours"]}, "include[0]"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"extra_body": {"min_tokens": 9}, "max_output_tokens": 8}, "min_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": [5]}, "input"),
    ({"input": [{"role": "user", "content": [5]}]}, "input[0].content"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "input[0].mood"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "function_call_output", "call_id": "c1", "output": "7"}]}, "input[0].call_id"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{**WEATHER, "name": ""}]}, "tools[0].name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "fly"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": allowed("fly")}, "tool_choice"),
    ({"tool_choice": allowed("get_weather")}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": UNKNOWN}}}, "text.format.schema"),
    ({"tools": [WEATHER, {**WEATHER, "name": "b", "parameters": UNKNOWN}]}, "tools[1].parameters"),
    ({"extra_body": {"speculative_config": {"drafters": ["gpt"]}}}, "speculative_config.drafters"),
    (
        {"extra_body": {"speculative_config": {"accept": "block", "tree_width": 2}}},
        "speculative_config.tree_width",
    ),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"extra_body": {"colour": "red"}}, "colour"),
    ({"extra_body": {"speculative_config": {"drafter": 1}}}, "speculative_config.drafter"),
    ({"extra_body": {"priority": 1000}}, "priority"),
]


@pytest.mark.parametrize(("asked", "param"), WRONG, ids=[param for _, param in WRONG])
def test_what_cannot_be_done_is_named(server: Running, asked: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            server.client().responses.create(**{"model": server.model, "input": "x", **asked}, stream=stream)
        assert caught.value.param == param
        assert caught.value.type == "invalid_request_error"
        assert param.split("[")[0].split(".")[0] in caught.value.message


def test_unknown_models_and_long_inputs(server: Running) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        server.client().responses.create(model="gpt-9", input="x")
    assert missing.value.code == "model_not_found"
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            server.client().responses.create(model=server.model, input="word " * 9000, stream=stream)
        assert caught.value.code == "context_length_exceeded"


def test_unknown_keys_get_the_known_ones_of_their_object(server: Running) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "shema": {}, "schema": {}}}},
            "name, schema",
        ),
        ({"reasoning": {"efort": "none"}}, "Known: effort, summary"),
        ({"tools": [{**WEATHER, "param": 1}]}, "Known: type, name, description, parameters"),
    ]
    for asked, known in wrong:
        with pytest.raises(openai.BadRequestError) as caught:
            server.client().responses.create(**{"model": server.model, "input": "x", **asked})
        assert known in caught.value.message


def test_options_of_a_stream_need_one(server: Running) -> None:
    body = {"stream_options": {"include_obfuscation": False}}
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().responses.create(model=server.model, input="x", extra_body=body)
    assert caught.value.param == "stream_options"
