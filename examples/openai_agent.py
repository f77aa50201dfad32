"""A planner, its tools, a verifier and an answer, with the `openai` package against a running server.

The plan and the verdict follow a JSON Schema, and every call is of a tool that the plan names: the model
decides what is in them, the server sees to it that they can be read. Nothing is scripted; a call that a tool
refuses is answered with an error, and a verdict of "not complete" leads to a second plan.

    paceline serve smollm2-135m
    pip install openai
    python examples/openai_agent.py [BASE_URL]
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletion

ORDERS = {
    "B-2047": {"item": "lantern", "quantity": 12, "status": "shipped"},
    "C-3311": {"item": "kettle", "quantity": 2, "status": "waiting for payment"},
}
PRICES = {"lantern": 32.25, "kettle": 21.9}


def find_order(order_id: str) -> dict[str, Any]:
    return {"order_id": order_id, **ORDERS[order_id]}


def get_price(item: str) -> dict[str, Any]:
    return {"item": item, "price": PRICES[item.removesuffix("s")]}


def total(quantity: int, price: float) -> dict[str, Any]:
    return {"total": quantity * price}


TOOLS: dict[str, Callable[..., dict[str, Any]]] = {
    "find_order": find_order,
    "get_price": get_price,
    "total": total,
}


def described(name: str, what: str, **types: str) -> dict[str, Any]:
    """A tool as OpenAI's API wants it."""
    properties = {argument: {"type": kind} for argument, kind in types.items()}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(types),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": what, "parameters": parameters}}


DESCRIBED: dict[str, Any] = {
    "find_order": described("find_order", "an order's item, quantity and status", order_id="string"),
    "get_price": described("get_price", "the price of one item", item="string"),
    "total": described("total", "quantity times price", quantity="integer", price="number"),
}


def schema(name: str, **properties: dict[str, Any]) -> Any:
    body = {"type": "object", "properties": properties, "required": list(properties)}
    form = {"name": name, "strict": True, "schema": {**body, "additionalProperties": False}}
    return {"type": "json_schema", "json_schema": form}


# Steps in words: small models plan better in them. The last one needs no tool, it is for the answer.
STEPS = {"find order": "find_order", "get price": "get_price", "compute total": "total"}
REPORT = "report status"
PLAN = schema(
    "plan",
    goal={"type": "string", "maxLength": 60},
    steps={"type": "array", "items": {"enum": [*STEPS, REPORT]}, "minItems": 1, "maxItems": 4},
)
VERDICT = schema("verdict", result={"type": "string", "maxLength": 60}, complete={"type": "boolean"})

# Worked examples: a model of 135M parameters needs to see the form.
PLANNER = """Which tools answer the question, in order?
find_order: an order's item, quantity and status
get_price: the price of one item
total: quantity times price"""
PLANNED = [
    ("Where is order A-1001?", "status of order A-1001", ["find order", REPORT]),
    ("What does order A-1001 cost?", "cost of order A-1001", list(STEPS)),
    ("Where is order A-1002?", "status of order A-1002", ["find order", REPORT]),
    ("What does order A-1002 cost?", "cost of order A-1002", list(STEPS)),
]
WORKER = "You look after a small shop. Answer with one tool call."
FOUND = {"order_id": "A-1001", "item": "teapot", "quantity": 3, "status": "lost"}
WORKED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("find_order", {"order_id": "A-1001"}, FOUND),
    ("get_price", {"item": "teapot"}, {"item": "teapot", "price": 18.5}),
    ("total", {"quantity": 3, "price": 18.5}, {"total": 55.5}),
]
VERIFIER = "Does the result answer the question?"
WAITING = {"order_id": "A-1005", "item": "cup", "quantity": 1, "status": "waiting for a driver"}
VERIFIED: list[tuple[str, dict[str, Any], str, bool]] = [
    ("Where is order A-1003?", {"error": "find_order: 'A-1003'"}, "error", False),
    ("What does order A-1001 cost?", {"total": 55.5}, "55.5", True),
    ("What does order A-1004 cost?", {"error": "get_price: 'A-1004'"}, "error", False),
    ("Where is order A-1001?", FOUND, "lost", True),
    ("What does order A-1002 cost?", {"total": 7.2}, "7.2", True),
    ("Where is order A-1005?", WAITING, "waiting for a driver", True),
]
ANSWERER = "Answer the question in one sentence, from the result."
ANSWERED: list[tuple[str, dict[str, Any], str]] = [
    ("What does order A-1001 cost?", {"total": 55.5}, "Order A-1001 costs 55.5."),
    ("Where is order A-1001?", FOUND, "Order A-1001 is lost."),
    ("What does order A-1003 cost?", {"total": 10.0}, "Order A-1003 costs 10.0."),
]

QUESTIONS = ["What does order B-2047 cost?", "Where is order C-3311?"]
MOST_PLANS = 2

Message = dict[str, Any]


def said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def called(call_id: str, name: str, arguments: str, result: dict[str, Any]) -> list[Message]:
    """A call and its result, as the next turn sends them."""
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": json.dumps(result)},
    ]


def shown(system: str, examples: list[tuple[str, str]], question: str) -> list[Message]:
    """A question after worked examples."""
    messages = [said("system", system)]
    for asked, answer in examples:
        messages += [said("user", asked), said("assistant", answer)]
    return [*messages, said("user", question)]


def with_result(question: str, result: dict[str, Any]) -> str:
    return f"{question}\n{json.dumps(result)}"


def planning(question: str) -> list[Message]:
    examples = [(asked, json.dumps({"goal": goal, "steps": steps})) for asked, goal, steps in PLANNED]
    return shown(PLANNER, examples, question)


def working(question: str) -> list[Message]:
    messages = [said("system", WORKER), said("user", "What does order A-1001 cost?")]
    for i, (name, arguments, result) in enumerate(WORKED):
        messages += called(f"call_{i}", name, json.dumps(arguments), result)
    return [*messages, said("assistant", "Order A-1001 costs 55.5."), said("user", question)]


def verifying(question: str, found: dict[str, Any]) -> list[Message]:
    examples = [
        (with_result(asked, gave), json.dumps({"result": result, "complete": complete}))
        for asked, gave, result, complete in VERIFIED
    ]
    return shown(VERIFIER, examples, with_result(question, found))


def answering(question: str, result: dict[str, Any]) -> list[Message]:
    examples = [(with_result(asked, found), answer) for asked, found, answer in ANSWERED]
    return shown(ANSWERER, examples, with_result(question, result))


def use_tool(name: str, arguments: str) -> dict[str, Any]:
    try:
        return TOOLS[name](**json.loads(arguments))
    except (KeyError, TypeError, AttributeError) as problem:
        return {"error": f"{name}: {problem}"}


@dataclass
class Agent:
    client: OpenAI
    model: str
    calls: int = 0
    failed: int = 0
    tokens: int = 0
    passes: int = 0

    def ask(self, step: str, messages: list[Message], **options: Any) -> ChatCompletion:
        answer: ChatCompletion = self.client.chat.completions.create(
            model=self.model,
            messages=messages,  # type: ignore[arg-type]
            temperature=0,
            max_completion_tokens=96,
            extra_body={"metrics": True},
            **options,
        )
        self._note(step, answer)
        return answer

    def _note(self, step: str, answer: ChatCompletion) -> None:
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        metrics: dict[str, Any] = (answer.model_extra or {})["metrics"]
        tokens, passes = answer.usage.completion_tokens, metrics["passes"]
        self.tokens, self.passes = self.tokens + tokens, self.passes + passes
        message = answer.choices[0].message
        for call in message.tool_calls or []:
            assert call.type == "function"
            print(f"  {step:8} {call.function.name}({call.function.arguments})")
        if message.content:
            print(f"  {step:8} {message.content.strip()}")
        cached = answer.usage.prompt_tokens_details.cached_tokens
        print(
            f"           {answer.usage.prompt_tokens} prompt tokens, {cached} of them cached; "
            f"{tokens} tokens in {passes} passes, {tokens / passes:.2f} a pass"
        )

    def plan(self, question: str) -> list[str]:
        """The tools to call, in order."""
        answer = self.ask("planner", planning(question), response_format=PLAN)
        steps: list[str] = json.loads(answer.choices[0].message.content or "")["steps"]
        return [STEPS[step] for step in steps if step in STEPS]

    def call(self, messages: list[Message], name: str) -> dict[str, Any]:
        """One step of the plan. Adds the call and its result to the conversation."""
        choice = {"type": "function", "function": {"name": name}}
        offered = {"tools": list(DESCRIBED.values()), "parallel_tool_calls": False}
        answer = self.ask("tool", messages, tool_choice=choice, **offered)
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        result = use_tool(call.function.name, call.function.arguments)
        self.calls += 1
        self.failed += "error" in result
        messages += called(call.id, call.function.name, call.function.arguments, result)
        print(f"  {'result':8} {json.dumps(result)}")
        return result

    def verify(self, question: str, result: dict[str, Any]) -> bool:
        answer = self.ask("verifier", verifying(question, result), response_format=VERDICT)
        return bool(json.loads(answer.choices[0].message.content or "")["complete"])

    def answer(self, question: str) -> str:
        print(question)
        messages = working(question)
        result: dict[str, Any] = {}
        for _ in range(MOST_PLANS):
            for tool in self.plan(question):
                result = self.call(messages, tool)
            if self.verify(question, result):
                break
        last = self.ask("answer", answering(question, result))
        return (last.choices[0].message.content or "").strip()


def main(base_url: str) -> int:
    client = OpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    agent = Agent(client, client.models.list().data[0].id)
    for question in QUESTIONS:
        agent.answer(question)
    print(
        f"{agent.calls} tool calls, {agent.failed} of them answered with an error; {agent.tokens} tokens "
        f"in {agent.passes} passes: {agent.tokens / agent.passes:.2f} tokens per pass; {agent.model}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1"))
