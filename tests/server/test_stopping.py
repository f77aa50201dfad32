"""SIGTERM lets running answers end, or ends them cleanly; kill -9 loses no store."""

import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.servers import COMMAND, MODEL, Process, served, until

pytestmark = [pytest.mark.model, pytest.mark.slow]

STORY: list[Any] = [{"role": "user", "content": "Tell a long story."}]
EXIT_S = 60.0


@contextmanager
def streamed(server: Process, max_tokens: int) -> Iterator[Iterator[str]]:
    """The data of each event, from the first that has come."""
    body = {
        "model": MODEL,
        "messages": STORY,
        "stream": True,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "speculative_config": {"disabled": True},
    }
    url = f"{server.url}/v1/chat/completions"
    with httpx.Client(trust_env=False, timeout=60) as client, client.stream("POST", url, json=body) as found:
        assert found.status_code == 200
        lines = (line.removeprefix("data: ") for line in found.iter_lines() if line.startswith("data: "))
        next(lines)
        yield lines


def test_a_running_answer_ends_before_the_server_does(smollm2_path: Path) -> None:
    with served("--store", "none") as server:
        with streamed(server, 100) as events:
            server.signal(signal.SIGTERM)
            assert until(lambda: not server.answers_at("127.0.0.1"), EXIT_S)
            *chunks, done = events
        assert done == "[DONE]"
        assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"
        assert server.exit_code(EXIT_S) == 0


def test_an_answer_that_takes_too_long_is_cut_cleanly(smollm2_path: Path) -> None:
    with served("--store", "none", "--drain", "1") as server:
        with streamed(server, 8000) as events:
            since = time.monotonic()
            server.signal(signal.SIGTERM)
            *chunks, error, done = events
            took = time.monotonic() - since
        assert done == "[DONE]"
        assert 0 < len(chunks) < 8000
        assert json.loads(error)["error"]["code"] == "shutting_down"
        assert took > 0.9
        assert server.exit_code(EXIT_S) == 0


def test_a_whole_answer_that_takes_too_long_becomes_an_error(smollm2_path: Path) -> None:
    """A 503 that says when to come back."""
    with served("--store", "none", "--drain", "1") as server:
        body = {"model": MODEL, "prompt": "Once", "max_tokens": 8000, "ignore_eos": True}
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(post(server, body)))
        asking.start()
        assert until(lambda: busy(server), EXIT_S)
        server.signal(signal.SIGTERM)
        asking.join(EXIT_S)
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["code"] == "shutting_down"
        assert "retry-after" in answers[0].headers
        assert server.exit_code(EXIT_S) == 0


def test_every_prompt_of_a_request_that_was_taken_is_answered(smollm2_path: Path) -> None:
    with served("--store", "none") as server:
        plain = {"disabled": True}
        body = {"model": MODEL, "prompt": ["One", "Two", "Three"], "max_tokens": 60, "ignore_eos": True}
        answers: list[httpx.Response] = []
        asked = {**body, "speculative_config": plain}
        asking = threading.Thread(target=lambda: answers.append(post(server, asked)))
        asking.start()
        assert until(lambda: busy(server), EXIT_S)
        server.signal(signal.SIGTERM)
        asking.join(EXIT_S)
        assert answers[0].status_code == 200
        found = answers[0].json()["choices"]
        assert [(one["index"], one["finish_reason"]) for one in found] == [(i, "length") for i in range(3)]
        assert server.exit_code(EXIT_S) == 0


def test_a_server_with_nothing_to_do_ends_at_once(smollm2_path: Path) -> None:
    with served("--store", "none") as server:
        assert not server.answers_at("127.0.0.2")  # as it would if it listened to other machines
        server.signal(signal.SIGTERM)
        assert server.exit_code(EXIT_S) == 0


def post(server: Process, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, trust_env=False, timeout=60)


def busy(server: Process) -> bool:
    found = httpx.get(f"{server.url}/metrics", trust_env=False, timeout=60).text
    running = [line for line in found.splitlines() if line.startswith("vllm:num_requests_running")]
    return any(not line.endswith(" 0.0") for line in running)


def test_kill_9_during_load_leaves_the_store_whole(smollm2_path: Path, tmp_path: Path) -> None:
    store = str(tmp_path / "traces.db")
    brief = {"model": MODEL, "prompt": "Once", "max_tokens": 3, "temperature": 0}
    with served("--store", store) as server:
        expected = post(server, brief).json()["choices"][0]["text"]
        finished = [post(server, brief).json()["id"] for _ in range(3)]
        assert until(lambda: set(finished) <= listed(store), EXIT_S)
        with load_of(server, 6):
            assert until(lambda: busy(server), EXIT_S)
            time.sleep(0.5)
            server.signal(signal.SIGKILL)
            assert server.exit_code(EXIT_S) == -signal.SIGKILL
    assert set(finished) <= listed(store)
    with served("--store", store) as server:
        again = post(server, brief).json()
        assert again["choices"][0]["text"] == expected
        assert until(lambda: {again["id"], *finished} <= listed(store), EXIT_S)
    shown = trace("show", finished[0], "--json", "--store", store)
    assert json.loads(shown)["rounds"]


@contextmanager
def load_of(server: Process, clients: int) -> Iterator[None]:
    """Clients that ask again and again until the server is gone."""

    def ask() -> None:
        try:
            while True:
                post(server, {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12})
        except httpx.TransportError:
            return

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(EXIT_S)
    assert not any(thread.is_alive() for thread in threads)


def listed(store: str) -> set[str]:
    found = trace("ls", "--json", "--limit", "1000", "--store", store)
    return {request["id"] for request in json.loads(found)}


def trace(*arguments: str) -> str:
    command = [*COMMAND, "trace", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
