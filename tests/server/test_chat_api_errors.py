"""Requests that /v1/chat/completions and /v1/completions refuse, as the `openai` client sees them."""

from typing import Any

import httpx
import openai
import pytest

from support.servers import Running


@pytest.fixture(scope="module")
def server(toy_server: Running) -> Running:
    return toy_server


ASKED: list[Any] = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

UNKNOWN = {"type": "object", "properties": {"a": {"type": "string", "format": "hue"}}}


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def schema(given: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": given}}


def allowed(*names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}


CONTINUE = {"continue_final_message": True}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"extra_body": {"colour": "red"}}, "colour"),
    ({"temperature": -0.5}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stop": [""]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"stop": ["é" * 5000, "y" * 6385]}, "stop"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"extra_body": {"stop_token_ids": [1] * 65}}, "stop_token_ids"),
    ({"logit_bias": {"1000000": 1}}, "logit_bias"),
    ({"extra_body": {"stop_token_ids": [10**6]}}, "stop_token_ids"),
    ({"extra_body": {"stop_token_ids": [-1]}}, "stop_token_ids"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [*ASKED, {"role": "user"}]}, "messages[1].content"),
    ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
    ({"extra_body": {"mood": 1}}, "mood"),
    ({"extra_body": {"reasoning_effort": "huge"}}, "reasoning_effort"),
    ({"extra_body": {"verbosity": "loud"}}, "verbosity"),
    ({"extra_body": {"min_tokens": -1}}, "min_tokens"),
    ({"extra_body": {"min_tokens": 9}, "max_tokens": 8}, "min_tokens"),
    ({"extra_body": {"skip_special_tokens": False}}, "skip_special_tokens"),
    (
        {"extra_body": {"continue_final_message": True, "add_generation_prompt": True}},
        "add_generation_prompt",
    ),
    ({"extra_body": {"chat_template_kwargs": {"continue_final_message": True}}}, "chat_template_kwargs"),
    (
        {"messages": [*ASKED, {"role": "assistant", "content": None}], "extra_body": CONTINUE},
        "messages",
    ),
    (
        {"messages": [*ASKED, {"role": "assistant", "content": "x", "function_call": {}}]},
        "messages[1].function_call",
    ),
    (
        {"messages": [*ASKED, {"role": "assistant", "content": "x", "audio": {"id": "a"}}]},
        "messages[1].audio",
    ),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"tools": [TOOL], "tool_choice": 5}, "tool_choice"),
    ({"store": "yes"}, "store"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"tools": [TOOL], "tool_choice": allowed("fly")}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": 5}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": allowed()}, "tool_choice"),
    ({"modalities": ["audio"]}, "modalities[0]"),
    ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"extra_body": {"top_k": -2}}, "top_k"),
    ({"extra_body": {"min_p": 2}}, "min_p"),
    ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
    ({"extra_body": {"priority": 101}}, "priority"),
    ({"extra_body": {"speculative_config": {"speed": 9}}}, "speculative_config.speed"),
    ({"extra_body": {"speculative_config": {"draft_model": "gpt"}}}, "speculative_config.draft_model"),
    (
        {"extra_body": {"speculative_config": {"acceptance_threshold": 2}}},
        "speculative_config.acceptance_threshold",
    ),
    ({"extra_body": {"speculative_config": {"drafters": ["gpt"]}}}, "speculative_config.drafters"),
    (
        {"extra_body": {"speculative_config": {"draft_model": "ngram", "drafters": ["suffix"]}}},
        "speculative_config.draft_model",
    ),
    (
        {"response_format": schema({}), "extra_body": {"structured_outputs": {"regex": "a"}}},
        "structured_outputs",
    ),
    (
        {"extra_body": {"speculative_config": {"accept": "block", "tree_width": 2}}},
        "speculative_config.tree_width",
    ),
    ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "structured_outputs"),
    ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs.regex"),
    ({"extra_body": {"structured_outputs": {"grammar": "start: ("}}}, "structured_outputs.grammar"),
    ({"extra_body": {"structured_outputs": {"choice": [""]}}}, "structured_outputs.choice"),
    ({"extra_body": {"structured_outputs": {"json": UNKNOWN}}}, "structured_outputs.json"),
    ({"response_format": schema(UNKNOWN)}, "response_format.json_schema.schema"),
    ({"response_format": schema(5)}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"tools": [TOOL, tool("g", UNKNOWN)]}, "tools[1].function.parameters"),
    ({"tools": [TOOL, tool("g", {"type": "string"})]}, "tools[1].function.parameters"),
    ({"tools": [TOOL, tool("", {})]}, "tools[1]"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [TOOL], "response_format": schema(UNKNOWN)}, "response_format.json_schema.schema"),
    ({"prediction": {"type": "content", "content": [{"type": "image"}]}}, "prediction.content[0]"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "word " * 9000}]}, "messages"),
]


@pytest.mark.parametrize(
    ("asked", "param"), WRONG, ids=[f"{i}-{param}" for i, (_, param) in enumerate(WRONG)]
)
def test_what_cannot_be_done_is_named(server: Running, asked: dict[str, Any], param: str) -> None:
    given = {"model": server.model, "messages": ASKED, **asked}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            server.client().chat.completions.create(**given, stream=stream)
        assert caught.value.param == param
        assert caught.value.type == "invalid_request_error"


COMPLETIONS_WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": [10**6]}, "prompt"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": [["a"]]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"echo": True}, "echo"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
]


@pytest.mark.parametrize(("asked", "param"), COMPLETIONS_WRONG, ids=[param for _, param in COMPLETIONS_WRONG])
def test_what_completions_cannot_do_is_named(server: Running, asked: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().completions.create(**{"model": server.model, "prompt": "x", **asked})
    assert caught.value.param == param


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"role": "user", "content": [5]},
        {"role": "user", "content": {"secret": 1}},
        {"role": "assistant", "content": None, "tool_calls": [5]},
        {"role": "assistant", "content": None, "tool_calls": "secret"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": 5}]},
    ],
)
def test_messages_that_cannot_be_read(server: Running, message: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().chat.completions.create(model=server.model, messages=[message])  # type: ignore[list-item]
    assert "secret" not in caught.value.message


def test_tokens_that_are_not_the_models(server: Running) -> None:
    for tokens in ([10**6], [-1]):
        body = {"tokens": tokens}
        assert httpx.post(f"{server.url}/detokenize", json=body, trust_env=False).status_code == 400
    with pytest.raises(openai.BadRequestError):
        server.client().completions.create(model=server.model, prompt=[10**6])
    with pytest.raises(openai.BadRequestError):
        server.client().completions.create(model=server.model, prompt="x", logit_bias={"1000000": 1})


def test_a_drafter_that_is_not_known(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="gpt"):
        server.client().completions.create(
            model=server.model, prompt="x", extra_body={"speculative_config": {"drafters": ["gpt"]}}
        )


def test_unknown_models(server: Running) -> None:
    client = server.client()
    for ask in (
        lambda: client.chat.completions.create(model="gpt-9", messages=ASKED),
        lambda: client.completions.create(model="gpt-9", prompt="x"),
        lambda: client.models.retrieve("gpt-9"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            ask()
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_prompts_that_are_too_long(server: Running) -> None:
    long: list[Any] = [{"role": "user", "content": "word " * 9000}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            server.client().chat.completions.create(model=server.model, messages=long, stream=stream)
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b'{"model": 1', b"\xff\xfe", b"[" * 100_000])
def test_bodies_that_are_not_json_objects(server: Running, body: bytes) -> None:
    for path in ("chat/completions", "completions", "responses"):
        json_type = {"content-type": "application/json"}
        found = httpx.post(f"{server.url}/v1/{path}", content=body, headers=json_type, trust_env=False)
        assert found.status_code == 400
        assert set(found.json()["error"]) == {"message", "type", "param", "code"}


def test_other_paths_and_methods(server: Running) -> None:
    found = httpx.get(f"{server.url}/v1/nothing", trust_env=False)
    assert (found.status_code, found.json()["error"]["type"]) == (404, "invalid_request_error")
    found = httpx.get(f"{server.url}/v1/chat/completions", trust_env=False)
    assert (found.status_code, found.json()["error"]["type"]) == (405, "invalid_request_error")


def test_options_of_a_stream_need_one(server: Running) -> None:
    given: dict[str, Any] = {"model": server.model, "messages": ASKED}
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().chat.completions.create(**given, stream_options={"include_usage": True})
    assert caught.value.param == "stream_options"


@pytest.mark.parametrize(
    ("asked", "known"),
    [
        ({"speculative_config": {"method": "x"}}, "Known: drafters, draft_model, max_draft, threshold, "),
        ({"structured_outputs": {"jsn": {}}}, "did you mean 'json'? Known: json, regex, "),
        ({"temprature": 1}, "did you mean 'temperature'? Known: model, user, "),
        ({"stream": True, "stream_options": {"a": 1}}, "Known: include_usage, "),
    ],
)
def test_an_unknown_key_gets_the_known_ones_of_its_object(
    server: Running, asked: dict[str, Any], known: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().chat.completions.create(model=server.model, messages=ASKED, extra_body=asked)
    assert known in caught.value.message
    assert "unknown key" in caught.value.message


LONG = "secret" * 5000
ECHOED: list[dict[str, Any]] = [
    {"model": LONG},
    {LONG: 1},
    {"metadata": {LONG: 1}},
    {"stop": [LONG, ""]},
    {"logit_bias": {LONG: 1}},
    {"speculative_config": {LONG: 1}},
    {"speculative_config": {"drafters": [LONG]}},
    {"speculative_config": {"draft_model": LONG}},
    {"structured_outputs": {"regex": f"({LONG}"}},
    {"structured_outputs": {"grammar": LONG}},
    {"structured_outputs": {"choice": [LONG, ""]}},
    {"structured_outputs": {"json": {"type": LONG}}},
    {"structured_outputs": {"json": {LONG: 1, "type": "object", "properties": {"a": {"format": LONG}}}}},
    {"response_format": {"type": LONG}},
    {"tools": [TOOL], "tool_choice": LONG},
    {"tools": [{"type": "function", "function": {"name": LONG, "parameters": 5}}]},
    {"tools": [{"type": "function", "function": {"name": LONG}}] * 2},
    {"chat_template_kwargs": {f"{LONG} ": 1}},
    {"messages": [{"role": LONG, "content": "x"}]},
    {"messages": [{"role": "user", "content": {LONG: 1}}]},
]


@pytest.mark.parametrize("asked", ECHOED, ids=[str(list(asked))[:40] for asked in ECHOED])
def test_what_a_client_sent_is_not_sent_back_at_length(server: Running, asked: dict[str, Any]) -> None:
    given = {"model": server.model, "messages": ASKED, "max_tokens": 1, **asked}
    found = httpx.post(f"{server.url}/v1/chat/completions", json=given, trust_env=False, timeout=60)
    assert 400 <= found.status_code < 500
    assert "secret" * 11 not in found.text


def test_stop_texts_are_not_sent_back(server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().chat.completions.create(model=server.model, messages=ASKED, stop=["secret", ""])
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("tokenize", {"prompt": "x", "model": "gpt-9"}, 404, "model"),
        ("detokenize", {"tokens": [1], "model": "gpt-9"}, 404, "model"),
        ("tokenize", {"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role"),
        ("tokenize", {"messages": [{"role": "user", "content": [5]}]}, 400, "messages"),
    ],
)
def test_what_cannot_be_made_tokens(
    server: Running, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    found = httpx.post(f"{server.url}/{path}", json=body, trust_env=False)
    assert (found.status_code, found.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize("name", ["echo", "include_stop_str_in_output"])
def test_what_is_not_done_comes_with_advice(server: Running, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match="Input should be false: "):
        server.client().completions.create(model=server.model, prompt="x", extra_body={name: True})
