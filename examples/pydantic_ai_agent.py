"""An agent of pydantic-ai with two tools and a typed answer, against a running server.

The framework knows nothing of paceline but its address. Whatever the model calls is one of the tools, with
arguments that fit, and what it answers is an `Answer`.

    paceline serve smollm2-135m
    pip install '.[examples]'
    python examples/pydantic_ai_agent.py [BASE_URL]
"""

import os
import sys
from typing import Any

from openai import OpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, UsageLimits
from pydantic_ai.messages import (
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

PRICES = {"lantern": 32.25, "kettle": 21.9}
STOCK = {"lantern": 40, "kettle": 0}
QUESTIONS = ["What does a lantern cost?", "How many kettles are in stock?"]
INSTRUCTIONS = "You look after a small shop. Look everything up with a tool first."
LIMITS = UsageLimits(request_limit=6)  # for each question


class Answer(BaseModel):
    item: str
    value: float


def get_price(item: str) -> float | str:
    """The price of an item."""
    return PRICES.get(item.lower().removesuffix("s"), f"there is no {item}")


def check_stock(item: str) -> int | str:
    """How many of an item are in stock."""
    return STOCK.get(item.lower().removesuffix("s"), f"there is no {item}")


def worked(question: str, tool: str, item: str, result: float) -> list[Any]:
    """A turn that went before: a model of 135M parameters needs to see the form."""
    call = ToolCallPart(tool, {"item": item}, tool_call_id=f"call_{tool}_{item}")
    answer = Answer(item=item, value=result).model_dump_json()
    return [
        ModelRequest([UserPromptPart(question)]),
        ModelResponse([call]),
        ModelRequest([ToolReturnPart(tool, result, tool_call_id=call.tool_call_id)]),
        ModelResponse([TextPart(answer)]),
    ]


HISTORY = [
    *worked("What does a spoon cost?", "get_price", "spoon", 1.2),
    *worked("How many teapots are in stock?", "check_stock", "teapot", 7),
    *worked("What does a teapot cost?", "get_price", "teapot", 18.5),
    *worked("How many spoons are in stock?", "check_stock", "spoon", 150),
]


def served(base_url: str) -> Any:
    """The model that this server serves."""
    key = os.environ.get("OPENAI_API_KEY", "none")
    name = OpenAI(base_url=base_url, api_key=key).models.list().data[0].id
    return OpenAIChatModel(name, provider=OpenAIProvider(base_url=base_url, api_key=key))


def look_up_first(run: Any) -> Any:
    """A question is answered with a call; what comes after its result is up to the model."""
    return {"temperature": 0.0, "max_tokens": 96, "tool_choice": "required" if run.run_step <= 1 else "auto"}


def show(messages: list[Any]) -> int:
    """Prints calls and results; how many calls there were."""
    parts = [part for message in messages for part in message.parts]
    for part in parts:
        if isinstance(part, ToolCallPart):
            print(f"  call    {part.tool_name}({part.args})")
        elif isinstance(part, ToolReturnPart):
            print(f"  result  {part.content}")
    return sum(isinstance(part, ToolCallPart) for part in parts)


def main(base_url: str) -> int:
    agent = Agent(
        served(base_url),
        output_type=NativeOutput(Answer),
        tools=[get_price, check_stock],
        instructions=INSTRUCTIONS,
        model_settings=look_up_first,
    )
    history, calls = HISTORY, 0
    for question in QUESTIONS:
        print(question)
        done = agent.run_sync(question, message_history=history, usage_limits=LIMITS)
        calls += show(done.new_messages())
        print(f"  answer  {done.output!r}")
        print(f"          {done.usage.input_tokens} prompt tokens, {done.usage.cache_read_tokens} cached")
        history = done.all_messages()
    print(f"{calls} tool calls")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1"))
