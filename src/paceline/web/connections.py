"""HTTP/1.1 connections within limits: uvicorn's protocol, which has none for headers, slow or silent clients.

A connection waits for its client (silent, sending, idle between two requests) or its client waits for the
server. At the bound on connections the one that has waited longest for its client makes room for a new one.
"""

import asyncio
import json
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from paceline.config import require, require_min, require_whole
from paceline.web.api_errors import CONNECTIONS, ApiError
from paceline.web.request_id import HEADER as REQUEST_ID

MAX_HEADER_BYTES: Final = 65_536  # of a request line with all headers; also between two parts of a body
MAX_HEADERS: Final = 100
MAX_PIPELINED: Final = 8  # requests of a connection that wait for the answer to one before them
LINGER_S: Final = 2.0  # a client that still sends gets time to read the error
PROBE_S: Final = (0.05, 1.0)  # after the first probe of a half-closed connection, and between further ones
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

Refused = Callable[[ApiError], None]


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds on what clients hold without sending a request. Times are seconds."""

    max_connections: int = 1000
    header_timeout_s: float = 20.0  # from the connection, or a request's first byte, to its last header
    body_timeout_s: float = 60.0  # from the last header to the end of the body
    idle_timeout_s: float = 15.0  # between two requests
    write_timeout_s: float = 60.0  # for a client that does not read

    def __post_init__(self) -> None:
        require_whole(self, "max_connections")
        require_min(self, max_connections=1)
        for name in ("header_timeout_s", "body_timeout_s", "idle_timeout_s", "write_timeout_s"):
            require(lambda x: x > 0, name, getattr(self, name), "more than 0 seconds")


class Connections:
    """The open connections of one server. `protocol` is what uvicorn calls for each."""

    def __init__(self, limits: ConnectionLimits | None = None, refused: Refused = lambda error: None) -> None:
        self.limits = limits or ConnectionLimits()
        self.refused = refused  # told of every request that ended before the application saw it
        self._open: set[LimitedHttp] = set()
        self._waiting: dict[LimitedHttp, None] = {}  # for their clients; oldest first

    def protocol(self, **arguments: Any) -> "LimitedHttp":
        return LimitedHttp(self, **arguments)

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: "LimitedHttp") -> bool:
        """False: there are too many, and all of them have a request in progress."""
        if len(self._open) >= self.limits.max_connections:
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                return False
            self.remove(oldest)
            oldest.transport.close()
        self._open.add(connection)
        return True

    def remove(self, connection: "LimitedHttp") -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def set_waiting(self, connection: "LimitedHttp", waiting: bool) -> None:
        self._waiting.pop(connection, None)
        if waiting and connection in self._open:
            self._waiting[connection] = None


class LimitedHttp(HttpToolsProtocol):
    """One connection. The parser gets a bounded number of bytes that complete neither a head nor a body."""

    def __init__(self, shared: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._shared, self._limits = shared, shared.limits
        self._timer: asyncio.TimerHandle | None = None  # ends a wait for the client
        self._write_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self._begun = False  # bytes of a request were read
        self._unparsed = 0  # bytes since the head began, or since the last part of the body
        self._advanced = False
        self._header_count = 0
        self._problem: ApiError | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._shared.add(self):
            self._refuse(
                ApiError(
                    503,
                    "too many connections: try again later",
                    "server_error",
                    code="too_many_connections",
                    retry_after=1,
                    refusal=CONNECTIONS,
                )
            )
            return
        self._wait(self._limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.remove(self)
        for timer in (self._timer, self._write_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    @property
    def _answering(self) -> bool:
        """A request has been handed to the application, and its answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    # Sizes

    def data_received(self, data: bytes) -> None:
        room = MAX_HEADER_BYTES - self._unparsed
        for part in (data[:room], data[room:]):
            if not part or self._refused or self.transport.is_closing():
                return
            self._advanced = False
            super().data_received(part)
            self._unparsed = 0 if self._advanced else self._unparsed + len(part)
            if self._unparsed >= MAX_HEADER_BYTES and not self._refused:
                self._refuse(_headers_too_large(f"{MAX_HEADER_BYTES:,} bytes"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._begun, self._header_count = True, True, 0
        if not self._answering:
            self._wait(self._limits.header_timeout_s)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer: nobody reads it
        self._header_count += 1
        if self._header_count > MAX_HEADERS:
            self._problem = _headers_too_large(f"{MAX_HEADERS} of them")
            raise ValueError("too many headers")  # ends the parser
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests at once")  # ends the parser; those before are answered
        self._in_head, self._advanced = False, True
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._advanced = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._advanced, self._begun = True, False
        super().on_message_complete()
        if self._answering:
            self._shared.set_waiting(self, False)
        else:  # the answer was complete before the body
            self._wait(self._limits.idle_timeout_s)

    def handle_websocket_upgrade(self) -> None:
        """The connection counts until it is closed; its application limits what its client may do."""
        self._stop_timer()
        self._shared.set_waiting(self, False)
        super().handle_websocket_upgrade()
        protocol = self.transport.get_protocol()
        if isinstance(protocol, LimitedWebSocket):
            protocol.on_lost = partial(self._shared.remove, self)

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: any client could fill the log. The request is answered as if it asked for no upgrade."""

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._problem or ApiError(400, "the request is not HTTP/1.1"))

    def _refuse(self, error: ApiError) -> None:
        """Answers without the application; what the client still sends is read and dropped for a while."""
        self._refused = True
        self._shared.refused(error)
        if self._answering:
            if not self.cycle.more_body or self.cycle.response_started or self.pipeline:
                self.cycle.keep_alive = False  # the answer in progress is the last one
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = json.dumps(error.body).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            REQUEST_ID: f"req-{secrets.token_hex(12)}",
            **error.headers,
        }
        lines = [*self.server_state.default_headers, *((k.encode(), v.encode()) for k, v in headers.items())]
        head = b"".join(b"%b: %b\r\n" % line for line in lines)
        self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._stop_timer()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)

    # Times

    def _wait(self, seconds: float) -> None:
        """For the client to send something."""
        self._stop_timer()
        self._shared.set_waiting(self, True)
        self._timer = self.loop.call_later(seconds, self._too_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._in_head and self._begun:
            self._refuse(ApiError(408, "the headers did not arrive in time", "timeout_error", code="timeout"))
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or self.pipeline:
            return
        self._unset_keepalive_if_required()  # uvicorn's timer, which any byte stops for good
        begun = self._in_head and self._begun  # the next request
        self._wait(self._limits.header_timeout_s if begun else self._limits.idle_timeout_s)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # Half-closed connections

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client may end its side once its request is complete, and still gets the answer.

        True keeps the connection open. The same bytes come from a client that is gone: `_probe` tells.
        """
        cycle = self.cycle
        if self._refused or not self._answering or cycle.more_body:
            return False
        cycle.keep_alive = False
        self._stop_timer()
        self._probe(*PROBE_S)
        return True

    def _probe(self, delay: float, next_delay: float) -> None:
        """Sends an interim response, which clients skip (RFC 9110, 15.2); a closed socket sends a reset."""
        cycle = self.cycle
        if cycle.response_complete or self.transport.is_closing():
            return
        if self._socket_error():
            self.transport.abort()
            return
        interim = not self.pipeline and not cycle.response_started and cycle.scope["http_version"] == "1.1"
        if interim:
            self.transport.write(CONTINUE)
        self._probe_timer = self.loop.call_later(delay, self._probe, next_delay, next_delay)

    def _socket_error(self) -> bool:
        found = self.transport.get_extra_info("socket")
        with suppress(OSError):
            return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        return True


class LimitedWebSocket(WebSocketsSansIOProtocol):
    """A connection that has become a WebSocket."""

    on_lost: Callable[[], None] | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self.on_lost is not None:
            self.on_lost()
        super().connection_lost(exc)


def _headers_too_large(limit: str) -> ApiError:
    return ApiError(431, f"the headers are too large: at most {limit} are read", code="headers_too_large")
