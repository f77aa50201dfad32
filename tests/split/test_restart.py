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
from paceline.split.edge import Edge, EdgeResult, EdgeSettings
from paceline.split.wire import Mode
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
