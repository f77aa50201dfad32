"""/v1/responses, with the real `openai` client against the real server."""

import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall
from pydantic import BaseModel

from support import clients
from support.clients import CITY
from support.servers import Running

pytestmark = pytest.mark.model

ASKED = "Name three colours of the rainbow."
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": CITY,
    "strict": True,
}
TIME: Any = {**WEATHER, "name": "get_time", "description": "The time in a city."}
ANSWERED: list[Any] = [
    {"role": "user", "content": "What is the weather in Oslo?"},
    {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Oslo"}'},
    {"type": "function_call_output", "call_id": "c1", "output": '{"weather": "rain", "degrees": 7}'},
]


class Person(BaseModel):
    name: str
    age: int


def answer(server: Running, **asked: Any) -> Response:
    given = {"model": server.model, "input": ASKED, "temperature": 0, "max_output_tokens": 24, **asked}
    found: Response = server.client().responses.create(**given)
    Response.model_validate(found.to_dict())
    return found


def events(server: Running, **asked: Any) -> list[Any]:
    given = {"model": server.model, "input": ASKED, "temperature": 0, "max_output_tokens": 24, **asked}
    found = list(server.client().responses.create(**given, stream=True))
    for event in found:
        type(event).model_validate(event.to_dict())
    assert [event.sequence_number for event in found] == list(range(len(found)))
    return found


def kinds(found: Sequence[Any]) -> list[str]:
    """Without repeats."""
    names = [event.type.removeprefix("response.") for event in found]
    return [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]


def essence(response: Response) -> list[dict[str, Any]]:
    """The output without its ids, which differ from answer to answer."""
    return [item.to_dict() | {"id": "", "call_id": ""} for item in response.output]


def through_chat(server: Running, messages: list[Any], **asked: Any) -> Any:
    return server.client().chat.completions.create(
        model=server.model, messages=messages, temperature=0, max_completion_tokens=24, **asked
    )


def test_text(server: Running) -> None:
    found = answer(server, metadata={"run": "7"}, user="anna", store=False)
    assert found.id.startswith("resp_")
    assert found.object == "response"
    assert found.output[0].id is not None
    assert found.output[0].id.startswith("msg_")
    assert found.metadata == {"run": "7"}
    assert found.to_dict()["store"] is False
    assert found.temperature == 0
    assert found.usage is not None
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    assert found.usage.output_tokens_details.reasoning_tokens == 0


def test_streamed_whole_and_chat_say_the_same(server: Running) -> None:
    whole = answer(server)
    streamed = events(server)
    chat = through_chat(server, [{"role": "user", "content": ASKED}])
    deltas = "".join(e.delta for e in streamed if e.type == "response.output_text.delta")
    last = streamed[-1].response
    assert whole.output_text
    assert whole.output_text == deltas == last.output_text == chat.choices[0].message.content
    assert essence(whole) == essence(last)
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    assert last.usage.output_tokens == whole.usage.output_tokens


def test_the_same_sampled_with_a_seed(server: Running) -> None:
    seeded = {"temperature": 0.8, "top_p": 0.9, "extra_body": {"seed": 11}}
    whole = answer(server, **seeded).output_text
    assert whole == events(server, **seeded)[-1].response.output_text
    plain = {"seed": 11, "speculative_config": {"disabled": True}}
    assert whole == answer(server, **{**seeded, "extra_body": plain}).output_text
    assert whole != answer(server, **{**seeded, "extra_body": {"seed": 12}}).output_text


def test_the_events_of_a_text_come_in_order(server: Running) -> None:
    found = events(server, input="Say: hi", max_output_tokens=200)
    assert kinds(found) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert len({e.item_id for e in found if hasattr(e, "item_id")}) == 1
    assert len({e.response.id for e in found if hasattr(e, "response")}) == 1
    assert found[0].response.status == found[1].response.status == "in_progress"
    assert found[0].response.output == []
    assert found[2].item.content == []
    assert found[-2].item == found[-1].response.output[0]
    assert found[-1].response.status == found[-2].item.status == "completed"


def test_the_clients_own_stream_follows(server: Running) -> None:
    given: dict[str, Any] = {"model": server.model, "temperature": 0, "max_output_tokens": 200}
    with server.client().responses.stream(input="Say: hi", **given) as stream:
        said = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        assert said[-1] == stream.get_final_response().output_text


def test_an_event_stream_names_its_events(server: Running) -> None:
    given: dict[str, Any] = {"model": server.model, "input": "hi", "max_output_tokens": 2}
    raw = server.client().responses.with_raw_response.create(**given, stream=True)
    blocks = raw.http_response.read().decode().strip().split("\n\n")
    for block in blocks:
        name, data = block.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert blocks[-1].startswith("event: response.incomplete")


def test_instructions_are_the_system_message(server: Running) -> None:
    rule, asked = "Answer in one word.", "What colour is snow?"
    found = answer(server, input=asked, instructions=rule)
    chat = through_chat(server, [{"role": "system", "content": rule}, {"role": "user", "content": asked}])
    assert found.output_text == chat.choices[0].message.content
    assert found.instructions == rule
    assert found.output_text != answer(server, input=asked).output_text
    for role in ("system", "developer"):
        items = [{"role": role, "content": rule}, {"role": "user", "content": asked}]
        assert answer(server, input=items).output_text == found.output_text


def test_content_in_parts_and_earlier_answers(server: Running) -> None:
    first = answer(server)
    parts: list[Any] = [{"type": "input_text", "text": ASKED[:9]}, {"type": "input_text", "text": ASKED[9:]}]
    asked: list[Any] = [{"role": "user", "content": parts}]
    assert answer(server, input=asked).output_text == first.output_text
    again = [*asked, *first.output, {"type": "message", "role": "user", "content": "And three more?"}]
    second = answer(server, input=again)
    chat = through_chat(
        server,
        [
            {"role": "user", "content": ASKED},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "And three more?"},
        ],
    )
    assert second.output_text == chat.choices[0].message.content
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_calls_and_their_results_are_read(server: Running) -> None:
    found = answer(server, input=ANSWERED, tools=[WEATHER], tool_choice="none")
    function = {k: WEATHER[k] for k in ("name", "description", "parameters")}
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    ]
    chat = through_chat(
        server,
        [
            ANSWERED[0],
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": ANSWERED[2]["output"]},
        ],
        tools=[{"type": "function", "function": function}],
        tool_choice="none",
    )
    assert found.output_text == chat.choices[0].message.content
    assert found.output_text
    drier = [*ANSWERED[:2], {**ANSWERED[2], "output": '{"weather": "sun", "degrees": 31}'}]
    assert answer(server, input=drier, tools=[WEATHER], tool_choice="none").output_text != found.output_text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_tools_are_called(server: Running, choice: Any) -> None:
    asked: dict[str, Any] = {
        "input": "What is the weather in Oslo?",
        "tools": [TIME, WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_output_tokens": 80,
    }
    found = answer(server, **asked)
    (call,) = found.output
    assert found.status == "completed"
    assert isinstance(call, ResponseFunctionToolCall)
    assert call.call_id.startswith("call_")
    assert (call.id or "").startswith("fc_")
    assert call.name in ("get_time", "get_weather")
    if choice != "required":
        assert call.name == "get_weather"
    jsonschema.validate(json.loads(call.arguments), CITY)

    streamed = events(server, **asked)
    assert kinds(streamed) == [
        "created",
        "in_progress",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    said = "".join(e.delta for e in streamed if e.type == "response.function_call_arguments.delta")
    done = next(e for e in streamed if e.type == "response.function_call_arguments.done")
    added = next(e for e in streamed if e.type == "response.output_item.added")
    assert said == done.arguments == call.arguments
    assert (added.item.name, added.item.arguments) == (call.name, "")
    assert added.item.call_id == streamed[-1].response.output[0].call_id
    assert essence(streamed[-1].response) == essence(found)


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("parallel", [True, False])
def test_several_calls_are_several_items(server: Running, choice: str, parallel: bool) -> None:
    asked: dict[str, Any] = {"tool_choice": choice, "parallel_tool_calls": parallel}
    given = {**asked, "input": clients.as_items(), "tools": clients.ITEM_TOOLS, "max_output_tokens": 120}
    found = answer(server, **given)
    calls = [item for item in found.output if isinstance(item, ResponseFunctionToolCall)]
    assert len(calls) == len(found.output) == (2 if parallel else 1)
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), CITY)

    streamed = events(server, **given)
    assert essence(streamed[-1].response) == essence(found)
    added = [e for e in streamed if e.type == "response.output_item.added"]
    assert [e.output_index for e in added] == list(range(len(calls)))
    assert len({e.item.call_id for e in added}) == len({e.item.id for e in added}) == len(calls)

    chat = server.client().chat.completions.create(
        model=server.model, messages=clients.as_messages(), temperature=0, tools=clients.CHAT_TOOLS, **asked
    )
    through_chat: list[Any] = list(chat.choices[0].message.tool_calls or ())
    assert [(c.function.name, c.function.arguments) for c in through_chat] == [
        (call.name, call.arguments) for call in calls
    ]


def test_an_answer_follows_a_schema(server: Running) -> None:
    given: dict[str, Any] = {"model": server.model, "temperature": 0, "max_output_tokens": 100}
    found = server.client().responses.parse(input="Anna is 41.", text_format=Person, **given)
    assert isinstance(found.output_parsed, Person)
    schema = {"type": "json_schema", "name": "p", "schema": Person.model_json_schema()}
    again = answer(server, input="Anna is 41.", max_output_tokens=100, text={"format": schema})
    assert json.loads(again.output_text) == found.output_parsed.model_dump()
    with server.client().responses.stream(input="Anna is 41.", text_format=Person, **given) as stream:
        assert stream.get_final_response().output_parsed == found.output_parsed


def test_an_answer_is_a_json_object(server: Running) -> None:
    form = {"format": {"type": "json_object"}}
    found = answer(server, input="A cat as JSON", text=form, max_output_tokens=150)
    if found.status == "completed":
        assert isinstance(json.loads(found.output_text), dict)
    assert found.output_text.startswith("{")
    plain = answer(server, text={"format": {"type": "text"}})
    assert plain.output_text == answer(server).output_text


def test_an_answer_that_ends_early_is_incomplete(server: Running) -> None:
    found = answer(server, max_output_tokens=3)
    assert found.status == "incomplete"
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.output[0].to_dict()["status"] == "incomplete"
    assert found.usage is not None
    assert found.usage.output_tokens == 3
    streamed = events(server, max_output_tokens=3)
    assert streamed[-1].type == "response.incomplete"
    assert essence(streamed[-1].response) == essence(found)


def test_harmless_defaults_are_accepted(server: Running) -> None:
    harmless: dict[str, Any] = {
        "truncation": "disabled",
        "background": False,
        "include": ["reasoning.encrypted_content"],
        "service_tier": "auto",
        "reasoning": {"effort": None},
        "store": False,
        "previous_response_id": None,
        "extra_body": {"remember": False, "priority": 1},
    }
    assert answer(server, **harmless).output_text == answer(server).output_text
