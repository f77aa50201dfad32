"""What operators set and see: the model's name, a key, the context, a line and a trace for each request."""

import json
import logging
import re
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import pytest

from paceline.config import EngineConfig
from paceline.errors import SettingError, UsageError
from paceline.llm import LLM
from paceline.server.launch import ServerSettings, default_name
from paceline.server.request_log import REFUSED_TRACES_PER_MINUTE
from paceline.trace.store import Store
from paceline.web import api_keys, request_body
from support.metrics import samples
from support.servers import IDLE_S, NAME, Running, toy_chat_model, toy_running, until

KEY = "pl-from-the-command-line"
SECRET = "xyzzy-plugh"
NAMES = ("served", "other-name")
CONTEXT = 512
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class Server(NamedTuple):
    running: Running
    store: Path
    anna: str

    def ask(self, path: str = "completions", key: str | None = KEY, **body: Any) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        body = {"model": NAMES[0], **body}
        url = f"{self.running.url}/v1/{path}"
        return httpx.post(url, json=body, headers=headers, trust_env=False, timeout=60)

    def trace(self, id: str) -> dict[str, Any]:
        def records() -> dict[str, dict[str, Any]]:
            with closing(Store.open(str(self.store))) as store:
                return {found["id"]: found for found in store.export()}

        assert until(lambda: id in records(), IDLE_S)
        return records()[id]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("operators")
    anna = api_keys.add(folder / "keys.json", "anna", {"requests_per_minute": 1})
    with toy_running(
        folder,
        config=EngineConfig("cpu", cache_mb=64, max_model_len=CONTEXT),
        store=str(folder / "traces.db"),
        keys=str(folder / "keys.json"),
        api_keys=(KEY,),
        served_model_name=NAMES,
    ) as found:
        yield Server(found, folder / "traces.db", anna)


# The model's name


def test_a_file_is_served_by_its_stem(toy_server: Running) -> None:
    (card,) = httpx.get(f"{toy_server.url}/v1/models", trust_env=False).json()["data"]
    assert card["id"] == NAME == "toy"
    assert card["max_model_len"] == 8192


def test_no_name_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "model.Q8_0.gguf").touch()
    assert default_name(str(tmp_path / "model.Q8_0.gguf")) == "model.Q8_0"
    assert default_name(f"{tmp_path}/folder/") == "folder"
    assert default_name("smollm2-135m") == "smollm2-135m"
    assert default_name("owner/name") == "owner/name"
    assert ServerSettings("x.gguf", served_model_name=("a", "b")).names == ("a", "b")


def test_all_names_are_listed_and_answered(served: Server) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    url = f"{served.running.url}/v1/models"
    cards = httpx.get(url, headers=headers, trust_env=False).json()["data"]
    assert [card["id"] for card in cards] == list(NAMES)
    for name in NAMES:
        answer = served.ask(model=name, prompt="x", max_tokens=1).json()
        assert answer["model"] == NAMES[0]
        assert httpx.get(f"{url}/{name}", headers=headers, trust_env=False).json()["id"] == name
    assert served.ask(model=NAME, prompt="x").status_code == 404


# Keys and context


def test_a_key_of_the_command_line_stands_beside_those_of_the_file(served: Server) -> None:
    assert served.ask(prompt="x", max_tokens=1).status_code == 200
    assert served.ask(key=None, prompt="x").status_code == 401
    assert served.ask(key=KEY[:-1], prompt="x").status_code == 401
    assert served.ask(key=served.anna, prompt="x", max_tokens=1).status_code in (200, 429)
    for path in ("health", "ready", "metrics", "version", "openapi.json"):
        assert httpx.get(f"{served.running.url}/{path}", trust_env=False).status_code == 200
    assert KEY not in repr(ServerSettings("m", api_keys=(KEY,)))


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_a_request_without_a_model_is_for_the_one_served(served: Server, path: str) -> None:
    prompt = {"completions": "prompt", "responses": "input"}
    content: Any = "x" if path in prompt else [{"role": "user", "content": "x"}]
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    answer = served.ask(path, model=None, **{prompt.get(path, "messages"): content, limit: 1})
    assert (answer.status_code, answer.json()["model"]) == (200, NAMES[0])


def test_the_context_can_be_shortened(served: Server) -> None:
    answer = served.ask(prompt="ab " * 60, max_tokens=1000, ignore_eos=True).json()
    assert answer["usage"]["total_tokens"] == CONTEXT
    assert answer["choices"][0]["finish_reason"] == "length"
    too_long = served.ask(prompt=[5] * CONTEXT, max_tokens=1)
    assert too_long.json()["error"]["code"] == "context_length_exceeded"


def test_the_context_cannot_be_lengthened(tmp_path: Path) -> None:
    model = toy_chat_model(tmp_path)
    with pytest.raises(SettingError, match=r"max_model_len=9000 is not usable: expected at most 8192"):
        LLM(str(model), config=EngineConfig("cpu", cache_mb=64, max_model_len=9000))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"log_level": "loud"}, "log_level='loud' is not usable: expected one of debug, info"),
        ({"api_keys": ("",)}, "--api-key is empty"),
        ({"served_model_name": ("",)}, "--served-model-name is empty"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        ServerSettings("m", **settings)


def test_a_key_is_enough_to_be_reached_from_outside(caplog: pytest.LogCaptureFixture) -> None:
    ServerSettings("m", host="0.0.0.0", api_keys=(KEY,))
    assert caplog.messages == []
    ServerSettings("m", host="0.0.0.0")
    assert "--api-key or --keys" in caplog.text


def test_a_text_to_tokenize_has_a_limit_of_its_own(toy_server: Running) -> None:
    url = f"{toy_server.url}/tokenize"
    for size, status in ((100_000, 200), (600_000, 413)):
        assert httpx.post(url, json={"prompt": "a" * size}, trust_env=False, timeout=60).status_code == status


def test_tokens_to_detokenize_have_a_limit_of_their_own(toy_server: Running) -> None:
    url = f"{toy_server.url}/detokenize"
    for count, status in ((131_072, 200), (131_073, 400), (600_000, 413)):
        body = b'{"tokens": [' + b"5," * (count - 1) + b"5]}"
        headers = {"Content-Type": "application/json"}
        answer = httpx.post(url, content=body, headers=headers, trust_env=False, timeout=60)
        assert answer.status_code == status


# The access log


def lines(caplog: pytest.LogCaptureFixture, text: str = "") -> list[str]:
    """Of requests whose line has this text: those of an earlier test may come late."""
    messages = [record.getMessage() for record in caplog.records if record.name == "paceline.access"]
    return [message for message in messages if text in message]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_one_line_with_its_figures(
    served: Server, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    with caplog.at_level(logging.INFO):
        answer = served.ask(prompt=SECRET, max_tokens=5, ignore_eos=True, stream=stream)
        request_id = answer.headers["x-request-id"]
        assert until(lambda: len(lines(caplog, request_id)) == 1, IDLE_S)
    (line,) = lines(caplog, request_id)
    figures = dict(part.split("=") for part in line.split()[4:])
    assert line.startswith("POST /v1/completions 200 ")
    assert figures.keys() >= {"queue", "first", "passes", "cached"}
    shown = {name: figures[name] for name in ("id", "key", "route", "prompt", "output", "finish")}
    assert shown == {
        "id": answer.headers["x-request-id"],
        "key": "api-key",
        "route": "default",
        "prompt": str(len(SECRET)),
        "output": "5",
        "finish": "length",
    }
    assert SECRET not in line
    assert KEY not in line


def test_a_refused_request_has_one_line_with_its_reason(
    served: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        served.ask(key=None, prompt="x")
        served.ask(prompt="x", temperature=-1)
        served.ask(prompt="x", nonsense=1)
        httpx.get(f"{served.running.url}/no%20such%0Apath?{SECRET}", trust_env=False)
        httpx.get(f"{served.running.url}/v1/completions", trust_env=False)
        served.ask(prompt=[5] * CONTEXT)
        httpx.get(f"{served.running.url}/health", trust_env=False)
        assert until(lambda: len(lines(caplog)) == 6, IDLE_S)
    shown = [re.sub(r" \d\.\d+s id=\S+", "", line) for line in lines(caplog)]
    assert shown == [
        "POST /v1/completions 401 refused=unauthorized error=invalid_api_key",
        "POST /v1/completions 400 key=api-key model=served route=default prompt=0 cached=0 output=0 passes=0 "
        "refused=invalid error=invalid_request_error",
        "POST /v1/completions 400 key=api-key refused=invalid error=invalid_request_error",
        "GET '/no such\\npath' 404 refused=invalid error=invalid_request_error",
        "GET /v1/completions 405 refused=invalid error=invalid_request_error",
        "POST /v1/completions 400 key=api-key model=served route=default prompt=0 cached=0 output=0 passes=0 "
        "refused=too_long error=context_length_exceeded",
    ]


def test_a_request_that_is_not_http_has_a_line_too(served: Server, caplog: pytest.LogCaptureFixture) -> None:
    address = httpx.URL(served.running.url)
    with caplog.at_level(logging.INFO), socket.create_connection((address.host, address.port or 0)) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000)
        assert until(lambda: lines(caplog) == ["- - 431 error=headers_too_large"], IDLE_S)


# Traces


def test_the_trace_of_a_call_says_so(served: Server) -> None:
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [TOOL],
        "tool_choice": "required",
    }
    answer = served.ask("chat/completions", **chat, max_tokens=200)
    assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
    assert served.trace(answer.headers["x-request-id"])["finish"] == "tool_calls"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"prompt": "x", "nonsense": 1}, "invalid_request_error"),
        ({"prompt": "x", "temperature": -1}, "invalid_request_error"),
        ({"prompt": "x", "model": "unknown"}, "model_not_found"),
        ({"prompt": [5] * CONTEXT}, "context_length_exceeded"),
        ({"prompt": "x", "structured_outputs": {"regex": "("}}, "invalid_constraint"),
    ],
)
def test_a_refused_request_has_a_trace(served: Server, body: dict[str, Any], error: str) -> None:
    answer = served.ask(**body)
    assert answer.status_code in (400, 404)
    trace = served.trace(answer.headers["x-request-id"])
    shown = {name: trace[name] for name in ("finish", "error", "endpoint", "model", "passes", "rounds")}
    assert shown == {
        "finish": "refused",
        "error": error,
        "endpoint": "/v1/completions",
        "model": NAMES[0],
        "passes": 0,
        "rounds": [],
    }
    assert SECRET not in json.dumps(trace)


def test_strangers_leave_no_trace_and_nobody_leaves_too_many(
    served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = served.running.app.log
    saved: list[str] = []
    monkeypatch.setattr(log._recorder, "finished", lambda record, *_: saved.append(record.id))
    now = log._clock_ns() + 120 * 10**9
    monkeypatch.setattr(log, "_clock_ns", lambda: now)
    served.ask(key=None, prompt="x")
    assert saved == []
    for _ in range(REFUSED_TRACES_PER_MINUTE + 5):
        log._record_refusal("id", 0.0, "code", "/")
    assert len(saved) == REFUSED_TRACES_PER_MINUTE


def test_lost_traces_are_a_metric(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> dict[str, float]:
        found = samples(served.running.app.log.metrics)
        return {
            dict(k)["reason"]: v for (name, k), v in found.items() if name == "paceline_traces_lost_total"
        }

    def broken(*_: Any) -> None:
        raise OSError("no space left")

    recorder = served.running.app.log._recorder
    assert recorder is not None
    before = lost()
    monkeypatch.setattr(recorder._store, "save", broken)
    served.ask(prompt="x", max_tokens=1)
    assert until(lambda: lost()["failed"] == before["failed"] + 1, IDLE_S)


# Too little memory


def test_a_request_without_memory_is_a_refusal_and_one_line(
    served: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(served.running.app.engine.llm, "prepare", fails)
    answer = served.ask(prompt="x")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "out_of_memory")
    assert answer.headers["retry-after"] == "1"
    assert [m.partition(" in ")[0] for m in caplog.messages if "failed" in m] == [
        "/v1/completions failed: MemoryError"
    ]


def test_a_thread_that_cannot_be_started_is_a_lack_of_memory(
    served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(request_body, "_parsers", lambda: SimpleNamespace(submit=full))
    answer = served.ask(prompt="x" * request_body.INLINE_BYTES)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "out_of_memory")


# Half-closed connections


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_ended_its_side_gets_its_answer(toy_server: Running, stream: bool) -> None:
    address = httpx.URL(toy_server.url)
    asked = {"model": NAME, "prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": stream}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((address.host, address.port or 0)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        connection.shutdown(socket.SHUT_WR)
        said = b""
        while part := connection.recv(65536):
            said += part
    assert b"HTTP/1.1 200 OK" in said
    assert (b"data: [DONE]" if stream else b'"completion_tokens":100') in said


def test_a_chat_with_an_empty_answer_in_it_is_answered(toy_server: Running) -> None:
    said: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]
    url = f"{toy_server.url}/v1/chat/completions"
    texts = []
    for content in (None, ""):
        said[1]["content"] = content
        body = {"model": NAME, "messages": [*said, said[0]], "max_tokens": 5, "temperature": 0}
        found = httpx.post(url, json=body, trust_env=False)
        assert found.status_code == 200
        texts.append(found.json()["choices"][0]["message"]["content"])
    assert texts[0] == texts[1]
