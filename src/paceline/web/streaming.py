"""Server-sent events that keep their connection alive, and tasks that end with it."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from inspect import CORO_CREATED, getcoroutinestate
from types import TracebackType
from typing import Any, Final, TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

MEDIA_TYPE: Final = "text/event-stream"
DONE: Final = b"data: [DONE]\n\n"  # the last event of OpenAI's completion streams
KEEP_ALIVE: Final = b": keep-alive\n\n"  # a comment: clients skip it, proxies see bytes

T = TypeVar("T")
Events = AsyncGenerator[bytes, None]


def event(data: dict[str, Any]) -> bytes:
    """One event; data with a `type` is a named event, as in OpenAI's Responses API."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


async def streaming_response(
    http: Request, events: Events, keep_alive_s: float, failure: Callable[[Exception], bytes]
) -> Response:
    """A stream of events, with a comment for every interval in which none came. 0: no comments.

    An error before the first event is raised, so that it gets its own status, unless the interval ends before
    it: by then the response has begun. A later error becomes the last bytes of the stream, by `failure`.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        async with cancelled_by_disconnect(http):
            await asyncio.wait([first], timeout=keep_alive_s or None)
        if first.done():
            first.result()
    except BaseException:
        await _close(first, events)
        raise
    return _EventResponse(first, events, keep_alive_s, failure)


class _EventResponse(StreamingResponse):
    """Closes its events however it ends, even before the first of them is sent."""

    def __init__(
        self,
        first: asyncio.Task[bytes],
        events: Events,
        keep_alive_s: float,
        failure: Callable[[Exception], bytes],
    ) -> None:
        self._first, self._events = first, events
        self._parts = with_keep_alive(first, events, keep_alive_s, failure)
        super().__init__(self._parts, media_type=MEDIA_TYPE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            with anyio.CancelScope(shield=True):
                await self._parts.aclose()
            await _close(self._first, self._events)


async def with_keep_alive(
    first: asyncio.Task[bytes], events: Events, interval_s: float, failure: Callable[[Exception], bytes]
) -> Events:
    """The events from `first` on. Each is awaited in a task: a timeout leaves the generator where it is."""
    waiting = first
    try:
        if not waiting.done():
            yield KEEP_ALIVE
        while True:
            while not (await asyncio.wait([waiting], timeout=interval_s or None))[0]:
                yield KEEP_ALIVE
            try:
                part = waiting.result()
            except StopAsyncIteration:
                return
            except Exception as error:
                yield failure(error)
                return
            yield part
            waiting = asyncio.ensure_future(anext(events))
    finally:
        await _close(waiting, events)


async def _close(waiting: asyncio.Task[bytes], events: Events) -> None:
    """Ends the generator, and first the task that waits for its next event."""
    with anyio.CancelScope(shield=True):
        waiting.cancel()
        await asyncio.wait([waiting])
        if not waiting.cancelled():
            waiting.exception()  # retrieved: asyncio would log it
        await events.aclose()


class cancelled_by_disconnect:  # noqa: N801  # used as a function, like asyncio.timeout
    """Cancels its body as soon as the client is gone, and raises ClientDisconnect.

    By a bare task and `Task.cancel`, as asyncio.timeout does: a task group takes longer than the rest of what
    the gate does before the first event.
    """

    def __init__(self, request: Request) -> None:
        self._receive, self._disconnected = request.receive, False

    async def __aenter__(self) -> None:
        body = asyncio.current_task()
        assert body is not None
        self._body, self._cancelling = body, body.cancelling()
        self._watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._disconnected = True
        self._body.cancel()  # it waits within its block, where the error will be raised

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watching.cancel()
        if not self._disconnected:
            if self._watching.done() and not self._watching.cancelled():
                self._watching.result()  # receiving failed
            return
        others = self._body.uncancel() > self._cancelling
        if kind is None or (issubclass(kind, asyncio.CancelledError) and not others):
            raise ClientDisconnect from None


async def merged(streams: Sequence[AsyncGenerator[T, None]], limit: int) -> AsyncGenerator[T, None]:
    """The items of several streams as they come, of at most `limit` streams at a time.

    No stream goes on before its last item was taken. The first that fails ends the others.
    """
    items: asyncio.Queue[tuple[T, asyncio.Event] | None] = asyncio.Queue()  # None: all have ended

    async def drain(stream: AsyncGenerator[T, None]) -> None:
        async with aclosing(stream):
            async for item in stream:
                items.put_nowait((item, taken := asyncio.Event()))
                await taken.wait()

    draining = asyncio.ensure_future(gather_limited(map(drain, streams), limit))
    draining.add_done_callback(lambda _: items.put_nowait(None))
    try:
        while (entry := await items.get()) is not None:
            item, taken = entry
            yield item
            taken.set()
        draining.result()
    finally:
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)


async def gather_limited(jobs: Iterable[Coroutine[Any, Any, None]], limit: int) -> None:
    """Runs jobs, at most `limit` at a time; the first that fails cancels the others."""
    slots = asyncio.Semaphore(limit)

    async def run(job: Coroutine[Any, Any, None]) -> None:
        async with slots:
            await job

    jobs = list(jobs)
    tasks = [asyncio.ensure_future(run(job)) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        try:  # a cancelled scope cancels this wait too
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for job in jobs:
                if getcoroutinestate(job) == CORO_CREATED:
                    job.close()  # one that never began would be reported as never awaited
