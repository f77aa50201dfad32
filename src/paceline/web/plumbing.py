"""Between HTTP and the handlers: shapes, errors, events, clients that leave."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import anyio
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from paceline.errors import PacelineError
from paceline.log import log_problem
from paceline.web.api_errors import ApiError, failure, invalid
from paceline.web.json_body import parse_json

log = logging.getLogger("paceline.server")

R = TypeVar("R", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]

CLOSED: Final = 499  # the client left before its answer


def shaped(data: Mapping[str, Any], shape: type[R]) -> R:
    """A request's body as one of our shapes."""
    try:
        return shape.model_validate(data)
    except ValidationError as problem:
        raise invalid(problem, shape) from None


async def read_object(request: Request, most: int) -> dict[str, Any]:
    """A body of at most so many bytes; what is beyond is not read."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise ApiError(413, f"the body is too large: at most {most:,} bytes are read")
    data = parse_json(bytes(body), most)
    if not isinstance(data, dict):
        raise ApiError(400, "the body is not a JSON object")
    return data


def kind_of(problem: BaseException) -> str:
    """One word for what went wrong."""
    if isinstance(problem, ApiError):
        return str(problem.body["error"]["code"] or problem.body["error"]["type"])
    gone = isinstance(problem, ClientDisconnect | asyncio.CancelledError | GeneratorExit)
    return "cancelled" if gone else "server_error"


def guarded(handler: Handler) -> Handler:
    """Whatever goes wrong becomes an answer in OpenAI's shape."""

    async def call(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=CLOSED)
        except Exception as problem:
            known = as_failure(problem, request.scope["route"].path)
            return JSONResponse(known.body, known.status, known.headers)

    return call


def as_failure(problem: Exception, path: str) -> ApiError:
    """What the client hears. What nobody reckoned with is logged."""
    if isinstance(problem, ApiError):
        return problem
    if not isinstance(problem, PacelineError):
        log_problem(log, f"{path} failed", problem)
    return failure(problem)


async def not_found(request: Request, problem: Exception) -> Response:
    return JSONResponse(ApiError(404, "no such path").body, 404)


async def not_allowed(request: Request, problem: Exception) -> Response:
    allowed = problem.headers if isinstance(problem, HTTPException) else None
    return JSONResponse(ApiError(405, "the method is not allowed here").body, 405, allowed)


@asynccontextmanager
async def cancelled_by_disconnect(request: Request) -> AsyncIterator[None]:
    """Ends what is inside as soon as the client is gone."""
    async with anyio.create_task_group() as tasks:
        gone = False
        problem: Exception | None = None

        async def watch() -> None:
            nonlocal gone
            while (await request.receive())["type"] != "http.disconnect":
                pass
            gone = True
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        try:
            yield
        except Exception as error:  # a task group would wrap it
            problem = error
        tasks.cancel_scope.cancel()
    if problem is not None:
        raise problem
    if gone:
        raise ClientDisconnect


async def together(jobs: Iterable[Coroutine[Any, Any, None]], most: int) -> None:
    """Runs jobs, at most so many at once; the first that fails ends the others."""
    room = asyncio.Semaphore(most)

    async def run(job: Coroutine[Any, Any, None]) -> None:
        async with room:
            await job

    tasks = [asyncio.ensure_future(run(job)) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def event(data: dict[str, Any]) -> bytes:
    named = f"event: {data['type']}\n" if "type" in data else ""
    return f"{named}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


async def after(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for part in rest:
        yield part
