"""Attacks on a server: requests of at most 8 MB that do their worst. To add one, write a function here.

    @attack(400)
    def stop_of_many_texts(server: Target) -> int:
        return server.chat(stop=[f"x{i}" for i in range(100_000)])

The numbers are the status codes that answer it properly. A function returns the status that it got; 0: the
connection was closed without an answer, which some attacks may expect.
"""

import http.client
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from bench.serve.http_client import HOST
from bench.serve.servers import CHAT, COMPLETIONS

MAX_PAYLOAD: Final = 8 << 20  # bytes
PATIENCE_S: Final = 120.0
HELLO: Final = ({"role": "user", "content": "Hello"},)


@dataclass(frozen=True, slots=True)
class Target:
    """The server under attack."""

    port: int
    model: str

    def chat(self, **fields: Any) -> int:
        """A chat of a few tokens with these fields; its status."""
        return self.post(CHAT, {"model": self.model, "messages": HELLO, "max_tokens": 8, **fields})

    def completion(self, **fields: Any) -> int:
        return self.post(COMPLETIONS, {"model": self.model, "prompt": "Hello", "max_tokens": 8, **fields})

    def post(
        self, path: str, body: Mapping[str, Any] | bytes, headers: Mapping[str, str] | None = None
    ) -> int:
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        assert len(payload) <= MAX_PAYLOAD, f"{len(payload):,} bytes: an attack has at most {MAX_PAYLOAD:,}"
        connection = http.client.HTTPConnection(HOST, self.port, timeout=PATIENCE_S)
        try:
            connection.request("POST", path, payload, {"Content-Type": "application/json", **(headers or {})})
            reply = connection.getresponse()
            reply.read()
            return reply.status
        except (ConnectionError, http.client.HTTPException):
            return 0
        finally:
            connection.close()


@dataclass(frozen=True, slots=True)
class Attack:
    name: str
    expected: frozenset[int]  # status codes
    run: Callable[[Target], int]


ATTACKS: Final[dict[str, Attack]] = {}


def attack(*expected: int) -> Callable[[Callable[[Target], int]], Callable[[Target], int]]:
    """Registers a function under its name."""

    def register(run: Callable[[Target], int]) -> Callable[[Target], int]:
        name = run.__name__.replace("_", " ")
        ATTACKS[name] = Attack(name, frozenset(expected), run)
        return run

    return register


def regex(server: Target, pattern: str) -> int:
    return server.chat(structured_outputs={"regex": pattern})


def schema(server: Target, schema: Any, **fields: Any) -> int:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return server.chat(response_format=form, **fields)


@attack(400)
def nested_repetitions(server: Target) -> int:
    return regex(server, "((((a{100}){100}){100}){100})")


@attack(400)
def repetitions_after_a_letter(server: Target) -> int:
    return regex(server, "[a-z]((((a{100}){100}){100}){100})")


@attack(200, 400)
def ranges_of_repetitions(server: Target) -> int:
    return regex(server, "((x{1,100}){1,100}){1,100}")


@attack(200, 400)
def many_states(server: Target) -> int:
    return server.chat(structured_outputs={"regex": "([ab]*a[ab]{25}c)*d"}, max_tokens=64)


@attack(400)
def one_choice_of_a_megabyte(server: Target) -> int:
    return server.chat(structured_outputs={"choice": ["word " * 200_000]})


@attack(400)
def many_choices(server: Target) -> int:
    return server.chat(structured_outputs={"choice": [f"option {i} {i * i}" for i in range(200_000)]})


@attack(200, 400)
def wide_schema(server: Target) -> int:
    properties = {f"p{i}": {"type": "string"} for i in range(4000)}
    return schema(server, {"type": "object", "properties": properties, "additionalProperties": False})


@attack(400)
def deep_schema(server: Target) -> int:
    inner: dict[str, Any] = {"type": "string"}
    for _ in range(90):
        inner = {"type": "object", "properties": {"a": inner, "b": inner}, "required": ["a"]}
        if len(json.dumps(inner)) > 3 << 20:
            break
    return schema(server, inner)


@attack(400)
def combinations_in_a_schema(server: Target) -> int:
    either = [
        {"anyOf": [{"properties": {f"p{i}": {"type": kind}}} for kind in ("string", "number")]}
        for i in range(18)
    ]
    return schema(server, {"type": "object", "allOf": either})


@attack(200, 400)
def pattern_in_a_schema(server: Target) -> int:
    return schema(server, {"type": "string", "pattern": "^((a{1,99}){1,99}){1,99}$"})


@attack(400)
def long_constant(server: Target) -> int:
    return schema(server, {"const": "x " * 500_000})


@attack(200, 400)
def large_enumeration(server: Target) -> int:
    return schema(server, {"enum": [f"value number {i}" for i in range(40_000)]})


@attack(200, 400)
def pattern_in_a_required_tool(server: Target) -> int:
    properties = {"a": {"type": "string", "pattern": "(((b{99}){99}){99}){9}"}}
    parameters = {"type": "object", "properties": properties, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return server.chat(tools=[tool], tool_choice="required", max_tokens=64)


@attack(200, 400)
def ambiguous_grammar(server: Target) -> int:
    return server.chat(structured_outputs={"grammar": 'start: s\ns: s s s | s s | "a" | ""'}, max_tokens=64)


@attack(400)
def doubling_rules(server: Target) -> int:
    rules = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60))
    return server.chat(structured_outputs={"grammar": f'start: r0\n{rules}\nr60: "a"'})


@attack(400)
def doubling_terminals(server: Target) -> int:
    rules = "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40))
    return server.chat(structured_outputs={"grammar": f"start: T0\n{rules}\nT40: /[a-z]/"})


@attack(400)
def hundred_thousand_stops(server: Target) -> int:
    return server.chat(stop=[f"stop {i}" for i in range(100_000)], max_tokens=64)


@attack(400)
def seven_hundred_thousand_stops(server: Target) -> int:
    return server.chat(stop=[f"{i:x}z" for i in range(700_000)], max_tokens=64)


@attack(400)
def long_stop(server: Target) -> int:
    return server.chat(stop="a " * 2_000_000, max_tokens=64)


@attack(200)
def large_prediction(server: Target) -> int:
    text = " ".join(f"{i * 7919 % 100_003}" for i in range(1_200_000))[: 7 << 20]
    return server.chat(prediction={"type": "content", "content": text}, n=4, max_tokens=32)


@attack(400)
def nested_brackets(server: Target) -> int:
    return server.post(CHAT, b'{"messages": [' + b"[]," * 2_700_000 + b"[]]}")
