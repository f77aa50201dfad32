"""An agent with three tools, run once plain and once with speculative decoding: same words, fewer passes.

Calls are parsed from what the model writes; nothing is scripted. A call that does not parse, or that a tool
rejects, goes back to the model as an error, and it may try again. Every turn sends the whole history again.

    python examples/agent.py [MODEL]
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline import LLM, Result, SpecConfig
from paceline.text import parse_tool_calls

ORDERS = {
    "B-2047": {"status": "shipped", "item": "lantern", "quantity": 12},
    "C-3311": {"status": "waiting for payment", "item": "kettle", "quantity": 2},
}
STOCK = {"lantern": (40, 32.25), "kettle": (0, 21.9), "teapot": (7, 18.5)}


def find_order(order_id: str) -> dict[str, Any]:
    return {"order_id": order_id, **ORDERS[order_id]}


def check_stock(item: str) -> dict[str, Any]:
    in_stock, price = STOCK[item.removesuffix("s")]
    return {"item": item, "in_stock": in_stock, "price": price}


def multiply(a: float, b: float) -> dict[str, Any]:
    return {"product": a * b}


TOOLS: dict[str, Callable[..., dict[str, Any]]] = {
    "find_order": find_order,
    "check_stock": check_stock,
    "multiply": multiply,
}

SYSTEM = """You look after a small shop. Answer with one tool call, or with a sentence once you have a result.
Tools:
find_order(order_id: string): an order's status, item and quantity
check_stock(item: string): how many of an item are in stock, and its price
multiply(a: number, b: number): a times b"""

# Worked examples: a model of 135M parameters needs to see the form. Answers repeat words of the question.
EXAMPLES: list[tuple[str, str, dict[str, Any], dict[str, Any], str]] = [
    (
        "What do 3 at 18.5 cost?",
        "multiply",
        {"a": 3, "b": 18.5},
        {"product": 55.5},
        "3 at 18.5 cost 55.5.",
    ),
    (
        "What do 4 at 2.5 cost?",
        "multiply",
        {"a": 4, "b": 2.5},
        {"product": 10.0},
        "4 at 2.5 cost 10.0.",
    ),
    (
        "Where is order A-1001?",
        "find_order",
        {"order_id": "A-1001"},
        {"order_id": "A-1001", "status": "delivered", "item": "teapot", "quantity": 1},
        "Order A-1001 is delivered.",
    ),
    (
        "How many teapots are in stock?",
        "check_stock",
        {"item": "teapot"},
        {"item": "teapot", "in_stock": 7, "price": 18.5},
        "There are 7 teapots in stock.",
    ),
    (
        "Where is order A-1002?",
        "find_order",
        {"order_id": "A-1002"},
        {"order_id": "A-1002", "status": "lost", "item": "spoon", "quantity": 6},
        "Order A-1002 is lost.",
    ),
    (
        "How many spoons are in stock?",
        "check_stock",
        {"item": "spoon"},
        {"item": "spoon", "in_stock": 150, "price": 1.2},
        "There are 150 spoons in stock.",
    ),
]

QUESTIONS = [
    "Where is order B-2047?",
    "How many lanterns are in stock?",
    "What do 12 at 32.25 cost?",
    "Where is order C-3311?",
]

Message = dict[str, str]


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def call_text(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def result_text(result: dict[str, Any]) -> str:
    return f"Result: {json.dumps(result)}"


def opening() -> list[Message]:
    messages = [message("system", SYSTEM)]
    for question, tool, arguments, result, answer in EXAMPLES:
        messages += [message("user", question), message("assistant", call_text(tool, arguments))]
        messages += [message("user", result_text(result)), message("assistant", answer)]
    return messages


def use_tool(text: str) -> dict[str, Any] | None:
    """The result of the call in this text; None if there is no call."""
    _, calls, errors = parse_tool_calls(text)
    if errors:
        return {"error": errors[0]}
    if not calls:
        return None
    call = calls[0]
    if call.name not in TOOLS:
        return {"error": f"no tool {call.name}; there are {', '.join(TOOLS)}"}
    try:
        return TOOLS[call.name](**call.arguments)
    except (KeyError, TypeError, AttributeError) as problem:
        return {"error": f"{call.name}: {problem}"}


@dataclass
class Workflow:
    """One run through all questions."""

    results: list[Result] = field(default_factory=list)
    calls: int = 0
    failed: int = 0

    def ask(self, llm: LLM, spec: SpecConfig, tenant: str, messages: list[Message], log: Console) -> None:
        for _ in range(4):
            result = llm.generate(messages, spec=spec, tenant=tenant, max_tokens=96, temperature=0.0, seed=7)
            self.results.append(result)
            messages.append(message("assistant", result.text))
            log.print(f"  model  {result.text}", markup=False)
            answer = use_tool(result.text)
            if answer is None:
                return
            self.calls += 1
            self.failed += "error" in answer
            messages.append(message("user", result_text(answer)))
            log.print(f"  tool   {json.dumps(answer)}", markup=False)

    def sums(self) -> tuple[int, int, float]:
        tokens = sum(len(r.token_ids) for r in self.results)
        return tokens, sum(r.passes for r in self.results), sum(r.seconds for r in self.results)


def run(llm: LLM, spec: SpecConfig, tenant: str, log: Console) -> Workflow:
    """A tenant of its own keeps the caches and indexes of the runs apart."""
    workflow, messages = Workflow(), opening()
    for question in QUESTIONS:
        log.print(f"[bold]{question}[/bold]")
        messages.append(message("user", question))
        workflow.ask(llm, spec, tenant, messages, log)
    return workflow


def main(model: str) -> int:
    out, quiet = Console(highlight=False), Console(quiet=True)
    llm = LLM(model)
    llm.generate("warm up", max_tokens=4, tenant="warm-up", seed=0)
    plain = run(llm, SpecConfig(("none",), max_draft=0), "plain", out)
    fast = run(llm, SpecConfig(("suffix", "ngram")), "speculative", quiet)
    same = [r.token_ids for r in plain.results] == [r.token_ids for r in fast.results]

    out.print(
        f"\n{plain.calls} tool calls, {plain.failed} of them answered with an error; {model}, temperature 0"
    )
    table = Table("", "tokens", "target passes", "tokens per pass", "seconds")
    for name, workflow in (("plain", plain), ("speculative", fast)):
        tokens, passes, seconds = workflow.sums()
        table.add_row(name, str(tokens), str(passes), f"{tokens / passes:.2f}", f"{seconds:.2f}")
    out.print(table)
    out.print(f"ratio: {plain.sums()[2] / fast.sums()[2]:.2f} x    identical text: {'yes' if same else 'NO'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"))
