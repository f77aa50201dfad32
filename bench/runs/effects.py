"""python -m bench agents: what each habit of a fast agent is worth, in milliseconds to the first token.

Every effect is a pair of requests to one server, with the habit and without it, after the same preparation.
Each repeat begins with a number of its own, so that nothing but the preparation is in the cache.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, Final

from rich.console import Console

from bench import pages
from bench.serve import servers
from bench.serve.http_client import Refused, post, read
from bench.serve.servers import CHAT
from bench.spread import Spread
from bench.table import Column, Table, number, spread
from paceline import limits

MODEL: Final = "smollm2-135m"
PREFILL: Final = "/v1/prefill"
TOOLS: Final = 24
RESULT_LINES: Final = 24  # of one tool's result
Message = dict[str, Any]

COLUMNS: Final = (
    Column("habit", "habit"),
    Column("instead of", "otherwise"),
    Column("prompt tokens", "prompt_tokens"),
    Column("without, ms", lambda r: spread(r["without_ms"], 0)),
    Column("with, ms", lambda r: spread(r["with_ms"], 0)),
    Column("times", lambda r: number(r["times"], 1)),
)


class Client:
    """Requests of one agent to one server."""

    def __init__(self, port: int, model: str) -> None:
        self._port, self._model = port, model
        self._numbers = count(1)
        self.prompt_tokens = 0  # of the last request

    def number(self) -> int:
        """Another one each time."""
        return next(self._numbers)

    def first_ms(self, messages: Sequence[Message], tools: Sequence[Any], user: str = "agent") -> float:
        body = {
            **self._body(messages, tools, user),
            "max_tokens": 4,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        reading = read(self._port, CHAT, body)
        self.prompt_tokens = reading.prompt_tokens
        return 1000 * (reading.first or reading.end)

    def prefill(self, messages: Sequence[Message], tools: Sequence[Any], user: str = "agent") -> None:
        status, text = post(self._port, PREFILL, self._body(messages, tools, user))
        if status != 200:
            raise Refused(status, text)

    def _body(self, messages: Sequence[Message], tools: Sequence[Any], user: str) -> dict[str, Any]:
        return {"model": self._model, "messages": list(messages), "tools": list(tools), "user": user}


def tools() -> list[dict[str, Any]]:
    """As many as an agent of some size has."""
    things = ("order", "customer", "invoice", "parcel", "warehouse", "supplier", "refund", "voucher")
    verbs = ("find", "update", "cancel")
    made = [(verb, thing) for thing in things for verb in verbs][:TOOLS]
    return [
        {
            "type": "function",
            "function": {
                "name": f"{verb}_{thing}",
                "description": f"Use it to {verb} one {thing} by its id; every change is written to the log.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        f"{thing}_id": {"type": "string", "description": f"The id of the {thing}."},
                        "reason": {"type": "string", "description": f"Why you {verb} it, in one sentence."},
                    },
                    "required": [f"{thing}_id"],
                },
            },
        }
        for verb, thing in made
    ]


def system(text: str) -> Message:
    rules = "You help the staff of a shop. Look things up before you answer, and never invent an id. "
    return {"role": "system", "content": f"{text} {rules * 4}"}


def question(text: str = "Where is order B-2047?") -> Message:
    return {"role": "user", "content": text}


def calls(*ids: str) -> Message:
    made = [
        {
            "id": f"call_{id}",
            "type": "function",
            "function": {"name": "find_order", "arguments": f'{{"order_id": "{id}"}}'},
        }
        for id in ids
    ]
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(id: str) -> Message:
    lines = [f"{id} line {i}: 3 brass lanterns at 32.25, packed in box {i * 7}" for i in range(RESULT_LINES)]
    return {"role": "tool", "tool_call_id": f"call_{id}", "name": "find_order", "content": "\n".join(lines)}


def same_beginning(client: Client, habit: bool) -> float:
    run, offered = client.number(), tools()
    client.first_ms([system(f"Run {run}."), question()], offered)
    now = f"Run {run}." if habit else f"It is 12:{run % 60:02}. Run {run}."
    return client.first_ms([system(now), question(), calls("B-2047"), result("B-2047")], offered)


def same_order_of_tools(client: Client, habit: bool) -> float:
    messages, offered = [system(f"Run {client.number()}."), question()], tools()
    client.first_ms(messages, offered)
    if not habit:
        random.Random(client.number()).shuffle(offered)
    return client.first_ms([*messages, calls("B-2047"), result("B-2047")], offered)


def users_data_last(client: Client, habit: bool) -> float:
    """The first turn of a second conversation, of another user of the same agent."""
    run, offered = client.number(), tools()

    def opening(name: str) -> list[Message]:
        if habit:
            return [system(f"Run {run}."), question(f"I am {name}. Where is order B-2047?")]
        return [system(f"The user is {name}. Run {run}."), question()]

    client.first_ms(opening("Ada"), offered)
    return client.first_ms(opening("Grace"), offered)


def read_ahead(client: Client, habit: bool) -> float:
    """The first turn of the first conversation."""
    head, offered = system(f"Run {client.number()}."), tools()
    if habit:
        client.prefill([head], offered)
    return client.first_ms([head, question()], offered)


def results_as_they_come(client: Client, habit: bool) -> float:
    """Two tools run; the first result is there while the second tool still runs."""
    messages, offered = [system(f"Run {client.number()}."), question()], tools()
    client.first_ms(messages, offered)
    so_far = [*messages, calls("B-2047", "B-2048"), result("B-2047")]
    if habit:
        client.prefill(so_far, offered)
    return client.first_ms([*so_far, result("B-2048")], offered)


def one_tenant(client: Client, habit: bool) -> float:
    """The first turn of a second conversation."""
    head, offered = system(f"Run {client.number()}."), tools()
    client.first_ms([head, question()], offered, user="agent")
    user = "agent" if habit else f"conversation {client.number()}"
    return client.first_ms([head, question("Cancel order C-12.")], offered, user=user)


@dataclass(frozen=True)
class Effect:
    habit: str
    otherwise: str
    run: Callable[[Client, bool], float]


EFFECTS: Final = (
    Effect("the system prompt stays as it is", "a time in its first line", same_beginning),
    Effect("tools in the same order", "shuffled", same_order_of_tools),
    Effect("the user's data in the first message", "in the system prompt", users_data_last),
    Effect("one `user` for the agent", "one for each conversation", one_tenant),
    Effect("system prompt and tools read ahead", "at the first question", read_ahead),
    Effect("results read ahead as they come", "all together", results_as_they_come),
)


def measure(client: Client, repeats: int, report: Callable[[str], None]) -> list[dict[str, Any]]:
    made = []
    for effect in EFFECTS:
        values: dict[bool, list[float]] = {False: [], True: []}
        for repeat in range(repeats):
            for habit in (False, True) if repeat % 2 else (True, False):
                values[habit].append(effect.run(client, habit))
        without, with_habit = Spread.of(values[False]), Spread.of(values[True])
        made.append(
            {
                "habit": effect.habit,
                "otherwise": effect.otherwise,
                "prompt_tokens": client.prompt_tokens,
                "without_ms": asdict(without),
                "with_ms": asdict(with_habit),
                "times": without.median / with_habit.median,
            }
        )
        report(f"{effect.habit}: {with_habit.median:.0f} ms, {effect.otherwise}: {without.median:.0f} ms")
    return made


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench agents", description=__doc__)
    made.add_argument("--model", default=MODEL)
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--threads", type=int, default=limits.cores())
    made.add_argument("--write", action="store_true", help="write bench/results and docs/agents.md")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(arguments) if arguments is not None else []
    options = parser().parse_args(given)
    servers.end_with_this_process()
    console = Console(width=None if Console().is_terminal else 180)
    served = servers.paceline(options.model, options.threads, 2)
    try:
        client = Client(served.port, options.model)
        client.first_ms([question()], [])  # for warming
        rows = measure(client, options.repeats, print)
    finally:
        served.close()
    console.print(Table.of(COLUMNS, rows).terminal())
    if options.write:
        name = f"agents-{options.model}"
        pages.keep(name, "agents", given, options.model, repeats=options.repeats, rows=rows)
