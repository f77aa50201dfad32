"""Strangers, browsers and bad requests see nothing of the machine and no text of others."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.server.launch import ServerSettings
from paceline.web import api_keys
from support.servers import NAME, Running, toy_running

MODEL = NAME
SECRET = "xyzzy-plugh"
MAX_BODY = 4096
ORIGIN = "https://app.example"
CLOSED = {
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    "/v1/responses": "POST",
    "/v1/models": "GET",
    f"/v1/models/{MODEL}": "GET",
    "/v1/models/unknown": "GET",
    "/v1/routes": "GET",
    "/page/about": "GET",
    "/tokenize": "POST",
    "/detokenize": "POST",
}
TAKE_BODIES = [path for path, method in CLOSED.items() if method == "POST"]
OPEN = ["/", "/health", "/ready", "/metrics", "/version", "/openapi.json"]
ERROR = {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def server(toy_server: Running) -> Running:
    return toy_server


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def key(key_file: Path) -> str:
    return api_keys.add(key_file, "anna")


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory, key_file: Path, key: str) -> Iterator[Running]:
    """With keys, a small limit for bodies, and one origin that may ask from a browser."""
    folder = tmp_path_factory.mktemp("locked")
    with toy_running(folder, keys=str(key_file), max_body=MAX_BODY, allowed_origins=(ORIGIN,)) as found:
        yield found


def ask(server: Running, path: str, method: str = "POST", **more: Any) -> httpx.Response:
    if "content" in more:
        more["headers"] = {"content-type": "application/json", **more.get("headers", {})}
    with httpx.Client(trust_env=False, timeout=60) as client:
        return client.request(method, f"{server.url}{path}", **more)


def assert_error(found: httpx.Response, status: int) -> None:
    assert found.status_code == status
    assert found.json().keys() == {"error"}
    assert found.json()["error"].keys() == ERROR
    assert found.headers["content-type"] == "application/json"


@pytest.mark.parametrize(("path", "method"), CLOSED.items())
@pytest.mark.parametrize("header", [None, "Bearer pl-wrong", "Bearer", "Basic YTpi", "Bearer \u00e9"])
def test_without_a_key_nothing_is_revealed(
    locked: Running, path: str, method: str, header: str | None
) -> None:
    """The same answer for every path, whatever the body holds."""
    headers = {} if header is None else {"authorization": header.encode()}
    for body in (b"{}", b"{", b" " * (MAX_BODY + 1)):
        content = body if method == "POST" else None
        found = ask(locked, path, method, headers=headers, content=content)
        assert_error(found, 401)
        assert found.json()["error"]["code"] == "invalid_api_key"
        assert MODEL not in found.text


@pytest.mark.parametrize("path", OPEN)
def test_those_who_watch_need_no_key(locked: Running, path: str) -> None:
    assert ask(locked, path, "GET").status_code == 200


def test_the_right_key_opens(locked: Running, key: str) -> None:
    headers = {"authorization": f"Bearer {key}"}
    assert ask(locked, "/v1/models", "GET", headers=headers).status_code == 200
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    assert ask(locked, "/v1/completions", headers=headers, json=body).status_code == 200


@pytest.mark.parametrize("path", TAKE_BODIES)
@pytest.mark.parametrize("extra", [1, 200_000])
def test_bodies_over_the_limit(locked: Running, key: str, path: str, extra: int) -> None:
    body = b'{"model": "' + b"x" * (MAX_BODY + extra) + b'"}'
    assert_error(ask(locked, path, headers={"authorization": f"Bearer {key}"}, content=body), 413)


def test_bodies_over_the_limit_in_chunks(locked: Running, key: str) -> None:
    headers = {"authorization": f"Bearer {key}"}
    parts = iter([b" " * 1000] * 10)
    assert_error(ask(locked, "/v1/completions", headers=headers, content=parts), 413)


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": SECRET}]}
BAD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**CHAT, "temperature": SECRET}),
    ("/v1/chat/completions", {**CHAT, "temperature": -1}),
    ("/v1/chat/completions", {"messages": SECRET}),
    ("/v1/chat/completions", {"messages": [SECRET]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image", "url": SECRET}]}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": {"text": SECRET}}]}),
    ("/v1/chat/completions", {"messages": [{"content": SECRET}]}),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": "", "tool_calls": SECRET}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": f"{SECRET} " * 9000}]}),
    ("/v1/chat/completions", {**CHAT, "prediction": {"type": SECRET, "content": SECRET}}),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_schema", "json_schema": 5}}),
    ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": 5}}]}),
    ("/v1/chat/completions", {**CHAT, "structured_outputs": {"regex": "("}}),
    ("/v1/chat/completions", {**CHAT, "structured_outputs": {"grammar": "start: ("}}),
    ("/v1/chat/completions", {**CHAT, "user": [SECRET]}),
    ("/v1/completions", {"prompt": {"text": SECRET}}),
    ("/v1/completions", {"prompt": [SECRET, 5]}),
    ("/v1/completions", {"prompt": [[SECRET]]}),
    ("/v1/completions", {"prompt": SECRET, "suffix": SECRET}),
    ("/v1/completions", {"prompt": f"{SECRET} " * 9000}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "url": SECRET}]}]}),
    ("/v1/responses", {"input": [{"role": SECRET, "content": SECRET}]}),
    ("/v1/responses", {"input": [SECRET]}),
    ("/v1/responses", {"input": SECRET, "instructions": [SECRET]}),
    ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "a", "output": SECRET}]}),
    ("/tokenize", {"prompt": [SECRET]}),
    ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "text", "text": [SECRET]}]}]}),
    ("/detokenize", {"tokens": [SECRET]}),
]


@pytest.mark.parametrize(("path", "body"), BAD, ids=[f"{i}-{path}" for i, (path, _) in enumerate(BAD)])
@pytest.mark.parametrize("stream", [False, True])
def test_errors_and_logs_repeat_nothing(
    server: Running, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any], stream: bool
) -> None:
    streamed = {"stream": stream} if path.startswith("/v1/") else {}
    with caplog.at_level(logging.INFO):
        found = ask(server, path, json={"model": MODEL, **body, **streamed})
    assert_error(found, 400)
    assert_tells_nothing(found.text + caplog.text)


@pytest.mark.parametrize(
    "content", [SECRET, f'{{"prompt": "{SECRET}', f'{{"a": "{SECRET}", "a": 1}}', "\udcff"]
)
def test_broken_bodies_are_not_repeated(
    server: Running, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    with caplog.at_level(logging.INFO):
        found = ask(server, "/v1/completions", content=content.encode("utf-8", "surrogateescape"))
    assert_error(found, 400)
    assert_tells_nothing(found.text + caplog.text)


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_the_server_is_logged_without_texts_and_paths(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"{SECRET} in {Path.home()}/weights")

    monkeypatch.setattr(server.app.engine.llm, "prepare", broken)
    with caplog.at_level(logging.INFO):
        found = ask(server, "/v1/chat/completions", json={"model": MODEL, **CHAT, "stream": stream})
    assert_error(found, 500)
    assert "/v1/chat/completions failed: RuntimeError in broken (test_security.py:" in caplog.text
    assert_tells_nothing(found.text + "\n".join(record.getMessage() for record in caplog.records))


def assert_tells_nothing(said: str) -> None:
    for hidden in (SECRET, str(Path.home()), str(Path(__file__).parents[2]), "site-packages", "Traceback"):
        assert hidden not in said


COMPLETION = {"model": MODEL, "prompt": "x", "max_tokens": 1}


def test_a_page_of_another_site_may_not_ask(server: Running) -> None:
    preflight = {"origin": ORIGIN, "access-control-request-method": "POST"}
    for found in (
        ask(server, "/v1/chat/completions", "OPTIONS", headers=preflight),
        ask(server, "/v1/models", "GET", headers={"origin": ORIGIN}),
        ask(server, "/v1/completions", json=COMPLETION, headers={"origin": ORIGIN}),
        ask(server, "/v1/completions", json=COMPLETION, headers={"origin": "null"}),
        ask(server, "/metrics", "GET", headers={"origin": ORIGIN}),
    ):
        assert_error(found, 403)
        assert found.json()["error"]["code"] == "origin_not_allowed"
        assert not [name for name in found.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io"]
)
def test_a_name_that_was_made_to_point_here_is_refused(server: Running, host: str) -> None:
    """DNS rebinding: the page's own name, so that its requests are of the same origin."""
    for path, method in (("/v1/models", "GET"), ("/metrics", "GET"), ("/v1/completions", "POST")):
        found = ask(server, path, method, headers={"host": host, "origin": f"http://{host}"})
        assert_error(found, 403)
        assert found.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:8000", "10.1.2.3:8000"])
def test_addresses_and_localhost_are_names_of_the_server(server: Running, host: str) -> None:
    assert ask(server, "/v1/models", "GET", headers={"host": host}).status_code == 200
    own = {"host": host, "origin": f"http://{host}"}
    assert ask(server, "/v1/completions", json=COMPLETION, headers=own).status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_a_body_must_say_that_it_is_json(server: Running, kind: str) -> None:
    """The types that a browser sends without asking first."""
    found = ask(server, "/v1/completions", content=json.dumps(COMPLETION), headers={"content-type": kind})
    assert_error(found, 415)
    for usable in ("application/json", "Application/JSON; charset=utf-8"):
        found = ask(
            server, "/v1/completions", content=json.dumps(COMPLETION), headers={"content-type": usable}
        )
        assert found.status_code == 200


def test_a_browser_from_an_allowed_origin_may_ask(locked: Running) -> None:
    preflight = {"origin": ORIGIN, "access-control-request-method": "POST"}
    found = ask(locked, "/v1/chat/completions", "OPTIONS", headers=preflight)
    assert (found.status_code, found.headers["access-control-allow-origin"]) == (200, ORIGIN)
    other = ask(
        locked, "/v1/chat/completions", "OPTIONS", headers={**preflight, "origin": "https://evil.example"}
    )
    assert_error(other, 403)
    assert "access-control-allow-origin" not in other.headers
    refused = ask(locked, "/v1/chat/completions", headers={"origin": ORIGIN}, content=b"{}")
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)


def test_only_this_machine_is_listened_to_by_default() -> None:
    assert ServerSettings(MODEL).host == "127.0.0.1"


def test_errors_have_one_shape(server: Running) -> None:
    assert_error(ask(server, "/v1/nothing", "GET"), 404)
    assert_error(ask(server, "/v1/models/nothing", "GET"), 404)
    wrong = ask(server, "/v1/chat/completions", "GET")
    assert_error(wrong, 405)
    assert wrong.headers["allow"] == "POST"
