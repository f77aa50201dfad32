"""Server-sent events, with comments that keep an idle connection open."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

import anyio

MEDIA_TYPE: Final = "text/event-stream"
DONE: Final = b"data: [DONE]\n\n"  # the last event of OpenAI's completion streams
KEEP_ALIVE: Final = b": keep-alive\n\n"  # a comment: clients skip it, proxies see bytes


def event(data: dict[str, Any]) -> bytes:
    """One event; data with a `type` is a named event, as in OpenAI's Responses API."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


async def with_keep_alive(
    first: bytes, events: AsyncGenerator[bytes, None], interval_s: float
) -> AsyncIterator[bytes]:
    """`first`, then the events, and a comment for every interval in which none came. 0: no comments.

    Each event is awaited in a task, so that a timeout leaves the generator where it is.
    """
    waiting: asyncio.Task[bytes] | None = None
    try:
        yield first
        while True:
            waiting = asyncio.ensure_future(anext(events))
            while not (await asyncio.wait([waiting], timeout=interval_s or None))[0]:
                yield KEEP_ALIVE
            try:
                yield waiting.result()
            except StopAsyncIteration:
                return
    finally:
        if waiting is not None and not waiting.done():
            waiting.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([waiting])
        await events.aclose()
