"""A server process that is killed in the middle of an answer and started again: the client's text goes on."""

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline import LLM, EngineConfig, SamplingParams
from paceline.drafters.ngram import Ngram
from paceline.paths import home
from paceline.split.edge import Edge, EdgeResult, EdgeSettings, Vocabulary, _Cut, _Drafting, _Run
from paceline.split.wire import (
    ClientMessage,
    Commit,
    End,
    Error,
    Finish,
    Hello,
    Mode,
    Opened,
    Resume,
    ServerMessage,
    extend_hash,
)
from paceline.types import Ask, Draft
from support.servers import COMMAND, START_S, free_port, toy_chat_model
from support.split_server import PLAIN

BODY: dict[str, Any] = {"prompt": "one two three one two", "max_tokens": 300, "temperature": 0.8, "seed": 5}
KILLED_AT = 60  # tokens of the answer


class Server:
    """`paceline serve --split` of a tiny model, on one port."""

    def __init__(self, folder: Path) -> None:
        self.model, self.port = toy_chat_model(folder), free_port()
        (folder / "home").mkdir()
        (home() / "native").mkdir(parents=True, exist_ok=True)
        (folder / "home" / "native").symlink_to(home() / "native")
        self._env = {**os.environ, "PACELINE_HOME": str(folder / "home")}
        store = f"sqlite:///{folder / 'traces.db'}"
        options = (
            "--split",
            "--port",
            str(self.port),
            "--cache-mb",
            "64",
            "--store",
            store,
            "--no-save-estimates",
        )
        self._command = [*COMMAND, "serve", str(self.model), *options, "--log-level", "warning"]
        self.process = self._started()

    def _started(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(self._command, env=self._env)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert process.poll() is None, "the server ended before it began"
            try:
                if httpx.get(f"{self.url}/ready", trust_env=False).status_code == 200:
                    return process
            except httpx.TransportError:
                time.sleep(0.1)
        raise AssertionError("the server did not start in time")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.kill()
        self.process = self._started()


@contextmanager
def server_in(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    try:
        yield server
    finally:
        server.kill()


class Restarting(Ngram):
    """Restarts the server while it waits for a draft."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server, self.restarted_at = server, 0

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        if not self.restarted_at and len(asks[0].seq.output) >= KILLED_AT:
            self.restarted_at = len(asks[0].seq.output)
            self.server.restart()
        return super().draft(asks)


class Script:
    """A connection whose server says these messages; None: it is cut."""

    is_open = takes_drafts = False
    has_more = True
    up = down = credits = 0

    def __init__(self, *messages: ServerMessage | None) -> None:
        self._messages = list(messages)
        self.sent: list[ClientMessage] = []

    async def open(self, hello: Hello) -> None: ...

    async def close(self) -> None: ...

    async def send(self, message: ClientMessage) -> None:
        self.sent.append(message)

    async def receive(self) -> ServerMessage:
        if (message := self._messages.pop(0)) is None:
            raise _Cut
        return message


def test_a_cut_while_the_beginning_comes_again_is_resumed_from_there() -> None:
    first, second, text = bytes(32), bytes([1] * 32), (5, 6, 7, 8)
    hashes = [extend_hash(9, text[:end]) for end in range(5)]
    connection: Any = Script(
        Opened(first, "r1", 3, 9),
        Commit(0, text[:3], hashes[3], 0, 1, 0, 0),
        None,
        Error(404, "unknown_stream", "restarted", closes=False),
        Opened(second, "r2", 3, 9),
        Commit(0, text[:1], hashes[1], 0, 1, 0, 0),
        None,
        Opened(second, "r2", 3, 9),
        Commit(1, text[1:], hashes[4], 0, 2, 0, 0),
        End(4, hashes[4], Finish.STOP, 4),
    )
    vocabulary = Vocabulary([b"."] * 9, frozenset(), bytes(32))
    answer = _Run(connection, _Drafting([]), EdgeSettings(), vocabulary, BODY, None, ())
    assert asyncio.run(answer.finish()).token_ids == text
    resumed = [message for message in connection.sent if isinstance(message, Resume)]
    assert resumed == [Resume(first, 3, hashes[3]), Resume(second, 1, hashes[1])]


@pytest.mark.slow
def test_an_open_answer_survives_a_kill_of_the_server(tmp_path: Path) -> None:
    with server_in(tmp_path) as server:
        drafter, settings = Restarting(server), EdgeSettings(Mode.PATIENT, reconnect_s=START_S)
        shown = list[tuple[int, ...]]()

        async def test() -> EdgeResult:
            edge = Edge(server.url, [drafter], settings)
            return await edge.generate(BODY, lambda committed, provisional: shown.append(committed))

        result = asyncio.run(test())
        llm = LLM(str(server.model), config=EngineConfig("cpu", cache_mb=64))
    params = SamplingParams(**{name: BODY[name] for name in ("temperature", "seed", "max_tokens")})
    plain = llm.generate(BODY["prompt"], params, spec=PLAIN)
    assert KILLED_AT <= drafter.restarted_at < len(plain.token_ids)
    assert result.token_ids == plain.token_ids
    assert result.reconnects >= 1
    assert all(later[: len(text)] == text for text, later in pairwise(shown))
    # Of the second process alone: what was known came again at several tokens a pass.
    assert result.passes < len(plain.token_ids) - drafter.restarted_at / 2
