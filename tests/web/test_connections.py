"""Connections over real sockets: sizes, times and numbers are bounded, and answers reach those who wait."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from paceline.errors import SettingError
from paceline.web.api_errors import ApiError, with_error_responses
from paceline.web.connections import (
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    ConnectionLimits,
    Connections,
)
from paceline.web.request_body import INLINE_BYTES, LimitedBodies
from paceline.web.streaming import cancelled_by_disconnect

pytestmark = pytest.mark.slow  # real connections and waits: left out of make quick

PATIENCE_S = 60
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /size HTTP/1.1\r\nHost: localhost\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass
class Server:
    """A server of a few paths, and what it was told."""

    port: int
    connections: Connections
    refused: list[ApiError]
    answer: threading.Event = field(default_factory=threading.Event)  # /slow waits for it
    slow: list[str] = field(default_factory=list)  # how /slow and /endless began and ended

    def connect(self) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port))
        made.settimeout(PATIENCE_S)
        return made

    @property
    def healthy(self) -> bool:
        return httpx.get(f"http://127.0.0.1:{self.port}/health", trust_env=False).status_code == 200


@contextmanager
def serving(loop: str = "auto", max_bodies: int = 1 << 20, **limits: Any) -> Iterator[Server]:
    refused: list[ApiError] = []
    connections = Connections(ConnectionLimits(**limits), refused.append)
    here = Server(0, connections, refused)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def size(request: Request) -> Response:
        return JSONResponse({"bytes": len(await request.body())})

    async def names(request: Request) -> Response:
        await request.body()
        return JSONResponse(sorted(name.decode() for name, _ in request.scope["headers"]))

    async def slow(request: Request) -> Response:
        here.slow.append("begun")
        try:
            async with cancelled_by_disconnect(request):
                await asyncio.to_thread(here.answer.wait, PATIENCE_S)
        except ClientDisconnect:
            here.slow.append("left")
            raise
        return JSONResponse({"slow": True})

    async def endless(request: Request) -> Response:
        here.slow.append("begun")

        async def parts() -> Any:
            while True:
                yield b"x" * 100_000
                await asyncio.sleep(0)  # else nothing else runs once nobody reads

        return StreamingResponse(parts())

    methods = {"/health": health, "/size": size, "/slow": slow, "/names": names, "/endless": endless}
    routes = [
        Route(path, with_error_responses(call), methods=["GET", "POST"]) for path, call in methods.items()
    ]
    bodies = Middleware(
        LimitedBodies,
        timeout_s=connections.limits.body_timeout_s,
        max_bytes=max_bodies,
        after_large=lambda: None,
    )
    server = uvicorn.Server(
        uvicorn.Config(
            Starlette(routes=routes, middleware=[bodies]),
            port=0,
            http=connections.protocol,  # type: ignore[arg-type]
            loop=loop,
            log_level="critical",
            timeout_graceful_shutdown=1,
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    here.port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield here
    finally:
        here.answer.set()
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def until(holds: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


def status(connection: socket.socket) -> int:
    return int(read(connection).split(b" ", 2)[1] or 0)


def read(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    said = b""
    while part := connection.recv(65536):
        said += part
    return said


def send_all(connection: socket.socket, *parts: bytes) -> None:
    """The server may hang up in the middle."""
    try:
        for part in parts:
            connection.sendall(part)
    except OSError:
        pass


def assert_refused(said: bytes, expected: int) -> None:
    head, _, body = said.partition(b"\r\n\r\n")
    assert int(head.split(b" ", 2)[1]) == expected
    assert b"\r\nx-request-id: req-" in head
    assert json.loads(body)["error"].keys() == {"message", "type", "param", "code"}


# Sizes


@pytest.mark.parametrize(
    "head",
    [
        GET + b"X: " + b"a" * MAX_HEADER_BYTES,
        GET + b"".join(b"X-%d: %b\r\n" % (i, b"a" * 1000) for i in range(80)) + b"\r\n",
        GET + b"X: \r\n" * (MAX_HEADERS + 1) + b"\r\n",
        b"GET /" + b"a" * MAX_HEADER_BYTES,
        GET + b"X" * MAX_HEADER_BYTES,
    ],
    ids=["one header", "many bytes", "many headers", "the path", "a name"],
)
def test_headers_that_are_too_large_get_a_431(server: Server, head: bytes) -> None:
    before = len(server.refused)
    with server.connect() as connection:
        send_all(connection, head)
        assert_refused(read(connection), 431)
    assert [error.status for error in server.refused[before:]] == [431]
    assert server.healthy


def test_headers_within_the_limits_are_read(server: Server) -> None:
    lines = b"".join(b"X-%d: %b\r\n" % (i, b"a" * 600) for i in range(MAX_HEADERS - 2))
    with server.connect() as connection:
        for part in (GET, lines, b"Connection: close\r\n\r\n"):
            connection.sendall(part)
            time.sleep(0.01)
        assert status(connection) == 200


def test_what_is_sent_beyond_the_limit_is_not_held(server: Server) -> None:
    """The parser is given nothing more, so that 60 MB cost neither memory nor time."""
    with server.connect() as connection:
        send_all(connection, GET + b"X: ", *[b"a" * 1_000_000] * 60)
    assert server.healthy
    until(lambda: len(server.connections) == 0)


@pytest.mark.parametrize(
    "end", [b"X: " + b"a" * 1_000_000, b"".join(b"X-%d: 1\r\n" % i for i in range(100_000))]
)
def test_trailers_are_bounded_like_headers(server: Server, end: bytes) -> None:
    with server.connect() as connection:
        send_all(connection, POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n", end)
        assert_refused(read(connection), 431)


def test_a_trailer_is_no_header(server: Server) -> None:
    with server.connect() as connection:
        head = b"POST /names HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        connection.sendall(head + b"1\r\nx\r\n0\r\nAuthorization: Bearer x\r\n\r\n")
        names = read(connection).rpartition(b"\r\n\r\n")[2]
    assert json.loads(names) == ["connection", "transfer-encoding"]


def test_a_request_that_is_not_http_gets_a_400_in_the_usual_shape(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(b"HELLO\r\n\r\n")
        assert_refused(read(connection), 400)


def test_several_requests_at_once_are_answered_in_order(server: Server) -> None:
    with server.connect() as connection:
        body = POST + b"Content-Length: 3\r\n\r\nabc"
        connection.sendall(GET + b"\r\n" + body + GET + b"Connection: close\r\n\r\n")
        said = read(connection)
    assert said.count(b"HTTP/1.1 200 OK") == 3
    assert said.index(b'{"bytes":3}') < said.rindex(b'{"status":"ok"}')


def test_a_flood_of_requests_on_one_connection_is_cut_off(server: Server) -> None:
    """The first ones are answered; nothing is held of the others."""
    with server.connect() as connection:
        send_all(connection, *[(GET + b"\r\n") * 10_000] * 20)
        said = b""
        with suppress(ConnectionResetError):
            while part := connection.recv(65536):
                said += part
    assert said.count(b"HTTP/1.1 200 OK") <= 1 + MAX_PIPELINED
    assert server.healthy
    until(lambda: len(server.connections) == 0)


def test_bodies_in_memory_have_a_limit_together() -> None:
    large = 2 * INLINE_BYTES
    with serving(max_bodies=large) as server:
        url = f"http://127.0.0.1:{server.port}/size"
        assert httpx.post(url, content=b"x" * large, trust_env=False).status_code == 200
        with server.connect() as other:
            other.sendall(POST + b"Content-Length: %d\r\n\r\n" % large + b"x" * (large - 1))
            client = httpx.Client(trust_env=False)
            until(lambda: client.post(url, content=b"x" * (INLINE_BYTES + 1)).status_code == 429)
            assert client.post(url, content=b"x" * 500).status_code == 200  # a small one is not refused
        until(lambda: client.post(url, content=b"x" * large).status_code == 200)


# Times


@pytest.mark.parametrize("sent", [GET, GET + b"\r\n" + GET])
def test_headers_that_never_end_get_a_408(sent: bytes) -> None:
    with serving(header_timeout_s=1.0) as server, server.connect() as connection:
        connection.sendall(sent)
        said = read(connection)
    assert_refused(said[said.rindex(b"HTTP/1.1 ") :], 408)


def test_a_byte_now_and_then_does_not_extend_the_time_for_headers() -> None:
    with serving(header_timeout_s=0.5) as server, server.connect() as connection:
        for byte in GET + b"X: " + b"a" * 1000:
            try:
                connection.sendall(bytes([byte]))
            except OSError:
                break
            time.sleep(0.02)
        else:
            pytest.fail("all bytes were read")
        assert [error.status for error in server.refused] == [408]


def test_a_silent_connection_is_closed() -> None:
    with serving(header_timeout_s=0.2) as server, server.connect() as connection:
        assert read(connection) == b""
        assert server.refused == []


def test_an_idle_connection_is_closed() -> None:
    with serving(idle_timeout_s=0.2) as server, server.connect() as connection:
        connection.sendall(GET + b"\r\n")
        assert status(connection) == 200


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 9\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n1\r\n"]
)
def test_a_body_that_never_ends_gets_a_408(framing: bytes) -> None:
    with serving(body_timeout_s=0.2, idle_timeout_s=0.2) as server, server.connect() as connection:
        connection.sendall(POST + framing + b"x")
        assert status(connection) == 408


def test_a_body_that_nobody_reads_does_not_hold_the_connection() -> None:
    """The answer came before the body had ended."""
    with serving(idle_timeout_s=0.5) as server, server.connect() as connection:
        connection.sendall(b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        for _ in range(1000):
            try:
                connection.sendall(b"x")
            except OSError:
                break
            time.sleep(0.02)
        else:
            pytest.fail("the connection stayed open")


@pytest.mark.slow
def test_a_client_that_does_not_read_is_cut_off() -> None:
    with serving(write_timeout_s=0.3) as server, server.connect() as connection:
        connection.sendall(b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: server.slow == ["begun"])
        until(lambda: len(server.connections) == 0)


# Number


def test_silent_connections_make_room_for_others() -> None:
    with serving(max_connections=8) as server:
        silent = [server.connect() for _ in range(20)]
        half = [server.connect() for _ in range(20)]
        for connection in half:
            send_all(connection, GET)
        assert server.healthy
        assert len(server.connections) <= 8
        for connection in silent + half:
            connection.close()


def test_those_who_wait_for_an_answer_are_not_pushed_out() -> None:
    with serving(max_connections=2) as server:
        waiting = [server.connect() for _ in range(2)]
        for connection in waiting:
            connection.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        until(lambda: len(server.slow) == 2)
        with server.connect() as late:
            assert_refused(read(late), 503)
        server.answer.set()
        assert [status(connection) for connection in waiting] == [200, 200]
        assert server.refused[0].refusal == "connections"


# Half-closed connections


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_a_client_that_has_ended_its_side_gets_its_answer(loop: str, version: bytes) -> None:
    with serving(loop) as server, server.connect() as connection:
        connection.sendall(b"GET /slow HTTP/%b\r\nHost: localhost\r\n\r\n" % version)
        connection.shutdown(socket.SHUT_WR)
        until(lambda: server.slow == ["begun"])
        if version == b"1.1":
            probe = connection.recv(len(CONTINUE), socket.MSG_WAITALL)
        else:
            probe = b""
            time.sleep(0.2)  # several probes
        server.answer.set()
        interim, _, answer = (probe + read(connection)).rpartition(b"HTTP/1.1 ")
        assert answer.startswith(b"200 OK")
        assert answer.endswith(b'{"slow":true}')
        assert interim.replace(CONTINUE, b"") == b""
        assert (interim == b"") == (version == b"1.0")
    assert server.slow == ["begun"]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_client_that_has_left_is_noticed(loop: str) -> None:
    with serving(loop) as server:
        with server.connect() as connection:
            connection.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
            until(lambda: server.slow == ["begun"])
        until(lambda: server.slow == ["begun", "left"])
        assert not server.answer.is_set()


def test_a_body_that_was_cut_off_ends_the_request(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(POST + b"Content-Length: 100\r\n\r\nabc")
        connection.shutdown(socket.SHUT_WR)
        assert read(connection) == b""


# Settings


@pytest.mark.parametrize(
    ("setting", "value"), [("max_connections", 0), ("max_connections", 1.5), ("idle_timeout_s", 0.0)]
)
def test_a_limit_that_cannot_be_used_is_named(setting: str, value: Any) -> None:
    with pytest.raises(SettingError, match=setting):
        ConnectionLimits(**{setting: value})
