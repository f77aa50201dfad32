"""Upstreams and clients that break the protocol: each gets an answer or an end, and the gate goes on."""

import json
import socket
import socketserver
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.gate.gateway import upstream_client
from paceline.web.connections import ConnectionLimits
from support.servers import IDLE_S, until
from support.upstreams import Gate, gate, upstream

CHAT = "/v1/chat/completions"
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
CHUNK = b'data: {"id": "c", "choices": [{"index": 0, "delta": {"content": "x"}}]}\n\n'


@contextmanager
def raw_upstream(parts: Sequence[bytes | threading.Event], repeat: bytes = b"") -> Iterator[str]:
    """Sends the parts after each request, is silent until an event; then `repeat` while one listens."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                seen = b""
                while b"\r\n\r\n" not in seen:
                    seen += self.request.recv(65536)
                for part in parts:
                    if isinstance(part, bytes):
                        self.request.sendall(part)
                    else:
                        part.wait(IDLE_S)
                while repeat:
                    self.request.sendall(repeat)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def behind(url: str, **settings: Any) -> dict[str, Any]:
    one = {"name": "a", "url": url, "breaker": {"failures": 1000}, **settings}
    return {
        "upstreams": [one],
        "routes": [{"name": "all", "upstreams": {"a": 1}, "retries": {"max_attempts": 1}}],
    }


def healthy(running: Gate) -> bool:
    return httpx.get(f"{running.url}/health", timeout=IDLE_S).status_code == 200


CHUNKED = SSE.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n")
JSON = SSE.replace(b"text/event-stream", b"application/json")
BROKEN: dict[str, tuple[list[bytes], bytes, str]] = {  # parts, repeated without end, code
    "garbage": ([b"\x00\xff\xfe garbage\r\n\r\n"], b"", "upstream_disconnect"),
    "endless header": ([b"HTTP/1.1 200 OK\r\nx: "], b"a" * 65536, "upstream_disconnect"),
    "endless headers": ([b"HTTP/1.1 200 OK\r\n"], b"x-a: b\r\n" * 1000, "upstream_disconnect"),
    "half an event": ([SSE, CHUNK[:30]], b"", "upstream_disconnect"),
    "half a chunk": ([CHUNKED, b"ffff\r\ndata"], b"", "upstream_disconnect"),
    "endless event": ([SSE], b"x" * 65536, "upstream_event_too_large"),
    "endless body": ([JSON], b"[" * 65536, "upstream_answer_too_large"),
}


def test_an_upstream_that_breaks_the_protocol_is_a_502(tmp_path: Path) -> None:
    with ExitStack() as stack:
        config: dict[str, Any] = {"upstreams": [], "routes": []}
        for number, (name, (parts, repeat, _)) in enumerate(BROKEN.items()):
            one = behind(stack.enter_context(raw_upstream(parts, repeat)), name=f"u{number}")
            config["upstreams"] += one["upstreams"]
            route = {"name": f"r{number}", "match": {"model": name}, "upstreams": {f"u{number}": 1}}
            config["routes"].append({**one["routes"][0], **route})
        running = stack.enter_context(gate(tmp_path, config))
        found = {}
        for name in BROKEN:
            body = {**HELLO, "model": name, "stream": True}
            answer = httpx.post(running.url + CHAT, json=body, timeout=IDLE_S)
            found[name] = (answer.status_code, answer.json()["error"]["code"])
            assert healthy(running)
        assert found == {name: (502, code) for name, (_, _, code) in BROKEN.items()}
        states = running.app.client.states.values()
        assert until(lambda: not any(state.in_flight for state in states), IDLE_S)


def test_an_answer_that_is_no_json_is_the_upstreams_own(tmp_path: Path) -> None:
    body = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 5\r\n\r\n{oops"
    with raw_upstream([body]) as url, gate(tmp_path, behind(url)) as running:
        assert httpx.post(running.url + CHAT, json=HELLO).text == "{oops"


def test_a_silent_stream_gets_comments_and_another_upstream_may_still_take_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_client, "SILENCE_S", 0.02)
    ended = threading.Event()
    with raw_upstream([SSE, ended]) as silent, upstream("b") as other:
        config = behind(silent)
        config["upstreams"].append({"name": "b", "url": other.url})
        config["routes"][0] |= {"fallback": ["b"], "retries": {"backoff_s": 0.0}}
        asked = {**HELLO, "stream": True}
        with gate(tmp_path, config) as run, httpx.stream("POST", run.url + CHAT, json=asked) as answer:
            text = ""
            for part in answer.iter_text():
                text += part
                if text.count(": keep-alive") == 2:
                    ended.set()
    assert text.startswith(": keep-alive\n\n: keep-alive\n\n")
    assert '"b "' in text
    assert text.rstrip().endswith("[DONE]")


def raw(url: str, head: bytes, body: bytes = b"", slowly: bool = False) -> bytes:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=IDLE_S) as connection, suppress(ConnectionError):
        connection.sendall(head)
        connection.sendall(body)
        if not slowly:
            connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as answer:
            return next(line for line in answer if b" 100 " not in line and line.startswith(b"HTTP"))
    return b""


def post(length: int, more: bytes = b"") -> bytes:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()
    return head + more + f"content-length: {length}\r\n\r\n".encode()


DEEP = b'{"model": "m", "messages": ' + b"[" * 4_000_000
WIDE = b'{"model": "m", "messages": [' + b"[]," * 2_000_000 + b"[]]}"


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        (post(2, b"x-long: " + b"a" * 200_000 + b"\r\n"), b"{}", 431),
        (post(2, b"".join(b"x-%d: a\r\n" % i for i in range(5000))), b"{}", 431),
        (post(len(DEEP)), DEEP, 400),
        (post(len(WIDE)), WIDE, 400),
        (post(2, b"origin: http://evil.example\r\n"), b"{}", 403),
        (post(2).replace(b"localhost", b"evil.example"), b"{}", 403),
        (post(2).replace(b"application/json", b"text/plain"), b"{}", 415),
    ],
    ids=["long header", "many headers", "deep body", "wide body", "origin", "host", "form"],
)
def test_a_client_that_attacks_is_refused_and_nothing_reaches_the_upstream(
    hidden: tuple[Gate, list[dict[str, Any]]], head: bytes, body: bytes, status: int
) -> None:
    running, requests = hidden
    answer = raw(running.url, head, body)
    assert answer.startswith(b"HTTP/1.1 %d" % status), answer[:200]
    assert healthy(running)
    assert not requests


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gate, list[dict[str, Any]]]]:
    with upstream("a") as one, gate(tmp_path_factory.mktemp("gate"), behind(one.url)) as running:
        yield running, one.requests


def test_a_client_that_does_not_end_its_body_is_refused(tmp_path: Path) -> None:
    limits = ConnectionLimits(body_timeout_s=0.2)
    with upstream("a") as one, gate(tmp_path, behind(one.url), connections=limits) as running:
        answer = raw(running.url, post(100), b'{"model"', slowly=True)
        assert answer.startswith(b"HTTP/1.1 408"), answer[:200]
        assert healthy(running)
        assert not one.requests


def test_clients_that_leave_at_any_moment_leave_nothing_behind(tmp_path: Path) -> None:
    body = json.dumps({**HELLO, "stream": True}).encode()
    whole = post(len(body)) + body
    with upstream("a") as one, gate(tmp_path, behind(one.url)) as running:
        one.behaviour = "endless"
        host, _, port = running.url.removeprefix("http://").partition(":")
        for sent in (0, 10, len(whole) // 2, len(whole) - 1, len(whole)):
            for read in (0, 1, 300) if sent == len(whole) else (0,):
                with socket.create_connection((host, int(port)), timeout=IDLE_S) as connection:
                    connection.sendall(whole[:sent])
                    if read:
                        assert connection.recv(read)
        assert until(lambda: not running.app._in_flight.total(), IDLE_S)
        assert until(lambda: running.app.client.states["a"].in_flight == 0, IDLE_S)
        one.behaviour = "answer"
        assert httpx.post(running.url + CHAT, json=HELLO).status_code == 200
