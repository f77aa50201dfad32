"""Requests to upstreams: a pooled HTTP client, with the circuit breaker and the load of each upstream."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy

from paceline.gate.gateway.circuit_breaker import CircuitBreaker, Clock
from paceline.gate.gateway.config import UpstreamConfig
from paceline.gate.leg_recorder import MAX_EVENT
from paceline.gate.upstream import failure_code, http_session, read_whole
from paceline.web.streaming import MEDIA_TYPE

log = logging.getLogger("paceline.gate")

Headers = Iterable[tuple[str, str]]

SILENCE_S: Final = 15.0  # of an upstream's stream, after which a client gets a comment
RETRYABLE: Final = frozenset({408, 429, 500, 502, 503, 504})

# Of one connection only (RFC 9110, 7.6.1).
HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_REQUEST_ONLY: Final = frozenset(
    {"host", "content-length", "accept-encoding", "expect", "cookie", "origin", "traceparent", "tracestate"}
)
_RESPONSE_ONLY: Final = frozenset({"content-length", "date", "server", "x-request-id"})


class UpstreamFailure(Exception):
    """No usable answer. code: "connect", "timeout", "disconnect", "http_503", ...; answer: its own."""

    def __init__(self, code: str, answer: "WholeAnswer | None" = None) -> None:
        super().__init__(code)
        self.code, self.answer = code, answer


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


def end_to_end(headers: Mapping[str, str], dropped: frozenset[str]) -> list[tuple[str, str]]:
    """The headers that go on to the next hop."""
    listed = {name.strip().lower() for name in headers.get("connection", "").split(",")}
    without = HOP_BY_HOP | dropped | listed
    return [(name, value) for name, value in headers.items() if name.lower() not in without]


def request_headers(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    return end_to_end(headers, _REQUEST_ONLY)


def response_headers(headers: CIMultiDictProxy[str]) -> list[tuple[str, str]]:
    return end_to_end(headers, _RESPONSE_ONLY)


class EventSplitter:
    """Passes complete events on and holds the rest: a stream that is cut never ends within an event."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> bytes:
        if not self._rest and data.endswith(b"\n\n"):
            return data
        data = self._rest + data
        bare, full = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
        end = 0 if bare == full == -1 else max(bare + 2, full + 4 if full >= 0 else 0)
        if len(data) - end > MAX_EVENT:
            raise UpstreamFailure("event_too_large")
        self._rest = data[end:]
        return data[:end]

    @property
    def complete(self) -> bool:
        return not self._rest.strip()


class Answer:
    """An upstream's answer whose headers have come."""

    def __init__(self, response: aiohttp.ClientResponse, idle_s: float, begin_by: float) -> None:
        self._response, self._idle_s, self._begin_by = response, idle_s, begin_by
        self.complete = False  # its last event has come, whatever becomes of the connection
        self.status = response.status
        self.streams = response.status == 200 and response.content_type == MEDIA_TYPE
        self.headers = tuple(response_headers(response.headers))

    async def whole(self, deadline: float | None) -> WholeAnswer:
        async with asyncio.timeout_at(deadline):
            body = await read_whole(self._response)
        return WholeAnswer(self.status, self.headers, body)

    async def raw(self, deadline: float | None) -> AsyncGenerator[bytes, None]:
        """The bytes as they come; b"" after each SILENCE_S without any."""
        loop, content, by = asyncio.get_running_loop(), self._response.content, self._begin_by
        while True:
            end = by if deadline is None else min(by, deadline)
            try:
                async with asyncio.timeout_at(min(end, loop.time() + SILENCE_S)):
                    data = await content.readany()  # loses nothing when it is cancelled
            except TimeoutError:
                if loop.time() >= end:
                    raise
                yield b""
                continue
            if not data:
                return
            yield data
            by = loop.time() + self._idle_s

    def cut(self) -> None:
        """Ends the answer at once: reading from it fails."""
        self._response.close()


class UpstreamState:
    """One upstream as it is now: its settings, its breaker, its load."""

    def __init__(self, config: UpstreamConfig, clock: Clock) -> None:
        self.breaker = CircuitBreaker(config.breaker.failures, config.breaker.open_s, clock)
        self.in_flight = 0
        self.configure(config)

    def configure(self, config: UpstreamConfig) -> None:
        """New settings; breaker and load stay."""
        self.config, self.upstream = config, config.upstream()
        self.breaker.max_failures, self.breaker.open_s = config.breaker.failures, config.breaker.open_s
        self.timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=config.connect_timeout_s, sock_read=None
        )

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def available(self) -> bool:
        most = self.config.max_concurrent
        return self.breaker.available and (most is None or self.in_flight < most)


class UpstreamClient:
    """Lives in one event loop: `start` and `close` are called there."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._states: dict[str, UpstreamState] = {}
        self._session: aiohttp.ClientSession | None = None

    def start(self) -> None:
        self._session = http_session()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """For requests apart from breakers and loads, which are for users' requests."""
        assert self._session is not None
        return self._session

    @property
    def states(self) -> Mapping[str, UpstreamState]:
        return self._states

    def configure(self, configs: Mapping[str, UpstreamConfig]) -> None:
        for name in self._states.keys() - configs.keys():
            del self._states[name]
        for name, config in configs.items():
            if name not in self._states:
                self._states[name] = UpstreamState(config, self._clock)
            elif self._states[name].config != config:
                self._states[name].configure(config)

    @asynccontextmanager
    async def send(
        self,
        state: UpstreamState,
        method: str,
        path: str,
        headers: Headers,
        body: bytes | None,
        deadline: float | None,
    ) -> AsyncIterator[Answer]:
        """One request. Every error of the upstream, in the body of the block too, is an UpstreamFailure."""
        if not state.breaker.allow():
            raise UpstreamFailure("breaker_open")
        state.in_flight += 1
        reported, answer = False, None
        try:
            begin_by = asyncio.get_running_loop().time() + state.config.first_byte_timeout_s
            async with asyncio.timeout_at(begin_by if deadline is None else min(begin_by, deadline)):
                response = await self.session.request(
                    method,
                    state.upstream.endpoint(path),
                    data=body,
                    headers=_sent(headers, state.upstream.headers),
                    timeout=state.timeout,
                    allow_redirects=False,
                )
            answer = Answer(response, state.config.idle_timeout_s, begin_by)
            try:
                yield answer
            finally:
                # A connection whose answer was read to its end has gone back to the pool; any other is cut.
                response.close()
            reported = True
            if response.status >= 500:
                state.breaker.failure()
            else:
                state.breaker.success()
        except UpstreamFailure as failure:
            reported = True
            answered = failure.answer is not None and failure.answer.status < 500
            (state.breaker.success if answered else state.breaker.failure)()
            raise
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            reported = True
            state.breaker.failure()
            raise UpstreamFailure(failure_code(error)) from None
        finally:
            state.in_flight -= 1
            if not reported:  # the client left
                done = answer is not None and answer.complete
                (state.breaker.success if done else state.breaker.neither)()


def _sent(headers: Headers, own: Mapping[str, str]) -> "CIMultiDict[str]":
    sent = CIMultiDict(headers)
    for name, value in own.items():
        sent[name] = value
    return sent


async def listed_models(client: UpstreamClient, state: UpstreamState, headers: Headers) -> list[Any]:
    """The entries of an upstream's GET /v1/models; none, if it cannot tell."""
    deadline = asyncio.get_running_loop().time() + state.config.connect_timeout_s
    try:
        async with client.send(state, "GET", "/v1/models", headers, None, deadline) as answer:
            whole = await answer.whole(deadline)
        data = json.loads(whole.body)["data"] if whole.status == 200 else []
        return [entry for entry in data if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    except (UpstreamFailure, ValueError, KeyError, TypeError):
        return []
