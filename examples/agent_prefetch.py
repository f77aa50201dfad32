"""Predicted tool calls: the same agent with and without prefetching, against a running server and slow
tools.

The tools are an HTTP service that takes 300 ms for an answer, started here. The model chooses every call
and its arguments. After some tickets the server knows how this agent works, and says which call will
come before the model has written it; `paceline.agent.Prefetch` makes the request then. Both ways lead to
the same conversation, which is checked; only the waiting differs.

    paceline serve smollm2-135m
    pip install openai
    python examples/agent_prefetch.py [BASE_URL] [--tool-ms 300]
"""

import argparse
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.request import urlopen

from openai import OpenAI

from paceline.agent import Prefetch

Message = dict[str, Any]

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "June", "Kim", "Lea")
CITIES = (
    "Oslo",
    "Lima",
    "Bern",
    "Cairo",
    "Quito",
    "Turin",
    "Perth",
    "Dakar",
    "Hanoi",
    "Leeds",
    "Malmo",
    "Natal",
)
STATES = ("packed", "on the road", "at customs", "delivered")


def records(kind: str) -> dict[str, dict[str, Any]]:
    """The service's tables."""
    rows = range(len(NAMES))
    if kind == "orders":
        return {
            f"A-{1201 + 37 * i}": {"customer_id": f"C{410 + 7 * i}", "shipment_id": f"S{9020 + 13 * i}"}
            for i in rows
        }
    if kind == "customers":
        return {f"C{410 + 7 * i}": {"name": NAMES[i], "city": CITIES[i]} for i in rows}
    return {f"S{9020 + 13 * i}": {"state": STATES[i % 4], "days": i % 5 + 1} for i in rows}


@contextmanager
def slow_service(delay_s: float) -> Iterator[str]:
    """GET /orders/A-1201 and the like."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(delay_s)
            _, kind, key = self.path.split("/")
            body = json.dumps(records(kind).get(key, {"error": f"no {key}"})).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def described(name: str, what: str, argument: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string"}},
        "required": [argument],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": what, "parameters": parameters}}


TOOLS: Any = [
    described("get_order", "an order's customer_id and shipment_id", "order_id"),
    described("get_customer", "a customer's name and city", "customer_id"),
    described("get_shipment", "the state of a shipment", "shipment_id"),
]
SYSTEM = "You look after a small shop. Look up the order, then its customer, then its shipment. Then answer."
STEPS = 3  # calls, each of which the model chooses; then it answers
# Worked tickets: a model of 135M parameters needs to see the form.
WORKED = [
    ("A-1001", "C301", "S8001", "Mia", "Rome", "lost"),
    ("A-1002", "C302", "S8002", "Tom", "Nice", "packed"),
]


def asked(order: str) -> Message:
    return {"role": "user", "content": f"Where is order {order}, and who gets it?"}


def called(id: str, name: str, arguments: str, result: str) -> list[Message]:
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": id, "content": result},
    ]


def opening(order: str) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": SYSTEM}]
    for number, (known, customer, shipment, name, city, state) in enumerate(WORKED):
        steps = [
            ("get_order", {"order_id": known}, {"customer_id": customer, "shipment_id": shipment}),
            ("get_customer", {"customer_id": customer}, {"name": name, "city": city}),
            ("get_shipment", {"shipment_id": shipment}, {"state": state, "days": 2}),
        ]
        messages.append(asked(known))
        for i, (tool, arguments, result) in enumerate(steps):
            messages += called(f"call_{number}{i}", tool, json.dumps(arguments), json.dumps(result))
        messages.append({"role": "assistant", "content": f"Order {known} for {name} in {city} is {state}."})
    return [*messages, asked(order)]


@dataclass
class Timeline:
    begun: float = field(default_factory=time.perf_counter)
    lines: list[str] = field(default_factory=list)

    def add(self, what: str) -> None:
        self.lines.append(f"  {1000 * (time.perf_counter() - self.begun):6.0f} ms  {what}")

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begun


@dataclass
class Agent:
    client: OpenAI
    model: str
    prefetch: Prefetch
    user: str

    def answer(self, order: str, ahead: bool, remember: bool) -> tuple[list[Message], Timeline, float]:
        """The conversation, its timeline and its seconds. ahead: tools may run before they are called."""
        messages, timeline = opening(order), Timeline()
        extra = {"remember": remember, **(self.prefetch.extra_body if ahead or remember else {})}
        for step in range(STEPS + 1):
            choice = "required" if step < STEPS else "none"
            name, arguments, text = self._ask(messages, choice, extra, ahead, timeline)
            if name is None:
                timeline.add(f"answer  {text.strip()}")
                messages.append({"role": "assistant", "content": text})
                break
            used = self.prefetch.stats.used
            result = self.prefetch.run(name, arguments)
            how = ", prefetched" if self.prefetch.stats.used > used else ""
            timeline.add(f"result  {result}{how}")
            messages += called(f"call_{step}", name, arguments, result)
        return messages, timeline, timeline.seconds

    def _ask(
        self, messages: list[Message], choice: str, extra: dict[str, Any], ahead: bool, timeline: Timeline
    ) -> tuple[str | None, str, str]:
        create: Any = self.client.chat.completions.create
        stream = create(
            model=self.model,
            messages=messages,
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
            max_completion_tokens=64,
            stream=True,
            user=self.user,
            extra_body=extra,
        )
        name, arguments, text = None, "", ""
        for chunk in self.prefetch.watch(stream) if ahead else stream:
            for predicted in getattr(chunk, "predicted_tool_calls", None) or [] if ahead else []:
                function = predicted["function"]
                timeline.add(
                    f"ahead   {function['name']}({function['arguments']}), {predicted['probability']:.2f}"
                )
            for part in chunk.choices:
                text += part.delta.content or ""
                for call in part.delta.tool_calls or []:
                    name = call.function.name or name
                    arguments += call.function.arguments or ""
        if name is not None:
            timeline.add(f"call    {name}({arguments})")
        return name, arguments, text


def get(base: str, kind: str, key: str) -> str:
    with urlopen(f"{base}/{kind}/{key}") as response:
        return str(response.read().decode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base_url", nargs="?", default="http://localhost:8000/v1")
    parser.add_argument("--tool-ms", type=int, default=300)
    options = parser.parse_args()
    client = OpenAI(base_url=options.base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    with slow_service(options.tool_ms / 1000) as base:
        tools = {
            "get_order": lambda order_id: get(base, "orders", order_id),
            "get_customer": lambda customer_id: get(base, "customers", customer_id),
            "get_shipment": lambda shipment_id: get(base, "shipments", shipment_id),
        }
        with Prefetch(tools, safe=list(tools)) as prefetch:
            compare(
                Agent(client, client.models.list().data[0].id, prefetch, f"example-{uuid.uuid4().hex[:8]}")
            )


def compare(agent: Agent) -> None:
    orders = list(records("orders"))
    for order in orders[:8]:  # the server learns
        agent.answer(order, ahead=False, remember=True)
    total = {False: 0.0, True: 0.0}
    same = True
    for number, order in enumerate(orders[8:]):
        ways = (
            (False, True) if number % 2 == 0 else (True, False)
        )  # the second finds its prompts in the cache
        runs = {ahead: agent.answer(order, ahead, remember=False) for ahead in ways}
        same = same and runs[False][0] == runs[True][0]
        for ahead, title in ((False, "plain"), (True, "prefetching")):
            _, timeline, seconds = runs[ahead]
            total[ahead] += seconds
            if number < 2:
                print(f"{order}, {title}: {seconds:.2f} s", *timeline.lines, sep="\n")
    stats = agent.prefetch.stats
    print(
        f"{stats.used} of {STEPS * len(orders[8:])} calls prefetched, {stats.dropped} in vain; "
        f"plain {total[False]:.2f} s, prefetching {total[True]:.2f} s: {100 * (1 - total[True] / total[False]):.0f} % shorter; "
        f"same conversations: {'yes' if same else 'no'}"
    )


if __name__ == "__main__":
    main()
