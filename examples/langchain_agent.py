"""An agent of LangChain with two tools, against a running server.

The framework knows nothing of paceline but its address. Whatever the model calls is one of the tools, with
arguments that fit.

    paceline serve smollm2-135m
    pip install '.[examples]'
    python examples/langchain_agent.py [BASE_URL]
"""

import json
import os
import sys
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import OpenAI

PRICES = {"lantern": 32.25, "kettle": 21.9}
STOCK = {"lantern": 40, "kettle": 0}
QUESTIONS = ["What does a lantern cost?", "How many kettles are in stock?"]
INSTRUCTIONS = "You look after a small shop. Look everything up with a tool first."
MOST_STEPS = 12  # of the model and of tools, for each question


def get_price(item: str) -> str:
    """The price of an item."""
    return str(PRICES.get(item.lower().removesuffix("s"), f"there is no {item}"))


def check_stock(item: str) -> str:
    """How many of an item are in stock."""
    return str(STOCK.get(item.lower().removesuffix("s"), f"there is no {item}"))


def worked(question: str, tool: str, item: str, result: str, answer: str) -> list[Any]:
    """A turn that went before: a model of 135M parameters needs to see the form."""
    call = {"name": tool, "args": {"item": item}, "id": f"call_{tool}_{item}"}
    return [
        HumanMessage(question),
        AIMessage("", tool_calls=[call]),
        ToolMessage(result, tool_call_id=call["id"]),
        AIMessage(answer),
    ]


HISTORY = [
    *worked("What does a spoon cost?", "get_price", "spoon", "1.2", "It costs 1.2."),
    *worked("How many teapots are in stock?", "check_stock", "teapot", "7", "There are 7."),
    *worked("What does a teapot cost?", "get_price", "teapot", "18.5", "It costs 18.5."),
    *worked("How many spoons are in stock?", "check_stock", "spoon", "150", "There are 150."),
]


def served(base_url: str) -> Any:
    """The model that this server serves."""
    key = os.environ.get("OPENAI_API_KEY", "none")
    name = OpenAI(base_url=base_url, api_key=key).models.list().data[0].id
    return ChatOpenAI(model=name, base_url=base_url, api_key=key, temperature=0, max_tokens=96)


def look_up_first(request: Any, handler: Any) -> Any:
    """A question is answered with a call; what comes after its result is up to the model."""
    asked = isinstance(request.messages[-1], HumanMessage)
    return handler(request.override(tool_choice="required" if asked else "auto"))


def show(messages: list[Any]) -> int:
    """Prints calls, results and answers; how many calls there were."""
    calls = 0
    for message in messages:
        for call in getattr(message, "tool_calls", []):
            print(f"  call    {call['name']}({json.dumps(call['args'])})")
            calls += 1
        if isinstance(message, ToolMessage):
            print(f"  result  {message.content}")
        elif message.content and isinstance(message, AIMessage):
            print(f"  answer  {message.content}")
    return calls


def main(base_url: str) -> int:
    agent = create_agent(
        served(base_url),
        [get_price, check_stock],
        system_prompt=INSTRUCTIONS,
        middleware=[wrap_model_call(look_up_first)],
    )
    history, calls = HISTORY, 0
    for question in QUESTIONS:
        print(question)
        asked = [*history, HumanMessage(question)]
        said = agent.invoke({"messages": asked}, {"recursion_limit": MOST_STEPS})["messages"]
        calls += show(said[len(asked) :])
        used = said[-1].usage_metadata
        cached = used["input_token_details"]["cache_read"]
        print(f"          {used['input_tokens']} prompt tokens, {cached} cached")
        history = said
    print(f"{calls} tool calls")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1"))
