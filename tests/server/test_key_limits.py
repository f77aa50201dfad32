"""The limits of a key: charged before a request runs, on every endpoint; its priority and its turns."""

import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.server.admission import _priority
from paceline.types import Seq
from paceline.web import api_keys
from support.servers import IDLE_S, NAME, Running, toy_running, until

_names = count()


class Limited:
    """A server with keys; every test makes its own."""

    def __init__(self, server: Running, file: Path) -> None:
        self.server, self._file = server, file

    def key(self, **limits: int) -> "Client":
        return Client(self.server, api_keys.add(self._file, f"key{next(_names)}", limits))


class Client:
    def __init__(self, server: Running, key: str) -> None:
        self._server, self._headers = server, {"authorization": f"Bearer {key}"}

    def ask(self, path: str, method: str = "POST", **body: Any) -> httpx.Response:
        with httpx.Client(trust_env=False, timeout=60, headers=self._headers) as client:
            sent = {"model": NAME, **body} if method == "POST" else None
            return client.request(method, f"{self._server.url}{path}", json=sent)

    def complete(self, **body: Any) -> httpx.Response:
        return self.ask("/v1/completions", **{"prompt": "Once", "max_tokens": 4, "ignore_eos": True, **body})


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    folder = tmp_path_factory.mktemp("limits")
    file = folder / "keys.json"
    api_keys.add(file, "first")
    with pytest.MonkeyPatch.context() as patch, toy_running(folder, keys=str(file)) as server:
        patch.setattr("paceline.web.config_file.CHECK_EVERY_S", 0)  # a new key is known at once
        yield Limited(server, file)


def total(found: httpx.Response) -> int:
    return int(found.json()["usage"]["total_tokens"])


def test_no_more_is_used_than_the_limit_and_what_refills(limited: Limited) -> None:
    client = limited.key(tokens_per_minute=2000)
    found = [client.complete(n=16, max_tokens=100) for _ in range(4)]
    assert [answer.status_code for answer in found] == [200, 429, 429, 429]
    assert total(found[0]) > 1600
    assert found[1].json()["error"]["code"] == "rate_limit_exceeded"
    assert "may use 1,6" in found[1].json()["error"]["message"]
    assert 30 < int(found[1].headers["retry-after"]) <= 60
    assert client.complete(max_tokens=8).status_code == 200  # what is left is enough for this


def test_what_was_not_used_is_given_back(limited: Limited) -> None:
    client = limited.key(tokens_per_minute=1000)
    stop = {"stop_token_ids": [5], "logit_bias": {"5": 100}}
    for _ in range(5):
        assert total(client.complete(max_tokens=900, **stop)) < 100


def test_prompts_of_a_request_are_charged_together_and_before_any_runs(limited: Limited) -> None:
    client = limited.key(tokens_per_minute=1000)
    assert client.complete(max_tokens=100).status_code == 200
    refused = client.complete(prompt=["Once"] * 12, max_tokens=80)
    assert refused.status_code == 429
    assert client.complete(max_tokens=880).status_code == 200  # the refused one used nothing


ENDPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": ("POST", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}),
    "/v1/completions": ("POST", {"prompt": "Hi", "max_tokens": 1}),
    "/v1/responses": ("POST", {"input": "Hi", "max_output_tokens": 1}),
    "/v1/models": ("GET", {}),
    f"/v1/models/{NAME}": ("GET", {}),
    "/tokenize": ("POST", {"prompt": "Hi"}),
    "/detokenize": ("POST", {"tokens": [5]}),
}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_requests_to_every_endpoint_count(limited: Limited, path: str) -> None:
    client, (method, body) = limited.key(requests_per_minute=2), ENDPOINTS[path]
    answers = [client.ask(path, method, **body).status_code for _ in range(3)]
    assert answers == [200, 200, 429]


def test_tokens_that_are_only_counted_count(limited: Limited) -> None:
    client = limited.key(tokens_per_minute=50)
    assert client.ask("/tokenize", prompt="one two " * 100).status_code == 200
    assert client.ask("/tokenize", prompt="one").status_code == 429
    client = limited.key(tokens_per_minute=50)
    assert client.ask("/detokenize", tokens=[5] * 100).status_code == 200
    assert client.ask("/v1/models", "GET").status_code == 429


def test_a_mistake_counts_as_a_request_and_a_full_queue_does_not(
    limited: Limited, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = limited.key(requests_per_minute=2)
    scheduler = limited.server.app.engine.llm.engine._scheduler
    with monkeypatch.context() as full:
        full.setattr(scheduler, "_room", lambda slots: False)
        for _ in range(3):
            assert client.complete().json()["error"]["code"] == "server_busy"
    assert client.complete(temperature=-1).status_code == 400
    assert client.complete(unknown=1).status_code == 400
    assert client.complete().json()["error"]["code"] == "rate_limit_exceeded"


def test_a_body_that_is_still_being_sent_counts_as_running(limited: Limited) -> None:
    client = limited.key(concurrent=1)
    sending, sent = threading.Event(), threading.Event()

    def body() -> Iterator[bytes]:
        yield b'{"model": "' + NAME.encode() + b'", '
        sending.set()
        sent.wait(IDLE_S)
        yield b'"prompt": "Hi", "max_tokens": 1}'

    def slow() -> None:
        with httpx.Client(trust_env=False, timeout=60, headers=client._headers) as http:
            url = f"{limited.server.url}/v1/completions"
            http.post(url, content=body(), headers={"content-type": "application/json"})

    sender = threading.Thread(target=slow)
    sender.start()
    assert sending.wait(IDLE_S)
    assert until(lambda: client.ask("/v1/models", "GET").status_code == 429, IDLE_S)
    sent.set()
    sender.join()
    assert until(lambda: client.ask("/v1/models", "GET").status_code == 200, IDLE_S)


@pytest.mark.parametrize(
    ("limits", "priority", "status"),
    [
        ({}, 0, 200),
        ({}, -7, 200),
        ({}, 1, 400),
        ({"max_priority": 5}, 5, 200),
        ({"max_priority": 5}, 6, 400),
        ({"max_priority": -5}, -5, 200),
        ({"max_priority": -5}, 0, 400),
    ],
)
def test_a_key_bounds_the_priority(limited: Limited, limits: Any, priority: int, status: int) -> None:
    found = limited.key(**limits).complete(priority=priority)
    assert found.status_code == status
    assert status == 200 or found.json()["error"]["param"] == "priority"


def test_a_bound_includes_the_routes_priority(limited: Limited) -> None:
    def key(**limits: int) -> api_keys.Key:
        return api_keys.Key(name="k", hash="0" * 64, limits=api_keys.KeyLimits(**limits))

    assert _priority(None, 50, 100) == 150
    assert _priority(key(), 0, 100) == 100
    assert _priority(key(max_priority=10), 5, 100) == 10
    assert _priority(key(max_priority=10), 5, -100) == -95
    assert _priority(key(max_priority=-10), None, 0) == -10


def test_answers_are_shared_out_among_keys(limited: Limited, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = limited.server.app.engine.llm.engine
    submit, seen = engine.submit, list[tuple[str, str]]()

    def listening(seq: Seq, slots: int = 1) -> None:
        seen.append((seq.client, seq.tenant))
        submit(seq, slots)

    monkeypatch.setattr(engine, "submit", listening)
    one, other = limited.key(), limited.key()
    for client, user in ((one, "a"), (one, "b"), (other, "a")):
        assert client.complete(user=user, n=2).status_code == 200
    clients, tenants = zip(*seen, strict=True)
    assert [len(set(clients[:4])), len(set(clients)), len(set(tenants))] == [1, 2, 3]
