"""Tasks of one request: ended when its client disconnects, or run several at a time."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anyio
from starlette.requests import ClientDisconnect, Request


@asynccontextmanager
async def cancelled_by_disconnect(request: Request) -> AsyncIterator[None]:
    """Cancels its body as soon as the client is gone, and raises ClientDisconnect."""
    async with anyio.create_task_group() as tasks:
        disconnected = False
        raised: Exception | None = None

        async def watch() -> None:
            nonlocal disconnected
            while (await request.receive())["type"] != "http.disconnect":
                pass
            disconnected = True
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        try:
            yield
        except Exception as error:  # a task group would wrap it
            raised = error
        tasks.cancel_scope.cancel()
    if raised is not None:
        raise raised
    if disconnected:
        raise ClientDisconnect


async def gather_limited(jobs: Iterable[Coroutine[Any, Any, None]], limit: int) -> None:
    """Runs jobs, at most `limit` at a time; the first that fails cancels the others."""
    slots = asyncio.Semaphore(limit)

    async def run(job: Coroutine[Any, Any, None]) -> None:
        async with slots:
            await job

    tasks = [asyncio.ensure_future(run(job)) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
