"""SIGTERM lets running answers end, or ends them cleanly; kill -9 loses no store."""

import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.trace.store import Store
from support.servers import COMMAND, MODEL, Process, served, until

pytestmark = [pytest.mark.model, pytest.mark.slow]

STORY: list[Any] = [{"role": "user", "content": "Tell a long story."}]
PLAIN = {"ignore_eos": True, "speculative_config": {"disabled": True}}
EXIT_S = 120.0


@contextmanager
def streamed(server: Process, max_tokens: int) -> Iterator[Iterator[str]]:
    """The data of each event, from the first that has come."""
    body = {
        "model": MODEL,
        "messages": STORY,
        "stream": True,
        "max_tokens": max_tokens,
        **PLAIN,
    }
    url = f"{server.url}/v1/chat/completions"
    with httpx.Client(trust_env=False) as client, client.stream("POST", url, json=body) as found:
        assert found.status_code == 200
        lines = (line.removeprefix("data: ") for line in found.iter_lines() if line.startswith("data: "))
        next(lines)
        yield lines


def test_running_answers_end_before_the_server_does(smollm2_path: Path) -> None:
    """A stream, and every prompt of a request that was taken."""
    prompts = {"prompt": ["One", "Two", "Three"], "max_tokens": 60, **PLAIN}
    with served("--store", "none", "--drain", "600") as server:
        with streamed(server, 100) as events, asking(server, prompts) as answers:
            assert until(lambda: bool(answers) or running(server) == 4, EXIT_S)
            server.signal(signal.SIGTERM)
            assert until(lambda: not server.answers_at("127.0.0.1"), EXIT_S)
            *chunks, done = events
        assert done == "[DONE]"
        assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"
        assert answers[0].status_code == 200
        found = answers[0].json()["choices"]
        assert [(one["index"], one["finish_reason"]) for one in found] == [(i, "length") for i in range(3)]
        assert server.exit_code(EXIT_S) == 0


def test_answers_that_take_too_long_are_cut_cleanly(smollm2_path: Path) -> None:
    """A stream gets an error as its last event, a whole answer becomes a 503 that says when to come back."""
    with served("--store", "none", "--drain", "1") as server:
        long = {"prompt": "Once", "max_tokens": 8000, **PLAIN}
        with streamed(server, 8000) as events, asking(server, long) as answers:
            assert until(lambda: running(server) == 2, EXIT_S)
            assert "error" not in json.loads(next(events))
            since = time.monotonic()
            server.signal(signal.SIGTERM)
            *_, error, done = events
            took = time.monotonic() - since
        assert done == "[DONE]"
        assert json.loads(error)["error"]["code"] == "shutting_down"
        assert took > 0.9
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["code"] == "shutting_down"
        assert "retry-after" in answers[0].headers
        assert server.exit_code(EXIT_S) == 0


@contextmanager
def asking(server: Process, body: dict[str, Any]) -> Iterator[list[httpx.Response]]:
    """A request beside; its answer is there at the end."""
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(post(server, {"model": MODEL, **body})))
    thread.start()
    yield answers
    thread.join(EXIT_S)


def post(server: Process, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, trust_env=False)


def running(server: Process) -> float:
    """Sequences in the engine's passes."""
    found = httpx.get(f"{server.url}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.split()[-1]) for line in found if line.startswith("vllm:num_requests_running{"))


def requests_ended(server: Process) -> float:
    found = httpx.get(f"{server.url}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.split()[-1]) for line in found if line.startswith("vllm:request_success_total{"))


def test_kill_9_during_load_leaves_the_store_whole(smollm2_path: Path, tmp_path: Path) -> None:
    store = str(tmp_path / "traces.db")
    brief = {"model": MODEL, "prompt": "Once", "max_tokens": 3, "temperature": 0}
    with served("--store", store) as server:
        expected = post(server, brief).json()["choices"][0]["text"]
        finished = [post(server, brief).json()["id"] for _ in range(3)]
        assert until(lambda: set(finished) <= listed(store), EXIT_S)
        with load_of(server, 6):
            assert until(lambda: requests_ended(server) >= 8, EXIT_S)
            server.signal(signal.SIGKILL)
            assert server.exit_code(EXIT_S) == -signal.SIGKILL
    assert set(finished) <= listed(store)
    with served("--store", store) as server:
        again = post(server, brief).json()
        assert again["choices"][0]["text"] == expected
        assert until(lambda: {again["id"], *finished} <= listed(store), EXIT_S)
        assert not server.answers_at("127.0.0.2")  # as it would if it listened to other machines
        server.signal(signal.SIGTERM)  # it has nothing to do, and ends at once
        assert server.exit_code(EXIT_S) == 0
    command = [*COMMAND, "trace", "show", finished[0], "--json", "--store", store]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
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
    with closing(Store.open(store, create=False)) as kept:
        return {record.id for record in kept.list(1000)}
