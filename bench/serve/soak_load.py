"""Clients of a soak: each asks one thing after another, drawn at random, and some of them leave early."""

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

from bench.serve.http_client import HOST, Reading, Refused, events, post, take
from bench.serve.soak_requests import Expected, bad_bodies

PATIENCE: Final = 120.0  # seconds without a byte: the request is stuck
USERS: Final = 4
KINDS: Final = {"streamed": 8, "whole": 4, "left in mid-stream": 3, "cancelled": 2, "bad": 3}
BUSY: Final = 429


@dataclass
class Tally:
    """The outcomes of all requests; filled by many threads."""

    requests: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    server_errors: int = 0
    wrong: list[str] = field(default_factory=list)
    misjudged: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def short(self) -> str:
        total = sum(self.requests.values())
        return (
            f"{total} requests, {self.compared} compared, {len(self.wrong)} wrong, {self.server_errors} 5xx"
        )

    def ended(self, how: str) -> None:
        with self.lock:
            self.counts[how] += 1

    def failed(self, status: int, text: str) -> None:
        with self.lock:
            self.counts[f"answered {status}"] += 1
            self.server_errors += status >= 500
            if status != BUSY:
                self.errors.append(f"answered {status}: {text[:200]}")

    def compare(self, expected: Expected, text: str, calls: Sequence[tuple[str, str]]) -> None:
        right = text == expected.text and list(calls) == list(expected.calls)
        with self.lock:
            self.compared += 1
            self.counts["completed"] += 1
            if not right:
                wanted = expected.text or expected.calls
                self.wrong.append(f"{expected.kind}: {(text or calls)!r:.200} instead of {wanted!r:.200}")


class BackgroundThreads:
    """Runs its threads while entered. Each ends once `_ending` is set."""

    _threads: list[threading.Thread]

    def __init__(self) -> None:
        self._ending = threading.Event()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE)


class Load(BackgroundThreads):
    """Clients of a server, all at once."""

    def __init__(self, port: int, model: str, expected: Sequence[Expected], clients: int, seed: int) -> None:
        super().__init__()
        self.tally = Tally()
        self._port, self._model, self._expected = port, model, expected
        self._bad = list(bad_bodies(model))
        self._threads = [
            threading.Thread(target=self._client, args=(random.Random(f"{seed} {i}"),), daemon=True)
            for i in range(clients)
        ]

    def _client(self, rng: random.Random) -> None:
        while not self._ending.is_set():
            kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
            with self.tally.lock:
                self.tally.requests[kind] += 1
            try:
                self._ask(kind, rng)
            except TimeoutError:
                self.tally.ended("timed out")
            except Refused as refused:
                self.tally.failed(refused.status, str(refused))
                time.sleep(0.2 if refused.status == BUSY else 0)
            except (OSError, http.client.HTTPException) as problem:
                self.tally.ended("connection lost")
                self.tally.errors.append(f"connection lost: {type(problem).__name__}: {problem}")
                time.sleep(0.2)

    def _ask(self, kind: str, rng: random.Random) -> None:
        if kind == "bad":
            return self._bad_body(rng)
        expected = rng.choice(self._expected)
        body = {"model": self._model, **expected.body, "user": f"user-{rng.randrange(USERS)}"}
        if rng.random() < 0.1:
            body["speculative_config"] = {"disabled": True}
        if rng.random() < 0.1:
            body["remember"] = False
        if kind == "whole":
            return self._whole(expected, body)
        if kind == "cancelled":
            return self._cancelled(expected, body, rng.uniform(0, 0.5))
        leave = rng.randint(1, 12) if kind == "left in mid-stream" else 0
        return self._streamed(expected, {**body, "stream": True}, leave)

    def _streamed(self, expected: Expected, body: dict[str, Any], leave: int) -> None:
        """leave: after how many events; 0: never."""
        found = Reading()
        for event in events(self._port, expected.path, body, PATIENCE):
            take(found, event, 0.0)
            if found.events == leave:
                return self.tally.ended("left")
        if not found.finish:
            self.tally.errors.append(f"a stream ended without a finish_reason after {found.events} events")
            return self.tally.ended("broken off")
        calls = [(name, arguments) for _, (name, arguments) in sorted(found.calls.items())]
        return self.tally.compare(expected, found.text, calls)

    def _whole(self, expected: Expected, body: dict[str, Any]) -> None:
        status, text = post(self._port, expected.path, body, PATIENCE)
        if status != 200:
            raise Refused(status, text)
        choice = json.loads(text)["choices"][0]
        message = choice.get("message") or {"content": choice.get("text")}
        said = [call["function"] for call in message.get("tool_calls") or ()]
        calls = [(call["name"], call["arguments"]) for call in said]
        self.tally.compare(expected, message["content"] or "", calls)

    def _cancelled(self, expected: Expected, body: dict[str, Any], after: float) -> None:
        """Sent, and the connection closed before the answer is there."""
        connection = http.client.HTTPConnection(HOST, self._port, timeout=PATIENCE)
        try:
            connection.request("POST", expected.path, json.dumps(body), {"Content-Type": "application/json"})
            time.sleep(after)
        finally:
            connection.close()
        self.tally.ended("cancelled")

    def _bad_body(self, rng: random.Random) -> None:
        what, path, body = rng.choice(self._bad)
        status, text = post(self._port, path, body, PATIENCE)
        if 400 <= status < 500:
            return self.tally.ended("refused as bad")
        with self.tally.lock:
            self.tally.misjudged.append(f"{what}: answered {status}: {text[:150]}")
            self.tally.server_errors += status >= 500
        return self.tally.ended("bad, not refused")
