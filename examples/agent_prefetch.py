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

from openai import APIConnectionError, OpenAI

from paceline.agent import Prefetch

Message = dict[str, Any]

ITEMS = ("lantern", "kettle", "teapot", "mirror", "carpet", "stool")
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


def records(kind: str) -> dict[str, dict[str, Any]]:
    """The service's tables."""
    rows = range(len(CITIES))
    if kind == "orders":
        return {
            f"A-{1201 + 37 * i}": {"item": ITEMS[i % 6], "shipment_id": f"S{9020 + 13 * i}"} for i in rows
        }
    if kind == "shipments":
        return {f"S{9020 + 13 * i}": {"state": "waiting", "depot_id": f"D{410 + 7 * i}"} for i in rows}
    return {f"D{410 + 7 * i}": {"city": CITIES[i]} for i in rows}


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
    described("get_order", "an order's item and shipment_id", "order_id"),
    described("get_shipment", "a shipment's state and depot_id", "shipment_id"),
    described("get_depot", "the city of a depot", "depot_id"),
]
SYSTEM = "You look after a small shop. Look up the order, its shipment and the depot. Then answer."
ANSWER = "Order {}, a {}, waits in {}."
STEPS = 3  # calls, each of which the model chooses; then it answers
# Worked tickets: a model of 135M parameters needs to see the form.
WORKED = [("A-1001", "cup", "S8001", "D301", "Rome"), ("A-1002", "lamp", "S8002", "D302", "Nice")]


def asked(order: str) -> Message:
    return {"role": "user", "content": f"Where is order {order}?"}


def called(id: str, name: str, arguments: str, result: str) -> list[Message]:
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": id, "content": result},
    ]


def opening(order: str) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": SYSTEM}]
    for number, (known, item, shipment, depot, city) in enumerate(WORKED):
        steps = [
            ("get_order", {"order_id": known}, {"item": item, "shipment_id": shipment}),
            ("get_shipment", {"shipment_id": shipment}, {"state": "waiting", "depot_id": depot}),
            ("get_depot", {"depot_id": depot}, {"city": city}),
        ]
        messages.append(asked(known))
        for i, (tool, arguments, result) in enumerate(steps):
            messages += called(f"call_{number}{i}", tool, json.dumps(arguments), json.dumps(result))
        messages.append({"role": "assistant", "content": ANSWER.format(known, item, city)})
    return [*messages, asked(order)]


def answering(order: str, results: list[str]) -> list[Message]:
    """The question with its results alone, after two of them with their answers."""
    messages: list[Message] = []
    for known, item, shipment, depot, city in WORKED:
        found = [
            {"item": item, "shipment_id": shipment},
            {"state": "waiting", "depot_id": depot},
            {"city": city},
        ]
        question = "\n".join([asked(known)["content"], *map(json.dumps, found)])
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": ANSWER.format(known, item, city)},
        ]
    return [*messages, {"role": "user", "content": "\n".join([asked(order)["content"], *results])}]


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
        results: list[str] = []
        for step in range(STEPS):
            name, arguments, _ = self._ask(messages, TOOLS, extra, ahead, timeline)
            used = self.prefetch.stats.used
            result = self.prefetch.run(name, arguments)
            how = ", prefetched" if self.prefetch.stats.used > used else ""
            timeline.add(f"result  {result}{how}")
            messages += called(f"call_{step}", name, arguments, result)
            results.append(result)
        _, _, text = self._ask(answering(order, results), [], extra, ahead, timeline)
        timeline.add(f"answer  {text.strip()}")
        messages.append({"role": "assistant", "content": text})
        return messages, timeline, timeline.seconds

    def _ask(
        self,
        messages: list[Message],
        tools: list[Any],
        extra: dict[str, Any],
        ahead: bool,
        timeline: Timeline,
    ) -> tuple[str, str, str]:
        """Name and arguments of the answer's call, and its text."""
        offered = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False} if tools else {}
        create: Any = self.client.chat.completions.create
        stream = create(
            model=self.model,
            messages=messages,
            temperature=0,
            max_completion_tokens=64,
            stream=True,
            user=self.user,
            extra_body=extra,
            **offered,
        )
        name, arguments, text = "", "", ""
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
        if name:
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
    try:
        model = client.models.list().data[0].id
    except APIConnectionError:
        raise SystemExit(
            f"no server answers at {options.base_url}: start one with `paceline serve smollm2-135m`"
        ) from None
    with slow_service(options.tool_ms / 1000) as base:
        tools = {
            "get_order": lambda order_id: get(base, "orders", order_id),
            "get_shipment": lambda shipment_id: get(base, "shipments", shipment_id),
            "get_depot": lambda depot_id: get(base, "depots", depot_id),
        }
        with Prefetch(tools, safe=list(tools)) as prefetch:
            compare(Agent(client, model, prefetch, f"example-{uuid.uuid4().hex[:8]}"))


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
    saved = 100 * (1 - total[True] / total[False])
    print(f"{stats.used} of {STEPS * len(orders[8:])} calls prefetched, {stats.dropped} in vain")
    print(f"plain {total[False]:.2f} s, prefetching {total[True]:.2f} s: {saved:.0f} % shorter")
    print(f"same conversations: {'yes' if same else 'no'}")


if __name__ == "__main__":
    main()
