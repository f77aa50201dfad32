"""Attacks on a server: requests of at most 8 MB that do their worst. To add one, write a function here.

    @attack(400)
    def stop_of_many_texts(server: Target) -> int:
        return server.chat(stop=[f"x{i}" for i in range(100_000)])

The numbers are the status codes that answer it properly. A function returns the status that it got; 0: the
connection was closed without an answer, which some attacks may expect.
"""

import http.client
import json
import random
import re
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
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

    def raw(self, *parts: bytes, half_close: bool = False) -> int:
        """The status of the last answer to these bytes, which need not be HTTP."""
        with socket.create_connection((HOST, self.port), PATIENCE_S) as connection:
            with suppress(OSError):  # the server may hang up in the middle
                for part in parts:
                    connection.sendall(part)
            reply = b""
            with suppress(OSError):
                if half_close:
                    connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(65536):
                    reply += part
        answers = re.findall(rb"HTTP/1.1 (\d+)", reply)
        return int(answers[-1]) if answers else 0


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


def tool(server: Target, parameters: dict[str, Any]) -> int:
    function = {"name": "f", "parameters": {"type": "object", **parameters}}
    return server.chat(tools=[{"type": "function", "function": function}])


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


@attack(200, 400)
def grammar_without_end(server: Target) -> int:
    """The only text that fits goes on for ever."""
    return server.chat(structured_outputs={"grammar": "start: /a*/ start"}, max_tokens=64)


@attack(400)
def alternatives_in_a_tool(server: Target) -> int:
    return tool(server, {"anyOf": [{}] * 45_000})


@attack(400)
def chain_of_references_in_a_tool(server: Target) -> int:
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}", "properties": {}} for i in range(4000)}
    return tool(server, {"$ref": "#/$defs/a0", "properties": {}, "$defs": chain})


@attack(400)
def many_tools_of_which_many_are_allowed(server: Target) -> int:
    tools = [{"name": f"tool{i}"} for i in range(20_000)]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": tools[-1:] * 20_000}
    return server.chat(tools=tools, tool_choice=allowed)


@attack(400)
def forty_thousand_messages(server: Target) -> int:
    return server.chat(messages=[*HELLO, {"role": "assistant", "content": "Hi"}] * 20_000)


@attack(400)
def twenty_thousand_system_items(server: Target) -> int:
    return server.post("/v1/responses", {"input": [{"role": "system", "content": "x" * 330}] * 20_000})


@attack(400)
def long_texts_at_once(server: Target) -> int:
    """Each just short enough to be tokenized."""
    body = {"messages": [{"role": "user", "content": " a1" * 200_000}], "max_tokens": 1}
    with ThreadPoolExecutor(16) as pool:
        return max(pool.map(lambda _: server.post(CHAT, body), range(16)))


@attack(400)
def large_schema_for_many_prompts(server: Target) -> int:
    properties = {f"p{i}": {"enum": ["a"] * 60} for i in range(4000)}
    return server.completion(prompt=["a"] * 128, structured_outputs={"json": {"properties": properties}})


@attack(200)
def large_prediction_for_many_prompts(server: Target) -> int:
    text = {"type": "content", "content": "abc " * 1_700_000}
    return server.completion(prompt=["a"] * 128, prediction=text, max_tokens=1)


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


@attack(400)
def half_a_million_messages(server: Target) -> int:
    """Each would be an error of its own."""
    return server.post(CHAT, b'{"model": "x", "messages": [' + b"1," * 490_000 + b"1]}")


@attack(400)
def four_million_numbers(server: Target) -> int:
    return server.post(COMPLETIONS, b'{"prompt": [' + b"1," * 4_000_000 + b"1]}")


@attack(400)
def many_keys(server: Target) -> int:
    keys = b",".join(b'"%x": 1' % i for i in range(700_000))
    return server.post(CHAT, b"{" + keys + b"}")


@attack(400)
def escaped_text(server: Target) -> int:
    start = b'{"messages": [{"role": "user", "content": "'
    return server.post(CHAT, start + b"\\n" * 4_000_000 + b'"}], "model": "%b"}' % server.model.encode())


@attack(400)
def text_of_eight_megabytes(server: Target) -> int:
    return server.chat(messages=[{"role": "user", "content": "[, {\n " * 1_000_000}])


GET: Final = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@attack(431)
def one_large_header(server: Target) -> int:
    return server.raw(GET + b"X: ", *[b"a" * 1_000_000] * 8)


@attack(431)
def many_headers(server: Target) -> int:
    return server.raw(GET, b"".join(b"X-%d: %d\r\n" % (i, i) for i in range(400_000)))


@attack(200, 0)
def flood_on_one_connection(server: Target) -> int:
    return server.raw(*[(GET + b"\r\n") * 20_000] * 8)


@attack(431)
def endless_trailers(server: Target) -> int:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    json_type = b"Content-Type: application/json\r\n\r\n"
    return server.raw(head + json_type + b"1\r\n{\r\n0\r\n", b"X: " + b"a" * 4_000_000)


@attack(408)
def half_sent_headers(server: Target) -> int:
    return server.raw(GET)


@attack(200)
def silent_connections(server: Target) -> int:
    """As many as the client may open, and one that speaks."""
    with ExitStack() as stack, suppress(OSError):
        for _ in range(800):
            stack.enter_context(socket.create_connection((HOST, server.port), PATIENCE_S))
        return server.raw(GET + b"Connection: close\r\n\r\n")
    return 0


@attack(200)
def half_closed_connection(server: Target) -> int:
    body = json.dumps({"model": server.model, "prompt": "Hello", "max_tokens": 32}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return server.raw(head + b"Content-Length: %d\r\n\r\n" % len(body) + body, half_close=True)


@attack(403)
def page_of_another_site(server: Target) -> int:
    return server.post(CHAT, b"{}", {"Origin": "https://evil.example", "Content-Type": "text/plain"})


@attack(403)
def rebound_name(server: Target) -> int:
    return server.post(CHAT, b"{}", {"Host": "evil.example:8000"})


@attack(413)
def tokens_of_eight_megabytes(server: Target) -> int:
    return server.post("/tokenize", {"prompt": "a b " * 2_000_000})


def cold_prompt(tokens: int, seed: int) -> list[int]:
    """Tokens that are in no cache."""
    rng = random.Random(f"{seed} {tokens}")
    return [rng.randrange(1000, 30_000) for _ in range(tokens)]


@attack(200)
def cold_prompt_that_fills_the_context(server: Target) -> int:
    return server.completion(prompt=cold_prompt(8000, 0), max_tokens=1)


@attack(200)
def sixteen_choices_after_a_long_prompt(server: Target) -> int:
    return server.completion(prompt=cold_prompt(2000, 1), n=16, max_tokens=64, ignore_eos=True)


@attack(200, 429)
def many_prompts_of_the_highest_priority(server: Target) -> int:
    prompts = [cold_prompt(64, 2 + i) for i in range(128)]
    return server.completion(prompt=prompts, max_tokens=16, priority=100)
