"""Agents of the openai-agents package, through both of OpenAI's interfaces, whole and streamed."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Literal

import agents
import pytest
from agents import Agent, ModelSettings, Runner, function_tool
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_responses import OpenAIResponsesModel
from openai.types.shared import Reasoning
from pydantic import BaseModel

from support.servers import Running

pytestmark = pytest.mark.slow  # to import, and to run

INTERFACES: dict[str, Callable[..., Any]] = {
    "chat": OpenAIChatCompletionsModel,
    "responses": OpenAIResponsesModel,
}
ASKED = "What is the weather in Oslo?"


class Verdict(BaseModel):
    city: Literal["Oslo", "Rome"]
    wet: bool


@pytest.fixture(autouse=True)
def untraced() -> Iterator[None]:
    agents.set_tracing_disabled(True)
    yield
    agents.set_tracing_disabled(False)


@pytest.fixture(params=["toy_server", pytest.param("server", marks=pytest.mark.model)])
def any_server(request: pytest.FixtureRequest) -> Running:
    found: Running = request.getfixturevalue(request.param)
    return found


class Weather:
    """A tool, and what it was called with."""

    def __init__(self) -> None:
        self.cities: list[str] = []

        @function_tool
        def get_weather(city: Literal["Oslo", "Rome"]) -> str:
            """The weather in a city."""
            self.cities.append(city)
            return f"Rain in {city}, 7 degrees."

        self.tool = get_weather


def settings(**more: Any) -> ModelSettings:
    given = {"temperature": 0.0, "max_tokens": 200, "include_usage": True, **more}
    return ModelSettings(**given)


def ending(server: Running) -> dict[str, Any]:
    """Makes the model end its texts after a few tokens: random weights would never end, small ones late."""
    ends = dict.fromkeys(map(str, server.app.engine.llm.tokenizer.eos_ids), 100)
    return {"extra_body": {"min_tokens": 6, "logit_bias": ends}}


def run(server: Running, interface: str, streamed: bool, given: Any, **of_agent: Any) -> Any:
    async def go() -> Any:
        client = server.async_client()
        async with client:
            model = INTERFACES[interface](model=server.model, openai_client=client)
            agent = Agent(name="agent", instructions="Answer briefly.", model=model, **of_agent)
            if not streamed:
                return await Runner.run(agent, given, max_turns=4)
            result = Runner.run_streamed(agent, given, max_turns=4)
            deltas = [
                event.data.delta
                async for event in result.stream_events()
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
            ]
            if not isinstance(result.final_output, BaseModel):
                assert "".join(deltas).endswith(result.final_output)
            return result

    return asyncio.run(go())


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("interface", INTERFACES)
def test_an_agent_calls_its_tool_and_answers(any_server: Running, interface: str, streamed: bool) -> None:
    weather = Weather()
    result = run(
        any_server,
        interface,
        streamed,
        ASKED,
        tools=[weather.tool],
        model_settings=settings(tool_choice="required", parallel_tool_calls=False, **ending(any_server)),
    )
    kinds = [item.type for item in result.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert len(weather.cities) == 1
    assert result.new_items[1].output == f"Rain in {weather.cities[0]}, 7 degrees."
    assert isinstance(result.final_output, str)
    usage = result.context_wrapper.usage
    assert usage.requests == 2
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 0


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("interface", INTERFACES)
def test_a_conversation_goes_on(any_server: Running, interface: str, streamed: bool) -> None:
    """With all that was said before, calls and results included, as the package writes it down."""
    weather = Weather()
    required = settings(tool_choice="required", parallel_tool_calls=False, **ending(any_server))
    first = run(any_server, interface, streamed, ASKED, tools=[weather.tool], model_settings=required)
    history = [*first.to_input_list(), {"role": "user", "content": "And tomorrow?"}]
    assert {item.get("type", "message") for item in history} == {
        "message",
        "function_call",
        "function_call_output",
    }
    second = run(any_server, interface, streamed, history, model_settings=settings(**ending(any_server)))
    assert isinstance(second.final_output, str)
    history = [*second.to_input_list(), {"role": "user", "content": "Why?"}]
    third = run(any_server, interface, not streamed, history, model_settings=settings(**ending(any_server)))
    assert isinstance(third.final_output, str)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("interface", INTERFACES)
def test_an_answer_has_the_type_that_an_agent_wants(
    any_server: Running, interface: str, streamed: bool
) -> None:
    result = run(any_server, interface, streamed, ASKED, output_type=Verdict, model_settings=settings())
    assert isinstance(result.final_output, Verdict)


@pytest.mark.parametrize("interface", INTERFACES)
def test_settings_for_other_models_are_no_hindrance(toy_server: Running, interface: str) -> None:
    chosen = settings(
        **ending(toy_server),
        reasoning=Reasoning(effort="low", summary="auto")
        if interface == "responses"
        else Reasoning(effort="low"),
        verbosity="low",
        store=True,
        metadata={"run": "1"},
        top_logprobs=2,
        truncation="auto",
        prompt_cache_retention="24h",
        response_include=["reasoning.encrypted_content"],
    )
    result = run(toy_server, interface, False, ASKED, model_settings=chosen)
    assert isinstance(result.final_output, str)


@pytest.mark.parametrize("interface", INTERFACES)
def test_one_agent_hands_over_to_another(toy_server: Running, interface: str) -> None:
    async def go() -> Any:
        async with toy_server.async_client() as client:
            model = INTERFACES[interface](model=toy_server.model, openai_client=client)
            expert = Agent(
                name="expert",
                instructions="Answer.",
                model=model,
                model_settings=settings(**ending(toy_server)),
            )
            first = Agent(
                name="desk",
                instructions="Hand over.",
                model=model,
                handoffs=[expert],
                model_settings=settings(tool_choice="required"),
            )
            return await Runner.run(first, ASKED, max_turns=3)

    result = asyncio.run(go())
    assert result.last_agent.name == "expert"
