"""/v1/chat/completions and /v1/completions, with the real `openai` client against the real server."""

import json
from typing import Any

import jsonschema
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from support import clients
from support.clients import CITY
from support.servers import Running

pytestmark = pytest.mark.model

ASKED: list[Any] = [{"role": "user", "content": "Name three colours of the rainbow."}]
LOG = "INFO ready\nINFO ready\nINFO ready\nINFO"
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
TIME: Any = {"type": "function", "function": {"name": "get_time", "parameters": CITY}}
WHERE: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]


class Person(BaseModel):
    name: str
    age: int


def chat(server: Running, **asked: Any) -> ChatCompletion:
    given = {"model": server.model, "messages": ASKED, "temperature": 0, "max_completion_tokens": 20, **asked}
    found: ChatCompletion = server.client().chat.completions.create(**given)
    ChatCompletion.model_validate(found.to_dict())
    return found


def chunks(server: Running, **asked: Any) -> list[Any]:
    given = {"model": server.model, "messages": ASKED, "temperature": 0, "max_completion_tokens": 20, **asked}
    found = list(server.client().chat.completions.create(**given, stream=True))
    for chunk in found:
        type(chunk).model_validate(chunk.to_dict())
    assert len({chunk.id for chunk in found}) == 1
    return found


def text(found: ChatCompletion) -> str:
    return found.choices[0].message.content or ""


def streamed_text(found: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in found for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def complete(server: Running, prompt: Any = LOG, **asked: Any) -> Completion:
    given = {"model": server.model, "temperature": 0, "max_tokens": 12, **asked}
    found: Completion = server.client().completions.create(prompt=prompt, **given)
    Completion.model_validate(found.to_dict())
    return found


def test_an_answer(server: Running) -> None:
    found = chat(server)
    assert text(found)
    assert found.choices[0].finish_reason == "length"
    assert found.choices[0].message.role == "assistant"
    assert found.usage is not None
    assert found.usage.completion_tokens == 20
    assert server.model in (found.system_fingerprint or "")
    ended = chat(server, messages=[{"role": "user", "content": "Say: hi"}], max_completion_tokens=200)
    assert ended.choices[0].finish_reason == "stop"


def test_a_streamed_answer_is_the_whole_one(server: Running) -> None:
    found = chunks(server)
    assert streamed_text(found) == text(chat(server))
    assert found[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in found][-1] == "length"
    assert all(c.choices[0].finish_reason is None for c in found[:-1])
    assert all(c.usage is None for c in found)


def test_usage_at_the_end_of_a_stream(server: Running) -> None:
    *answer, last = chunks(server, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens == 20
    assert last.usage.total_tokens == last.usage.prompt_tokens + 20
    assert all(chunk.choices for chunk in answer)
    assert all(chunk.to_dict()["usage"] is None for chunk in answer)


def test_usage_with_every_chunk(server: Running) -> None:
    first, *rest = chunks(server, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert first.usage is None
    written = [chunk.usage.completion_tokens for chunk in rest]
    assert written == sorted(written)
    assert written[-1] == 20


def test_metrics_tell_the_passes(server: Running) -> None:
    found = chat(server, extra_body={"metrics": True, "remember": False})
    plain = chat(server, extra_body={"metrics": True, "speculative_config": {"disabled": True}})
    assert 1 <= found.to_dict()["metrics"]["passes"] <= plain.to_dict()["metrics"]["passes"]  # type: ignore[index]


def test_several_choices(server: Running) -> None:
    sampled: dict[str, Any] = {"n": 3, "temperature": 0.9, "seed": 5}
    found = chat(server, **sampled)
    said = [choice.message.content or "" for choice in found.choices]
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert len(set(said)) == 3
    assert said[0] == text(chat(server, **{**sampled, "n": 1}))
    streamed = chunks(server, **sampled, stream_options={"include_usage": True})
    assert [streamed_text(streamed, i) for i in range(3)] == said
    assert found.usage is not None
    assert 20 < found.usage.completion_tokens == streamed[-1].usage.completion_tokens <= 60
    assert found.usage.prompt_tokens == streamed[-1].usage.prompt_tokens


def test_the_seed_decides(server: Running) -> None:
    sampled = {"temperature": 0.8, "top_p": 0.95}
    first = text(chat(server, seed=1, **sampled))
    assert first == text(chat(server, seed=1, **sampled)) == streamed_text(chunks(server, seed=1, **sampled))
    assert first != text(chat(server, seed=2, **sampled))
    assert text(chat(server, seed=-1, **sampled))


def test_stop_strings_end_an_answer(server: Running) -> None:
    whole = text(chat(server))
    stop = whole[9:14]
    found = chat(server, stop=[stop, "never said"])
    assert text(found) == whole[: whole.index(stop)]
    assert found.choices[0].finish_reason == "stop"
    assert streamed_text(chunks(server, stop=stop)) == text(found)


def test_logprobs(server: Running) -> None:
    found = chat(server, logprobs=True, top_logprobs=3)
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    shown = logprobs.content or []
    assert len(shown) == 20
    assert bytes(b for token in shown for b in token.bytes or ()).decode() == text(found)
    for token in shown:
        best = max(token.top_logprobs, key=lambda other: other.logprob)
        assert (len(token.top_logprobs), best.token) == (3, token.token)
        assert best.logprob == pytest.approx(token.logprob)
        assert token.logprob <= 0
    streamed = [
        t
        for c in chunks(server, logprobs=True)
        if c.choices[0].logprobs
        for t in c.choices[0].logprobs.content
    ]
    assert [t.token for t in streamed] == [t.token for t in shown]
    assert [t.logprob for t in streamed] == pytest.approx([t.logprob for t in shown], abs=1e-3)


def test_logit_bias(server: Running) -> None:
    tokenizer = server.app.engine.llm.tokenizer
    (wanted,) = tokenizer.encode(" blue", special=False)
    found = chat(server, logit_bias={str(wanted): 100}, max_completion_tokens=3)
    assert text(found) == " blue blue blue"
    first = tokenizer.encode(text(chat(server)), special=False)[0]
    assert not text(chat(server, logit_bias={str(first): -100})).startswith(tokenizer.decode([first]))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tools_are_called(server: Running, choice: Any) -> None:
    asked: dict[str, Any] = {
        "messages": WHERE,
        "tools": [TIME, WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_completion_tokens": 80,
    }
    found = chat(server, **asked)
    assert found.choices[0].finish_reason == "tool_calls"
    assert found.choices[0].message.content is None
    calls: list[Any] = list(found.choices[0].message.tool_calls or ())
    (call,) = calls
    assert call.type == "function"
    assert call.function.name in (["get_weather"] if choice != "required" else ["get_time", "get_weather"])
    jsonschema.validate(json.loads(call.function.arguments), CITY)
    streamed = chunks(server, **asked)
    parts = [part for chunk in streamed for part in chunk.choices[0].delta.tool_calls or ()]
    assert parts[0].id.startswith("call_")
    assert [part.function.name for part in parts] == [call.function.name] + [None] * (len(parts) - 1)
    assert "".join(part.function.arguments for part in parts) == call.function.arguments
    assert streamed[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("parallel", [True, False])
def test_tools_may_be_called(server: Running, parallel: bool) -> None:
    asked: dict[str, Any] = {
        "messages": clients.as_messages(),
        "tools": clients.CHAT_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": parallel,
        "max_completion_tokens": 120,
    }
    found = chat(server, **asked).choices[0]
    calls: list[Any] = list(found.message.tool_calls or ())
    assert found.finish_reason == "tool_calls"
    assert len({call.id for call in calls}) == len(calls) == (2 if parallel else 1)
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), CITY)
    parts = [p for c in chunks(server, **asked) for p in c.choices[0].delta.tool_calls or ()]
    for i, call in enumerate(calls):
        mine = [part.function for part in parts if part.index == i]
        assert [part.name for part in mine if part.name] == [call.function.name]
        assert "".join(part.arguments for part in mine) == call.function.arguments


def test_a_turn_with_calls_and_results(server: Running) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
    }
    turn = [*WHERE, {"role": "assistant", "content": None, "tool_calls": [call]}]

    def told(result: str) -> str:
        messages = [*turn, {"role": "tool", "tool_call_id": "c1", "content": result}]
        return text(chat(server, messages=messages, tools=[WEATHER], tool_choice="none"))

    assert told("rain, 7 degrees") != told("sun, 31 degrees")


def test_an_answer_follows_a_schema(server: Running) -> None:
    given: dict[str, Any] = {"model": server.model, "temperature": 0, "max_completion_tokens": 100}
    messages: list[Any] = [{"role": "user", "content": "Anna is 41."}]
    found = server.client().chat.completions.parse(messages=messages, response_format=Person, **given)
    assert isinstance(found.choices[0].message.parsed, Person)
    free = chat(server, messages=messages, response_format={"type": "json_object"}, max_completion_tokens=150)
    assert text(free).startswith("{")
    if free.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text(free)), dict)


def test_a_prediction_changes_no_text(server: Running) -> None:
    whole = text(chat(server))
    always: dict[str, Any] = {"speculative_config": {"adaptive": False}}
    found = chat(server, prediction={"type": "content", "content": whole}, extra_body=always)
    assert text(found) == whole
    assert found.usage is not None
    assert found.usage.completion_tokens_details is not None
    assert (found.usage.completion_tokens_details.accepted_prediction_tokens or 0) > 10
    wrong = chat(server, prediction={"type": "content", "content": "Not " + whole[::-1]})
    assert text(wrong) == whole


SPECULATIONS: list[dict[str, Any]] = [
    {"disabled": True},
    {"drafters": ["ngram"], "max_draft": 4},
    {"drafters": ["suffix"], "adaptive": False, "num_speculative_tokens": 16},
    {"draft_model": "ngram", "threshold": 0.5},
    {"tree_width": 2, "adaptive": False},
    {"num_speculative_tokens": 0},
]


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_speculation_changes_no_text(server: Running, temperature: float) -> None:
    sampled: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 24}
    said = {
        complete(server, **sampled, extra_body={"speculative_config": config}).choices[0].text
        for config in SPECULATIONS
    }
    assert said == {complete(server, **sampled).choices[0].text}


def test_completions(server: Running) -> None:
    found = complete(server)
    assert found.choices[0].text.startswith(" ready\nINFO")
    assert found.choices[0].finish_reason == "length"
    given: dict[str, Any] = {"model": server.model, "prompt": LOG, "temperature": 0, "max_tokens": 12}
    streamed = list(server.client().completions.create(**given, stream=True))
    assert "".join(c.choices[0].text for c in streamed) == found.choices[0].text
    assert streamed[-1].choices[0].finish_reason == "length"
    default = server.client().completions.create(model=server.model, prompt=LOG, temperature=0)
    assert default.usage is not None
    assert default.usage.completion_tokens == 16


def test_prompts_as_tokens_and_several_at_once(server: Running) -> None:
    tokens = server.app.engine.llm.tokenizer.encode(LOG)
    alone = complete(server)
    assert complete(server, tokens).choices[0].text == alone.choices[0].text
    other = "One two three four"
    second = complete(server, other)
    both = complete(server, [LOG, other], n=2)
    said = [alone.choices[0].text, second.choices[0].text]
    assert [c.text for c in both.choices] == [said[0], said[0], said[1], said[1]]
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    assert both.usage is not None
    assert alone.usage is not None
    assert second.usage is not None
    assert both.usage.prompt_tokens == alone.usage.prompt_tokens + second.usage.prompt_tokens
    as_tokens = complete(server, [tokens, server.app.engine.llm.tokenizer.encode(other)])
    assert [c.text for c in as_tokens.choices] == said


def test_logprobs_of_completions(server: Running) -> None:
    found = complete(server, logprobs=2).choices[0]
    assert found.logprobs is not None
    assert "".join(found.logprobs.tokens or ()) == found.text
    offsets = found.logprobs.text_offset or []
    starts = [
        found.text[start:].startswith(t)
        for start, t in zip(offsets, found.logprobs.tokens or (), strict=True)
    ]
    assert all(starts)
    assert all(len(top) == 2 for top in found.logprobs.top_logprobs or ())


def test_models(server: Running) -> None:
    assert [model.id for model in server.client().models.list()] == [server.model]
    assert server.client().models.retrieve(server.model).id == server.model


def test_developer_messages_are_system_messages(server: Running) -> None:
    def told(role: str) -> str:
        return text(chat(server, messages=[{"role": role, "content": "Answer in one word."}, *ASKED]))

    assert told("developer") == told("system") != text(chat(server))
