"""Requests as well-known clients send them: no harmless field is refused, and no object of theirs either."""

from typing import Any

import httpx
import pytest

from support.clients import CHAT_TOOLS, ITEM_TOOLS
from support.servers import Running

SYSTEM = {"role": "system", "content": "You are a coding agent."}
USER = {"role": "user", "content": "Rename f to g."}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Rename f to g."}]}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": '{"city": "Rome"}'}}
STRICT_TOOLS = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in CHAT_TOOLS]

CHATS: dict[str, dict[str, Any]] = {
    "langchain": {
        "messages": [
            {**SYSTEM, "name": "agent"},
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "12", "tool_call_id": "call_1"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.7,
        "n": 1,
        "max_completion_tokens": 4,
        "parallel_tool_calls": False,
        "tools": STRICT_TOOLS,
        "tool_choice": "auto",
        "reasoning_effort": "low",
        "verbosity": "low",
        "service_tier": "flex",
    },
    "litellm and aider": {
        "messages": [
            {
                "role": "system",
                "content": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            },
            USER,
            {
                "role": "assistant",
                "content": "Done.",
                "refusal": None,
                "annotations": [],
                "function_call": None,
                "tool_calls": None,
                "reasoning_content": None,
                "provider_specific_fields": {"refusal": None},
            },
            USER,
        ],
        "temperature": 0,
        "max_tokens": 4,
        "stream": True,
        "user": "aider",
        "metadata": {"trace": "1"},
        "stop": None,
    },
    "vercel ai sdk": {
        "messages": [SYSTEM, PARTS],
        "max_tokens": 4,
        "temperature": 0,
        "top_p": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "seed": 1,
        "stop": ["END"],
        "response_format": {"type": "text"},
        "reasoning_effort": "medium",
        "verbosity": "medium",
        "prompt_cache_key": "k",
        "safety_identifier": "u",
        "prompt_cache_retention": "24h",
        "store": False,
        "logit_bias": {},
        "logprobs": True,
        "top_logprobs": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "continue": {
        "messages": [SYSTEM, USER],
        "max_tokens": 4,
        "temperature": 0.01,
        "top_p": None,
        "frequency_penalty": None,
        "presence_penalty": None,
        "stream": True,
        "stop": ["\n\n"],
        "prediction": {"type": "content", "content": "def g(): pass"},
        "tools": CHAT_TOOLS,
    },
    "cline": {
        "messages": [SYSTEM, PARTS],
        "temperature": 0,
        "reasoning_effort": "high",
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": CHAT_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
    },
    "zed": {
        "messages": [SYSTEM, PARTS, {"role": "assistant", "content": None, "tool_calls": [CALL]}, USER],
        "stream": True,
        "max_completion_tokens": 4,
        "stop": [],
        "temperature": 1.0,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "tools": CHAT_TOOLS,
        "prompt_cache_key": "thread-1",
        "reasoning_effort": "minimal",
    },
    "codecompanion": {
        "messages": [{**SYSTEM, "id": 1947269257, "opts": {"visible": False}}, {**USER, "id": 2, "opts": {}}],
        "stream": True,
        "max_tokens": 4,
        "top_p": 1,
    },
    "vllm's own": {
        "messages": [USER],
        "max_tokens": 4,
        "min_tokens": 2,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "top_k": -1,
        "repetition_penalty": 1.0,
    },
}
RESPONSES: dict[str, dict[str, Any]] = {
    "codex": {
        "instructions": "You are a coding agent.",
        "input": [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "Be brief."}],
            },
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "Rename f to g."}],
            },
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "x"},
            {
                "type": "function_call",
                "name": "get_time",
                "arguments": "{}",
                "call_id": "c1",
                "status": "completed",
            },
            {"type": "function_call_output", "call_id": "c1", "output": "12"},
        ],
        "tools": ITEM_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread",
        "text": {"verbosity": "medium"},
        "client_metadata": {"session": "1"},
        "access_programs": {"cyber": "standard"},
        "max_output_tokens": 4,
    },
    "vercel ai sdk": {
        "input": [
            {"role": "system", "content": "You are a coding agent."},
            {"role": "user", "content": [{"type": "input_text", "text": "Rename f to g."}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Done."}], "id": "msg_1"},
            {"role": "user", "content": [{"type": "input_text", "text": "And h?"}]},
        ],
        "temperature": 0,
        "max_output_tokens": 4,
        "store": True,
        "truncation": "auto",
        "service_tier": "priority",
        "include": ["message.output_text.logprobs", "web_search_call.action.sources"],
        "top_logprobs": 2,
        "metadata": {"a": "b"},
        "safety_identifier": "u",
        "prompt_cache_retention": "24h",
        "max_tool_calls": 4,
        "reasoning": {"effort": "low"},
        "stream": True,
    },
    "litellm": {
        "input": "ping",
        "metadata": {"trace_id": "abc"},
        "max_output_tokens": 4,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "background": False,
    },
}


def posted(server: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/{path}", json={"model": server.model, **body}, trust_env=False, timeout=60
    )


@pytest.mark.parametrize("client", CHATS)
def test_chats_of_well_known_clients_are_answered(toy_server: Running, client: str) -> None:
    found = posted(toy_server, "chat/completions", CHATS[client])
    assert found.status_code == 200, found.text
    assert "error" not in found.text


@pytest.mark.parametrize("client", RESPONSES)
def test_responses_of_well_known_clients_are_answered(toy_server: Running, client: str) -> None:
    found = posted(toy_server, "responses", RESPONSES[client])
    assert found.status_code == 200, found.text
    assert "response.failed" not in found.text


def prompt_tokens(server: Running, messages: list[Any]) -> int:
    found = server.client().chat.completions.create(model=server.model, messages=messages, max_tokens=1)
    assert found.usage is not None
    return found.usage.prompt_tokens


def test_a_message_of_the_openai_package_can_be_sent_back(toy_server: Running) -> None:
    """As its `model_dump()` writes it, with null for every field that is not set."""
    given: dict[str, Any] = {"model": toy_server.model, "messages": [USER], "max_tokens": 4, "seed": 1}
    message = toy_server.client().chat.completions.create(**given).choices[0].message
    dumped = message.model_dump()
    assert {name for name, value in dumped.items() if value is None} >= {"refusal", "audio", "function_call"}
    plain = {"role": "assistant", "content": message.content}
    assert prompt_tokens(toy_server, [USER, dumped, USER]) == prompt_tokens(toy_server, [USER, plain, USER])


def test_calls_of_the_openai_package_can_be_sent_back(toy_server: Running) -> None:
    given: dict[str, Any] = {
        "tools": CHAT_TOOLS,
        "tool_choice": "required",
        "max_tokens": 400,
        "temperature": 0,
    }
    given |= {"model": toy_server.model, "parallel_tool_calls": False}
    message = toy_server.client().chat.completions.create(messages=[USER], **given).choices[0].message  # type: ignore[list-item]
    assert message.tool_calls
    dumped = message.model_dump()
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "12"}
    plain = {"role": "assistant", "tool_calls": [call.to_dict() for call in message.tool_calls]}
    assert dumped["content"] is None
    assert prompt_tokens(toy_server, [USER, dumped, result]) == prompt_tokens(
        toy_server, [USER, plain, result]
    )


@pytest.mark.parametrize("content", [None, []])
def test_an_assistant_may_have_said_nothing(toy_server: Running, content: Any) -> None:
    silent = {"role": "assistant", "content": content}
    empty = {"role": "assistant", "content": ""}
    assert prompt_tokens(toy_server, [USER, silent, USER]) == prompt_tokens(toy_server, [USER, empty, USER])


def test_a_refusal_is_what_the_assistant_said(toy_server: Running) -> None:
    said = {"role": "assistant", "content": "I cannot."}
    for refused in (
        {"role": "assistant", "content": None, "refusal": "I cannot."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]},
    ):
        assert prompt_tokens(toy_server, [USER, refused, USER]) == prompt_tokens(
            toy_server, [USER, said, USER]
        )


def test_items_of_the_openai_package_can_be_sent_back(toy_server: Running) -> None:
    client = toy_server.client()

    def answer(items: list[Any], **more: Any) -> Any:
        given = {"model": toy_server.model, "max_output_tokens": 400, "temperature": 0, **more}
        return client.responses.create(input=items, **given)

    text = answer([USER], max_output_tokens=4)
    calls = answer([USER], tools=ITEM_TOOLS, tool_choice="required", parallel_tool_calls=False)
    items = [*text.output, *calls.output]
    assert [item.type for item in items] == ["message", "function_call"]
    reasoning: dict[str, Any] = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "status": None,
        "encrypted_content": None,
    }
    history = [reasoning, *(item.model_dump() for item in items)]
    result = {"type": "function_call_output", "call_id": calls.output[0].call_id, "output": "12"}
    bare = [
        {"role": "assistant", "content": text.output_text},
        {k: getattr(calls.output[0], k) for k in ("type", "call_id", "name", "arguments")},
    ]
    sent, plain = (answer([USER, *h, result, USER], max_output_tokens=1) for h in (history, bare))
    assert sent.usage.input_tokens == plain.usage.input_tokens
