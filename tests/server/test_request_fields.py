"""Fields of requests that need an engine but no particular words: lengths, continued messages, tools."""

import json
from typing import Any

import httpx
import pytest

from support.clients import CHAT_TOOLS, ITEM_TOOLS
from support.servers import Running

USER: dict[str, Any] = {"role": "user", "content": "Is it late in Rome?"}
MARK = "<tool_call>"


def chat(server: Running, **asked: Any) -> Any:
    given = {"model": server.model, "messages": [USER], "temperature": 0, "max_tokens": 8, **asked}
    return server.client().chat.completions.create(**given)


def chunks(server: Running, **asked: Any) -> list[Any]:
    return [choice for chunk in chat(server, stream=True, **asked) for choice in chunk.choices]


def respond(server: Running, **asked: Any) -> Any:
    given = {"model": server.model, "input": "Is it late?", "temperature": 0, "max_output_tokens": 8, **asked}
    return server.client().responses.create(**given)


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize("name", ["get_weather", "get_time"])
def test_of_all_tools_that_are_offered_only_the_allowed_ones_are_called(
    toy_server: Running, name: str
) -> None:
    only = {"type": "function", "function": {"name": name}}
    asked: dict[str, Any] = {"tools": CHAT_TOOLS, "max_tokens": 400, "parallel_tool_calls": False}
    whole = chat(toy_server, tool_choice=allowed("required", only), **asked)
    free = chat(toy_server, tool_choice="required", **asked)
    (call,) = whole.choices[0].message.tool_calls
    assert call.function.name == name
    assert whole.usage.prompt_tokens == free.usage.prompt_tokens  # all of them are offered
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": name}]}
    found = respond(
        toy_server, tools=ITEM_TOOLS, tool_choice=choice, max_output_tokens=400, parallel_tool_calls=False
    )
    assert [item.name for item in found.output] == [name]
    assert found.tool_choice.to_dict() == choice


def test_allowed_tools_may_be_left_alone(toy_server: Running) -> None:
    auto = allowed("auto", {"type": "function", "function": {"name": "get_time"}})
    free = chat(toy_server, tools=CHAT_TOOLS, tool_choice="auto").choices[0].message
    assert chat(toy_server, tools=CHAT_TOOLS, tool_choice=auto).choices[0].message == free


@pytest.mark.sampled(2)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
def test_a_required_call_that_is_cut_short_is_never_content(toy_server: Running, choice: Any) -> None:
    """Wherever it is cut: the mark, the name, the arguments. What was sent of the arguments stays sent."""
    asked: dict[str, Any] = {"tools": CHAT_TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    partial = 0
    for limit in range(1, 40):
        whole = chat(toy_server, max_tokens=limit, **asked).choices[0]
        streamed = chunks(toy_server, max_tokens=limit, **asked)
        assert not whole.message.content
        assert "".join(choice.delta.content or "" for choice in streamed) == ""
        sent = "".join(
            call.function.arguments or "" for choice in streamed for call in choice.delta.tool_calls or ()
        )
        calls = whole.message.tool_calls or []
        assert sent == "".join(call.function.arguments for call in calls)
        assert whole.finish_reason == streamed[-1].finish_reason
        if whole.finish_reason == "length" and sent:
            partial += 1
            with pytest.raises(json.JSONDecodeError):
                json.loads(sent)
    assert partial > 3


@pytest.mark.parametrize("limit", range(1, 12))
def test_a_response_that_is_cut_short_has_no_mark_either(toy_server: Running, limit: int) -> None:
    found = respond(toy_server, tools=ITEM_TOOLS, tool_choice="required", max_output_tokens=limit)
    assert found.status == "incomplete"
    assert found.output_text == ""


def test_an_answer_has_its_fewest_tokens(toy_server: Running) -> None:
    """The likeliest first token ends the answer, unless so many must come."""
    first = chat(toy_server, logprobs=True, max_tokens=12).choices[0].logprobs.content[0]
    prompt: Any = {"prompt": first.token, "add_special_tokens": False}
    (token,) = httpx.post(f"{toy_server.url}/tokenize", json=prompt, trust_env=False).json()["tokens"]
    stop: dict[str, Any] = {"stop_token_ids": [token]}
    short = chat(toy_server, max_tokens=12, extra_body=stop)
    assert (short.usage.completion_tokens, short.choices[0].finish_reason) == (1, "stop")
    for spec in ({"disabled": True}, {"drafters": ["suffix", "ngram"], "adaptive": False}):
        body = {**stop, "min_tokens": 9, "speculative_config": spec}
        assert chat(toy_server, max_tokens=12, extra_body=body).usage.completion_tokens >= 9
        found = respond(toy_server, max_output_tokens=12, extra_body={"min_tokens": 9})
        assert found.usage.output_tokens >= 9


def test_the_final_message_is_continued(toy_server: Running) -> None:
    def tokens(*messages: dict[str, Any], **more: Any) -> list[int]:
        body = {"messages": list(messages), **more}
        found = httpx.post(f"{toy_server.url}/tokenize", json=body, trust_env=False).json()
        return list(found["tokens"])

    def text(ids: list[int]) -> str:
        body = {"tokens": ids}
        return str(httpx.post(f"{toy_server.url}/detokenize", json=body, trust_env=False).json()["prompt"])

    begun = {"role": "assistant", "content": "It is "}
    opened = text(tokens(USER))
    assert opened.endswith("<|im_start|>assistant\n")
    assert text(tokens(USER, begun, continue_final_message=True)) == opened + "It is "
    assert text(tokens(USER, add_generation_prompt=False)) == opened.removesuffix("<|im_start|>assistant\n")
    for body, same in (
        ({"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False}),
        ({"add_generation_prompt": True}, {}),
    ):
        answers = [
            chat(toy_server, messages=[USER, begun], extra_body=b).choices[0].message for b in (body, same)
        ]
        assert answers[0] == answers[1]


@pytest.mark.parametrize("speculative", [True, False])
def test_a_continued_message_is_the_prompt_and_nothing_else_is(
    toy_server: Running, speculative: bool
) -> None:
    """The answer is that to the same text as a plain prompt."""
    begun = {"role": "assistant", "content": "It is "}
    plain = "<|im_start|>user\nIs it late in Rome?<|im_end|>\n<|im_start|>assistant\nIt is "
    body = {"speculative_config": {"disabled": not speculative}}
    given: dict[str, Any] = {"seed": 4, "temperature": 0.8, "max_tokens": 24}
    text = toy_server.client().completions.create(
        model=toy_server.model, prompt=plain, extra_body=body, **given
    )
    found = chat(
        toy_server, messages=[USER, begun], extra_body={**body, "continue_final_message": True}, **given
    )
    assert found.choices[0].message.content == text.choices[0].text
    assert found.usage.prompt_tokens == text.usage.prompt_tokens


def test_a_constraint_waits_for_the_end_of_reasoning_that_is_continued(toy_server: Running) -> None:
    """Only of the assistant's own: what a user writes never counts."""
    body = {"continue_final_message": True, "structured_outputs": {"regex": "[0-9]+"}}

    def answer(role: str, said: str) -> str:
        messages = [USER, {"role": role, "content": said}]
        return str(chat(toy_server, messages=messages, extra_body=body).choices[0].message.content)

    assert answer("assistant", "It is ").isdigit()
    assert not answer("assistant", "<think>\nIt is ").isdigit()
    assert answer("assistant", "<think>\nIt is late.\n</think>\n\n").isdigit()
    assert answer("user", "<think>\nIt is ").isdigit()


def test_log_probabilities_of_a_response_are_those_of_a_chat(toy_server: Running) -> None:
    said = chat(
        toy_server, messages=[{"role": "user", "content": "Is it late?"}], logprobs=True, top_logprobs=3
    )
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    whole = respond(toy_server, **asked)
    events = list(respond(toy_server, stream=True, **asked))
    streamed: Any = events[-1].response
    parts = [response.output[0].content[0].to_dict() for response in (whole, streamed)]
    assert parts[0] == parts[1]
    entries = parts[0]["logprobs"]
    of_chat = [entry.to_dict() for entry in said.choices[0].logprobs.content]
    assert entries == of_chat[: len(entries)]
    assert len(entries) >= len(of_chat) - 1  # without the token that ends the answer, which is no text
    assert all(len(entry["top_logprobs"]) == 3 for entry in entries)
    sent = [
        entry.to_dict()
        for event in events
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    done = next(event for event in events if event.type == "response.output_text.done")
    assert sent == [entry.to_dict() for entry in done.logprobs] == entries
    assert respond(toy_server).output[0].content[0].logprobs == []


def test_several_prompts_are_streamed_together(toy_server: Running) -> None:
    given: dict[str, Any] = {"model": toy_server.model, "prompt": ["One", "Two", "Three"], "n": 2, "seed": 3}
    given |= {"temperature": 0.9, "max_tokens": 12, "logprobs": 0}
    client = toy_server.client()
    whole = client.completions.create(**given)
    options: Any = {"include_usage": True}
    streamed = list(client.completions.create(**given, stream=True, stream_options=options))
    texts, reasons, offsets = dict.fromkeys(range(6), ""), {}, {i: [] for i in range(6)}  # type: ignore[var-annotated]
    for chunk in streamed:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
            offsets[choice.index] += (choice.logprobs.text_offset or []) if choice.logprobs else []
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert offsets[choice.index] == choice.logprobs.text_offset
    assert streamed[-1].usage is not None
    assert whole.usage is not None
    assert streamed[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({chunk.id for chunk in streamed}) == 1


def test_a_prompt_that_fails_ends_the_stream_of_all(toy_server: Running) -> None:
    given: dict[str, Any] = {"model": toy_server.model, "prompt": ["One", "word " * 9000], "max_tokens": 2000}
    body = {"ignore_eos": True}
    with pytest.raises(Exception, match="context") as caught:
        list(toy_server.client().completions.create(**given, stream=True, extra_body=body))
    assert caught.value.code == "context_length_exceeded"  # type: ignore[attr-defined]
    for _ in range(200):
        if not toy_server.in_flight:
            break
        chat(toy_server, max_tokens=1)
    assert toy_server.in_flight == 0
