"""A small HTTP client that times the pieces of a stream; standard library only, to leave the cores alone."""

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any, Final

HOST: Final = "127.0.0.1"
PATIENCE: Final = 300.0  # seconds without a byte
Body = Mapping[str, Any]


class Refused(Exception):
    """An answer that is not a 200, or an error in the stream."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:300]}")
        self.status = status


@dataclass(slots=True)
class Reading:
    """One streamed answer, in seconds after it was asked for."""

    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    text: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)  # name and arguments of each tool call
    finish: str = ""
    events: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt
    end: float = 0.0  # of the stream

    @property
    def ms_per_token(self) -> float:
        """After the first; a first event may hold several tokens, which are then counted in vain."""
        return 1000 * (self.last - self.first) / max(1, self.tokens - 1)


def post(port: int, path: str, body: Body | bytes, timeout: float = PATIENCE) -> tuple[int, str]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


def get(port: int, path: str, timeout: float = 10.0) -> tuple[int, str]:
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


def events(port: int, path: str, body: Body, timeout: float = PATIENCE) -> Iterator[dict[str, Any]]:
    """The events of a stream; whoever stops listening has disconnected."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise Refused(reply.status, reply.read().decode())
        while line := reply.readline():
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
            elif line.startswith((b"error", b"data: [DONE]")):
                break
    finally:
        connection.close()


def read(port: int, path: str, body: Body, timeout: float = PATIENCE) -> Reading:
    """The whole of a stream, timed."""
    found, started = Reading(), time.perf_counter()
    for event in events(port, path, body, timeout):
        take(found, event, time.perf_counter() - started)
    found.end = time.perf_counter() - started
    return found


def take(found: Reading, event: Mapping[str, Any], now: float) -> None:
    if "error" in event:
        raise Refused(500, str(event["error"]))
    found.events += 1
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            kept, said = found.calls.setdefault(call["index"], ["", ""]), call["function"]
            kept[0] += said.get("name") or ""
            kept[1] += said.get("arguments") or ""
        if text or delta.get("tool_calls"):
            found.first, found.last = found.first or now, now
        found.text += text
        found.finish = choice.get("finish_reason") or found.finish
    if usage := event.get("usage"):
        found.tokens = usage["completion_tokens"]
        found.prompt_tokens = usage.get("prompt_tokens") or 0
        found.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def burst(asks: Sequence[Callable[[], Reading]]) -> tuple[list[Reading], float]:
    """All at once; the seconds until the last has ended."""
    ready = Barrier(len(asks) + 1)

    def one(ask: Callable[[], Reading]) -> Reading:
        ready.wait()
        return ask()

    with ThreadPoolExecutor(len(asks)) as pool:
        running = [pool.submit(one, ask) for ask in asks]
        ready.wait()
        started = time.perf_counter()
        found = [answer.result() for answer in running]
        return found, time.perf_counter() - started
