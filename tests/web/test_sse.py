"""Server-sent events: comments fill the silence, and a client that leaves closes the source."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

from paceline.web.sse import KEEP_ALIVE, event, with_keep_alive

SOON_S, LIMIT_S = 0.01, 20.0
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


def test_a_silent_stream_gets_comments_until_its_next_event() -> None:
    async def run() -> list[bytes]:
        source = Source(b"second")
        got: list[bytes] = []
        async for part in with_keep_alive(b"first", source.stream(), SOON_S):
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
        return [part async for part in with_keep_alive(b"a", source.stream(), 60)]

    assert finished(run()) == [b"a", b"b", b"c"]


def test_without_an_interval_there_are_no_comments() -> None:
    async def run() -> list[bytes]:
        source = Source(b"b")
        asyncio.get_running_loop().call_later(5 * SOON_S, source.go_on.set)
        return [part async for part in with_keep_alive(b"a", source.stream(), 0)]

    assert finished(run()) == [b"a", b"b"]


def test_an_error_of_the_source_comes_through() -> None:
    async def broken() -> AsyncGenerator[bytes, None]:
        raise ValueError("broken")
        yield b""

    async def run() -> str:
        try:
            async for _ in with_keep_alive(b"a", broken(), 60):
                pass
        except ValueError as error:
            return str(error)
        return ""

    assert finished(run()) == "broken"


def test_a_reader_that_leaves_closes_the_source() -> None:
    async def read(parts: AsyncIterator[bytes], heard: asyncio.Event) -> None:
        async for part in parts:
            if part == KEEP_ALIVE:
                heard.set()

    async def run(source: Source) -> None:
        heard = asyncio.Event()
        reader = asyncio.ensure_future(read(with_keep_alive(b"a", source.stream(), SOON_S), heard))
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
        parts: Any = with_keep_alive(b"a", stream, 60)
        assert [await anext(parts), await anext(parts)] == [b"a", b"b"]
        await parts.aclose()
        return source.closed

    assert finished(run())


def test_an_event_with_a_type_has_a_name() -> None:
    assert event({"id": "é"}) == 'data: {"id":"é"}\n\n'.encode()
    assert event({"type": "response.created"}).startswith(b"event: response.created\ndata: {")
