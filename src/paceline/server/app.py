"""The HTTP application: paths, bodies, streams, errors."""

import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, TypeVar

import anyio
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route as Path

from paceline import __version__
from paceline.errors import PacelineError
from paceline.server.asked import Asked, from_chat, from_completion, prompts
from paceline.server.choice import Choice, usage
from paceline.server.failures import Failure, failure, invalid
from paceline.server.replies import ChatReply, CompletionReply
from paceline.server.responses import ResponsesReply, as_chat
from paceline.server.responses_wire import ResponsesRequest
from paceline.server.service import Caller, Service
from paceline.server.wire import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    StreamOptions,
    TokenizeRequest,
)

log = logging.getLogger("paceline.server")
R = TypeVar("R", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]
AnyReply = ChatReply | CompletionReply | ResponsesReply

MAX_BODY: Final = 8 << 20  # bytes
CLOSED: Final = 499  # the client left before its answer


class App:
    """Handlers around one service."""

    def __init__(self, service: Service, drain_s: float = 10.0) -> None:
        self.service = service
        self._drain_s = drain_s
        self.ready = False

    def asgi(self) -> Starlette:
        paths = [
            ("/v1/chat/completions", self.chat, "POST"),
            ("/v1/completions", self.completions, "POST"),
            ("/v1/responses", self.responses, "POST"),
            ("/v1/models", self.models, "GET"),
            ("/v1/models/{name:path}", self.model, "GET"),
            ("/tokenize", self.tokenize, "POST"),
            ("/detokenize", self.detokenize, "POST"),
            ("/health", self.health, "GET"),
            ("/ready", self.is_ready, "GET"),
            ("/version", self.version, "GET"),
        ]
        routes = [Path(path, guarded(handler), methods=[method]) for path, handler, method in paths]
        return Starlette(
            routes=routes, lifespan=self._lifespan, exception_handlers={404: not_found, 405: not_allowed}
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.service.worker.start()
        self.ready = True
        yield
        self.ready = False
        await anyio.to_thread.run_sync(partial(self.service.worker.stop, self._drain_s))

    async def chat(self, request: Request) -> Response:
        asked = await read(request, ChatRequest)
        self._check_model(asked.model)
        llm = self.service.llm
        what = from_chat(asked, llm.spec, list(llm.drafters))
        reply = ChatReply(*self._head("chatcmpl", bool(asked.logprobs)))
        return await self._reply(request, asked, [what], reply)

    async def completions(self, request: Request) -> Response:
        asked = await read(request, CompletionRequest)
        self._check_model(asked.model)
        llm = self.service.llm
        given = prompts(asked.prompt)
        what = [from_completion(asked, prompt, llm.spec, list(llm.drafters)) for prompt in given]
        if asked.stream and len(what) > 1:
            raise Failure(400, "several prompts cannot be streamed: send them one by one", param="prompt")
        reply = CompletionReply(*self._head("cmpl", asked.logprobs is not None))
        return await self._reply(request, asked, what, reply)

    async def responses(self, request: Request) -> Response:
        asked = await read(request, ResponsesRequest)
        self._check_model(asked.model)
        llm, chat = self.service.llm, as_chat(asked)
        what = from_chat(chat, llm.spec, list(llm.drafters))
        return await self._reply(request, chat, [what], ResponsesReply(asked, llm.name))

    def _head(self, prefix: str, logprobs: bool) -> tuple[str, str, str, Any, bool]:
        service = self.service
        name = f"{prefix}-{secrets.token_hex(12)}"
        return name, service.llm.name, service.fingerprint, service.llm.tokenizer, logprobs

    async def _reply(self, request: Request, asked: Sampling, what: list[Asked], reply: AnyReply) -> Response:
        caller = Caller(learn=asked.learn is not False, priority=asked.priority or 0)
        headers = {"x-request-id": reply.id}
        if asked.stream:
            options = asked.stream_options or StreamOptions()
            pieces = self._stream(what[0], caller, reply, options)
            async with cancelled_by_disconnect(request):
                first = await anext(pieces)  # what is wrong with the request shows before any of the stream
            return StreamingResponse(_after(first, pieces), media_type="text/event-stream", headers=headers)
        async with cancelled_by_disconnect(request):
            choices: list[Choice] = []
            for one in what:
                mine: list[Choice] = []
                async for _ in self.service.answer(one, caller, mine):
                    pass
                for choice in mine:
                    choice.index += len(choices)
                choices += mine
            return JSONResponse(reply.whole(choices, usage(choices)), headers=headers)

    async def _stream(
        self, asked: Asked, caller: Caller, reply: AnyReply, options: StreamOptions
    ) -> AsyncIterator[bytes]:
        """Server-sent events, one or two for each round."""
        choices: list[Choice] = []
        begun: set[int] = set()
        try:
            async for choice, piece in self.service.answer(asked, caller, choices):
                if choice.index not in begun:
                    begun.add(choice.index)
                    opening = reply.first(choice)
                    yield b"" if opening is None else event(opening)
                for chunk in reply.chunks(choice, piece):
                    yield event(chunk)
        except Failure as problem:
            if not begun:
                raise
            yield event(reply.failed(problem))
        else:
            if options.include_usage:
                yield event(reply.last(usage(choices)))
        yield reply.end

    def _check_model(self, name: str) -> None:
        if name != self.service.llm.name:
            raise Failure(
                404,
                f"the model {name!r} is not served here; {self.service.llm.name!r} is",
                param="model",
                code="model_not_found",
            )

    def _card(self) -> dict[str, Any]:
        target = self.service.llm.target
        return {
            "id": self.service.llm.name,
            "object": "model",
            "created": 0,
            "owned_by": "paceline",
            "max_model_len": target.max_context,
        }

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card())

    async def tokenize(self, request: Request) -> Response:
        asked = await read(request, TokenizeRequest)
        if (asked.prompt is None) == (asked.messages is None):
            raise Failure(400, "give either prompt or messages", param="prompt")
        tokenizer = self.service.llm.tokenizer
        if asked.prompt is not None:
            tokens = tokenizer.encode(asked.prompt, special=asked.add_special_tokens)
        else:
            tokens = tokenizer.encode_chat(asked.messages or [], asked.tools, asked.add_generation_prompt)
        return JSONResponse(
            {"tokens": tokens, "count": len(tokens), "max_model_len": self.service.llm.target.max_context}
        )

    async def detokenize(self, request: Request) -> Response:
        asked = await read(request, DetokenizeRequest)
        tokenizer = self.service.llm.tokenizer
        if strange := [token for token in asked.tokens if not 0 <= token < tokenizer.vocab_size]:
            raise Failure(400, f"tokens: {strange[0]} is not one of {tokenizer.vocab_size}", param="tokens")
        return JSONResponse({"prompt": tokenizer.decode(asked.tokens)})

    async def health(self, request: Request) -> Response:
        alive = self.service.worker.alive
        return JSONResponse({"status": "ok" if alive else "the engine has stopped"}, 200 if alive else 503)

    async def is_ready(self, request: Request) -> Response:
        return JSONResponse({"ready": self.ready}, 200 if self.ready else 503)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})


async def read(request: Request, shape: type[R]) -> R:
    """The request's body as one of our shapes."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise Failure(413, f"the body is too large: at most {MAX_BODY:,} bytes are read")
    try:
        data = json.loads(bytes(body))
    except (ValueError, RecursionError) as problem:
        raise Failure(400, f"the body is not JSON ({problem})") from None
    if not isinstance(data, dict):
        raise Failure(400, "the body is not a JSON object")
    try:
        return shape.model_validate(data)
    except ValidationError as problem:
        raise invalid(problem, list(shape.model_fields)) from None


def guarded(handler: Handler) -> Handler:
    """Whatever goes wrong becomes an answer in OpenAI's shape."""

    async def call(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=CLOSED)
        except Exception as problem:
            if not isinstance(problem, Failure | PacelineError):
                log.exception("%s failed", request.url.path)
            known = problem if isinstance(problem, Failure) else failure(problem)
            return JSONResponse(known.body, known.status, known.headers)

    return call


async def not_found(request: Request, problem: Exception) -> Response:
    return JSONResponse(Failure(404, f"no such path: {request.url.path}").body, 404)


async def not_allowed(request: Request, problem: Exception) -> Response:
    refused = Failure(405, f"{request.method} is not what {request.url.path} is for")
    return JSONResponse(refused.body, 405, getattr(problem, "headers", None))


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


def event(data: dict[str, Any]) -> bytes:
    named = f"event: {data['type']}\n" if "type" in data else ""
    return f"{named}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


async def _after(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for part in rest:
        yield part
