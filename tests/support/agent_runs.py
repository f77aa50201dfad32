"""Runs of a made-up shop's agent: a customer is looked up, then the orders one after another."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Call = tuple[str, dict[str, Any]]


def function(name: str, **types: str) -> dict[str, Any]:
    properties = {argument: {"type": kind} for argument, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {"name": name, "description": name, "parameters": parameters}


FUNCTIONS = {
    "find_customer": function("find_customer", email="string"),
    "get_customer": function("get_customer", customer_id="string"),
    "get_order": function("get_order", order_id="string"),
    "cancel_order": function("cancel_order", order_id="string"),
}
SAFE = ("find_customer", "get_customer", "get_order")


@dataclass(frozen=True)
class Shop:
    """shuffled: results hold values that nobody uses."""

    rng: random.Random
    shuffled: bool = False

    def run(self) -> Iterator[tuple[list[Message], list[Call]]]:
        """Each answer of one run: the messages before it, and its calls."""
        rng = self.rng
        name = rng.choice(["ada", "bo", "cy", "di", "ed"])
        email, customer = f"{name}{rng.randrange(1000)}@example.com", f"{name}_{rng.randrange(10**6)}"
        orders = [f"#W{rng.randrange(10**7):07}" for _ in range(rng.randint(1, 3))]
        messages: list[Message] = [{"role": "user", "content": f"Hello, I am {email}. Where are my orders?"}]
        steps: list[tuple[Call, Any]] = [
            (("find_customer", {"email": email}), customer),
            (("get_customer", {"customer_id": customer}), {"customer_id": customer, "orders": orders}),
            *(
                (("get_order", {"order_id": order}), {"order_id": order, "status": "sent"})
                for order in orders
            ),
        ]
        for number, (call, result) in enumerate(steps):
            yield list(messages), [call]
            messages += said(call, self._scrambled(result), f"call_{number}")
        yield list(messages), []

    def _scrambled(self, result: Any) -> Any:
        if not self.shuffled:
            return result
        return json.loads(
            "".join(self.rng.choice("123456789") if c.isdigit() else c for c in json.dumps(result))
        )


def said(call: Call, result: Any, id: str) -> list[Message]:
    """A call and its result as the next request has them."""
    name, arguments = call
    made = {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    text = result if isinstance(result, str) else json.dumps(result)
    return [
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": id, "content": text},
    ]
