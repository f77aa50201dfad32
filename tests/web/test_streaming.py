"""Server-sent events: comments fill the silence, and a client that leaves closes the source."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from paceline.web.streaming import (
    KEEP_ALIVE,
    cancelled_by_disconnect,
    event,
    gather_limited,
    merged,
    streaming_response,
    with_keep_alive,
)

SOON_S, LIMIT_S = 0.01, 60.0
T = TypeVar("T")


def finished(run: Coroutine[Any, Any, T]) -> T:
    """Within seconds, or not at all."""

    async def limited() -> T:
        return await asyncio.wait_for(run, LIMIT_S)

    return asyncio.run(limited())


class Source:
    """Events that come when the test lets them."""

    def __init__(self, *events: bytes) -> None:
        self.events = events
        self.go_on = asyncio.Event()
        self.closed = False

    async def stream(self) -> AsyncGenerator[bytes, None]:
        try:
            for one in self.events:
                await self.go_on.wait()
                yield one
        finally:
            self.closed = True


def failure(error: Exception) -> bytes:
    return f"failed: {error}".encode()


def parts_of(
    first: bytes, events: AsyncGenerator[bytes, None], interval_s: float
) -> AsyncGenerator[bytes, None]:
    """The first event is there already; the others come from the source."""

    async def one() -> bytes:
        return first

    async def with_first() -> AsyncGenerator[bytes, None]:
        begun = asyncio.ensure_future(one())
        await begun
        async with aclosing(with_keep_alive(begun, events, interval_s, failure)) as parts:
            async for part in parts:
                yield part

    return with_first()


def test_a_silent_stream_gets_comments_until_its_next_event() -> None:
    async def run() -> list[bytes]:
        source = Source(b"second")
        got: list[bytes] = []
        async for part in parts_of(b"first", source.stream(), SOON_S):
            got.append(part)
            if got.count(KEEP_ALIVE) == 3:
                source.go_on.set()
        return got

    got = finished(run())
    assert got[0] == b"first"
    assert got[-1] == b"second"
    assert got[1:-1] == [KEEP_ALIVE] * (len(got) - 2)
    assert len(got) >= 5


def test_a_stream_that_is_never_silent_gets_none() -> None:
    async def run() -> list[bytes]:
        source = Source(b"b", b"c")
        source.go_on.set()
        return [part async for part in parts_of(b"a", source.stream(), 60)]

    assert finished(run()) == [b"a", b"b", b"c"]


def test_without_an_interval_there_are_no_comments() -> None:
    async def run() -> list[bytes]:
        source = Source(b"b")
        asyncio.get_running_loop().call_later(5 * SOON_S, source.go_on.set)
        return [part async for part in parts_of(b"a", source.stream(), 0)]

    assert finished(run()) == [b"a", b"b"]


def test_an_error_of_the_source_is_the_last_event() -> None:
    async def broken() -> AsyncGenerator[bytes, None]:
        raise ValueError("broken")
        yield b""

    async def run() -> list[bytes]:
        return [part async for part in parts_of(b"a", broken(), 60)]

    assert finished(run()) == [b"a", b"failed: broken"]


def test_a_reader_that_leaves_closes_the_source() -> None:
    async def read(parts: AsyncIterator[bytes], heard: asyncio.Event) -> None:
        async for part in parts:
            if part == KEEP_ALIVE:
                heard.set()

    async def run(source: Source) -> None:
        heard = asyncio.Event()
        reader = asyncio.ensure_future(read(parts_of(b"a", source.stream(), SOON_S), heard))
        await heard.wait()
        reader.cancel()
        await asyncio.wait([reader])

    async def both() -> bool:
        source = Source(b"never")
        await run(source)
        return source.closed

    assert finished(both())


def test_a_reader_that_leaves_between_events_closes_the_source() -> None:
    async def run() -> bool:
        source = Source(b"b", b"never")
        source.go_on.set()
        stream = source.stream()
        parts: Any = parts_of(b"a", stream, 60)
        assert [await anext(parts), await anext(parts)] == [b"a", b"b"]
        await parts.aclose()
        return source.closed

    assert finished(run())


def test_an_event_with_a_type_has_a_name() -> None:
    assert event({"id": "é"}) == 'data: {"id":"é"}\n\n'.encode()
    assert event({"type": "response.created"}).startswith(b"event: response.created\ndata: {")


class Client:
    """The receiving and sending side of a request; it leaves when the test says so."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.sent: list[Any] = []
        self.request = Request({"type": "http", "method": "POST", "headers": []}, self.receive)

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def answered(client: Client, events: AsyncGenerator[bytes, None], keep_alive_s: float) -> None:
    response = await streaming_response(client.request, events, keep_alive_s, failure)
    await response(client.request.scope, client.receive, client.send)


def test_a_response_begins_with_a_comment_while_the_first_event_is_not_there() -> None:
    async def run() -> bytes:
        source, client = Source(b"late"), Client()
        answer = asyncio.ensure_future(answered(client, source.stream(), SOON_S))
        while KEEP_ALIVE not in client.body:
            await asyncio.sleep(SOON_S)
        assert client.sent[0]["status"] == 200
        source.go_on.set()
        await answer
        return client.body

    body = finished(run())
    assert body.startswith(KEEP_ALIVE)
    assert body.endswith(b"late")


@pytest.mark.parametrize("begins", [False, True], ids=["before the response", "after it"])
def test_an_error_is_raised_before_the_response_begins_and_an_event_after(begins: bool) -> None:
    async def broken(client: Client) -> AsyncGenerator[bytes, None]:
        while begins and not client.sent:
            await asyncio.sleep(SOON_S)
        raise ValueError("broken")
        yield b""

    async def run() -> bytes:
        client = Client()
        await answered(client, broken(client), SOON_S if begins else 60)
        return client.body

    if begins:
        assert finished(run()).endswith(b"failed: broken")
    else:
        with pytest.raises(ValueError, match="broken"):
            finished(run())


def test_a_client_that_leaves_before_the_first_event_closes_the_source() -> None:
    async def run(keep_alive_s: float) -> bool:
        source, client = Source(b"never"), Client()
        answer = asyncio.ensure_future(answered(client, source.stream(), keep_alive_s))
        await asyncio.sleep(5 * SOON_S)
        client.left.set()
        await asyncio.wait([answer])
        assert keep_alive_s < 1 or isinstance(answer.exception(), ClientDisconnect)
        return source.closed

    assert finished(run(60))
    assert finished(run(SOON_S))


def test_a_response_that_cannot_begin_closes_the_source() -> None:
    async def refused(message: Any) -> None:
        raise OSError("the connection is gone")

    async def run() -> bool:
        source, client = Source(b"first", b"never"), Client()
        source.go_on.set()
        response = await streaming_response(client.request, source.stream(), 60, failure)
        with pytest.raises((OSError, ExceptionGroup, ClientDisconnect)):
            await response(client.request.scope, client.receive, refused)
        return source.closed

    assert finished(run())


async def counted(name: str, n: int, log: list[str], fails: bool = False) -> AsyncGenerator[str, None]:
    try:
        for i in range(n):
            log.append(f"{name}{i}")
            yield f"{name}{i}"
            await asyncio.sleep(0)
        if fails:
            raise ValueError(name)
    finally:
        log.append(f"{name} closed")


def test_streams_are_merged_and_none_runs_ahead() -> None:
    async def run() -> None:
        log: list[str] = []
        items: list[str] = []
        streams = [counted(name, 3, log) for name in "abc"]
        async with aclosing(merged(streams, 2)) as both:
            async for item in both:
                items.append(item)
                for _ in range(9):  # time to run ahead
                    await asyncio.sleep(0)
                mine = [entry for entry in log if entry[0] == item[0]]
                assert mine == [entry for entry in items if entry[0] == item[0]]
                assert "c0" not in items or "a closed" in log or "b closed" in log  # two at a time
        assert sorted(items) == sorted(f"{name}{i}" for name in "abc" for i in range(3))
        assert [item for item in items if item[0] == "a"] == ["a0", "a1", "a2"]

    finished(run())


def test_a_stream_that_fails_closes_those_beside_it() -> None:
    async def run() -> None:
        log: list[str] = []
        streams = [counted("a", 1, log, fails=True), counted("b", 1000, log)]
        with pytest.raises(ValueError, match="a"):
            async for _ in merged(streams, 2):
                pass
        assert {"a closed", "b closed"} <= set(log)

    finished(run())


def test_whoever_stops_reading_closes_all_streams() -> None:
    async def run() -> None:
        log: list[str] = []
        both = merged([counted("a", 9, log), counted("b", 9, log)], 2)
        await anext(both)
        await both.aclose()
        assert {"a closed", "b closed"} <= set(log)

    finished(run())


@pytest.mark.parametrize("yields", [0, 3])
def test_jobs_that_never_began_are_closed(yields: int) -> None:
    """Cancelled before the first step of their tasks, or while they wait for a slot."""

    async def job() -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        jobs = [job() for _ in range(3)]
        running = asyncio.ensure_future(gather_limited(jobs, 1))
        for _ in range(1 + yields):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert {inspect.getcoroutinestate(one) for one in jobs} == {inspect.CORO_CLOSED}

    finished(run())


class LeavingClient:
    """A request whose client leaves when told to."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    @property
    def request(self) -> Request:
        return Request({"type": "http", "method": "GET", "headers": []}, self.receive)


def test_a_client_that_leaves_cancels_the_body_once_and_nothing_after_it() -> None:
    finished(_leaving())


async def _leaving() -> None:
    client, seen = LeavingClient(), list[str]()
    asyncio.get_running_loop().call_soon(client.left.set)

    async def body() -> None:
        async with cancelled_by_disconnect(client.request):
            try:
                await asyncio.Event().wait()
            finally:
                seen.append("cancelled")
                await asyncio.sleep(0)  # cleaning up may wait
                seen.append("cleaned up")

    with pytest.raises(ClientDisconnect):
        await body()
    assert seen == ["cancelled", "cleaned up"]
    await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


def test_a_client_that_stays_changes_nothing_and_is_no_longer_watched() -> None:
    finished(_staying())


async def _staying() -> None:
    client, before = LeavingClient(), len(asyncio.all_tasks())

    async def body() -> None:
        async with cancelled_by_disconnect(client.request):
            await asyncio.sleep(0)
            raise ValueError("own")

    with pytest.raises(ValueError, match="own"):
        await body()
    client.left.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == before


def test_a_cancellation_from_outside_is_no_disconnect() -> None:
    finished(_cancelled_from_outside())


async def _cancelled_from_outside() -> None:
    client = LeavingClient()

    async def body() -> None:
        async with cancelled_by_disconnect(client.request):
            await asyncio.Event().wait()

    for leaves in (False, True):
        task = asyncio.ensure_future(body())
        await asyncio.sleep(0)
        if leaves:
            client.left.set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
