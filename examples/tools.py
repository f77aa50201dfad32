"""Functions as tools: a small shop's assistant, run once plain and once with speculative decoding.

The schemas come from the signatures and docstrings below. `LLM.run` runs the calls that the model writes and
sends the results back until it answers. `AsyncLLM.run` does the same for all questions at once.

    python examples/tools.py [MODEL]
"""

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from paceline import LLM, AsyncLLM, Run, SpecConfig


@dataclass
class Order:
    order_id: str
    status: str
    item: str


ORDERS = [Order("B-2047", "shipped", "lantern"), Order("C-3311", "waiting for payment", "kettle")]
STOCK = {"lantern": 40, "kettle": 0, "teapot": 7}


def find_order(order_id: Annotated[str, "such as A-1001"]) -> Order:
    """Finds an order by its number."""
    for order in ORDERS:
        if order.order_id == order_id:
            return order
    raise LookupError(f"no order {order_id}")


async def check_stock(item: str) -> dict[str, Any]:
    """How many of an item are in stock.

    Args:
        item: its name
    """
    return {"item": item, "in_stock": STOCK[item.removesuffix("s")]}


TOOLS: list[Callable[..., Any]] = [find_order, check_stock]


# Worked examples: a model of 135M parameters needs to see the form. Answers repeat words of the question.
WORKED: list[tuple[str, str, dict[str, Any], str, str]] = [
    (
        "Where is order A-1001?",
        "find_order",
        {"order_id": "A-1001"},
        '{"order_id": "A-1001", "status": "delivered", "item": "teapot"}',
        "Order A-1001 is delivered.",
    ),
    (
        "How many teapots are in stock?",
        "check_stock",
        {"item": "teapot"},
        '{"item": "teapot", "in_stock": 7}',
        "There are 7 teapots in stock.",
    ),
    (
        "Where is order A-1002?",
        "find_order",
        {"order_id": "A-1002"},
        '{"order_id": "A-1002", "status": "lost", "item": "spoon"}',
        "Order A-1002 is lost.",
    ),
    (
        "How many spoons are in stock?",
        "check_stock",
        {"item": "spoon"},
        '{"item": "spoon", "in_stock": 150}',
        "There are 150 spoons in stock.",
    ),
    (
        "Where is order A-1003?",
        "find_order",
        {"order_id": "A-1003"},
        "Error: LookupError: no order A-1003",
        "There is no order A-1003.",
    ),
]
QUESTIONS = [
    "Where is order B-2047?",
    "How many lanterns are in stock?",
    "Where is order C-3311?",
    "Where is order D-0001?",
]
SETTINGS: dict[str, Any] = {
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 64,
    "seed": 7,
}


def conversation(question: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You look after a small shop."}]
    for number, (asked, tool, arguments, result, answer) in enumerate(WORKED):
        id, function = f"call{number:05}", {"name": tool, "arguments": json.dumps(arguments)}
        messages += [
            {"role": "user", "content": asked},
            {"role": "assistant", "tool_calls": [{"id": id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": id, "name": tool, "content": result},
            {"role": "assistant", "content": answer},
        ]
    return [*messages, {"role": "user", "content": question}]


def runs(llm: LLM, spec: SpecConfig, tenant: str) -> list[Run]:
    """The tenant keeps caches and indexes of the runs apart, so that neither has seen the other's text."""
    return [
        llm.run(conversation(question), tools=TOOLS, spec=spec, tenant=tenant, **SETTINGS)
        for question in QUESTIONS
    ]


async def at_once(llm: LLM) -> list[Run]:
    async with AsyncLLM(llm) as model:
        return await asyncio.gather(
            *(model.run(conversation(question), tools=TOOLS, **SETTINGS) for question in QUESTIONS)
        )


def main(model: str) -> int:
    out = Console(highlight=False, soft_wrap=True)
    llm = LLM(model)
    plain = runs(llm, SpecConfig(("none",), max_draft=0), "plain")
    fast = runs(llm, SpecConfig(("grammar", "suffix", "ngram")), "speculative")
    together = asyncio.run(at_once(llm))
    same = (
        [run.messages for run in plain]
        == [run.messages for run in fast]
        == [run.messages for run in together]
    )

    for question, run in zip(QUESTIONS, fast, strict=True):
        out.print(f"[bold]{question}[/bold]")
        for done in run.calls:
            out.print(f"  {done.call.name}({done.call.text}): {done.content}", markup=False)
        out.print(f"  {run.text}", markup=False)
    table = Table("", "tokens", "target passes", "tokens per pass")
    for name, these in (("plain", plain), ("speculative", fast)):
        tokens, passes = sum(run.output_tokens for run in these), sum(run.passes for run in these)
        table.add_row(name, str(tokens), str(passes), f"{tokens / passes:.2f}")
    out.print(table)
    out.print(f"identical conversations, plain, speculative and all at once: {'yes' if same else 'NO'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"))
