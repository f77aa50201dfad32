"""The HTTP application: paths, bodies, streams, errors."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route as Path

from paceline import __version__
from paceline.errors import ConstraintError, ShuttingDown
from paceline.server.asked import Asked, from_chat, from_completion, prompts
from paceline.server.body import parse_json
from paceline.server.choice import Choice, usage
from paceline.server.failures import Failure, failure
from paceline.server.openapi import document
from paceline.server.places import misread, placed
from paceline.server.plumbing import (
    Handler,
    after,
    as_failure,
    cancelled_by_disconnect,
    event,
    guarded,
    kind_of,
    not_allowed,
    not_found,
    shaped,
)
from paceline.server.reception import Reception, Visit
from paceline.server.replies import ChatReply, CompletionReply
from paceline.server.responses import ResponsesReply, as_chat
from paceline.server.responses_wire import ResponsesRequest
from paceline.server.service import Service
from paceline.server.wire import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    StreamOptions,
    TokenizeRequest,
)
from paceline.text import Tokenizer

AnyReply = ChatReply | CompletionReply | ResponsesReply

MAX_BODY: Final = 8 << 20  # bytes
CLOSING_S: Final = 5.0  # for the engine's thread, and for what is still to be written


class App:
    """Handlers around one service."""

    def __init__(self, service: Service, reception: Reception, max_body: int = MAX_BODY) -> None:
        self.service = service
        self.reception = reception
        self.ready = False
        self._max_body = max_body

    def asgi(self) -> Starlette:
        closed = [  # where the server has keys, only with one of them
            ("/v1/chat/completions", self.chat, "POST"),
            ("/v1/completions", self.completions, "POST"),
            ("/v1/responses", self.responses, "POST"),
            ("/v1/models", self.models, "GET"),
            ("/v1/models/{name:path}", self.model, "GET"),
            ("/tokenize", self.tokenize, "POST"),
            ("/detokenize", self.detokenize, "POST"),
        ]
        opened = [  # for those who watch the server
            ("/health", self.health, "GET"),
            ("/ready", self.is_ready, "GET"),
            ("/metrics", self.metrics, "GET"),
            ("/version", self.version, "GET"),
            ("/openapi.json", self.openapi, "GET"),
        ]
        paths = [*((path, self._keyed(handler), method) for path, handler, method in closed), *opened]
        routes = [Path(path, guarded(handler), methods=[method]) for path, handler, method in paths]
        problems = {404: not_found, 405: not_allowed}
        return Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=problems)

    def _keyed(self, handler: Handler) -> Handler:
        """Looks at the key before anything else: who has none learns nothing, and no body is read."""

        async def call(request: Request) -> Response:
            self.reception.check_key(request.headers)
            return await handler(request)

        return call

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.service.worker.start()
        self.ready = True
        yield
        self.ready = False
        await asyncio.to_thread(self.service.worker.stop, CLOSING_S)
        await asyncio.to_thread(self.reception.close, CLOSING_S)

    def drain(self) -> None:
        """Nothing new is let in; what was let in may end, all its prompts and choices."""
        self.ready = False

    async def chat(self, request: Request) -> Response:
        data = await self._body(request)
        asked = shaped(data, ChatRequest)
        visit = self._admit(request, data, asked)
        reply = ChatReply(*self._head("chatcmpl", bool(asked.logprobs)))
        with self._noted(visit, reply.id):
            what = from_chat(asked, visit.route.spec(self.service.llm.spec), self._drafters())
        return await self._reply(request, visit, asked, [what], reply)

    async def completions(self, request: Request) -> Response:
        data = await self._body(request)
        asked = shaped(data, CompletionRequest)
        visit = self._admit(request, data, asked)
        reply = CompletionReply(*self._head("cmpl", asked.logprobs is not None))
        with self._noted(visit, reply.id):
            given, spec = prompts(asked.prompt), visit.route.spec(self.service.llm.spec)
            if asked.stream and len(given) > 1:
                raise Failure(400, "several prompts cannot be streamed: send them one by one", param="prompt")
            what = [from_completion(asked, prompt, spec, self._drafters()) for prompt in given]
        return await self._reply(request, visit, asked, what, reply)

    async def responses(self, request: Request) -> Response:
        data = await self._body(request)
        asked = shaped(data, ResponsesRequest)
        chat = as_chat(asked)
        visit = self._admit(request, data, chat)
        reply = ResponsesReply(asked, self.service.llm.name, self.service.llm.tokenizer)
        with self._noted(visit, reply.id):
            what = from_chat(chat, visit.route.spec(self.service.llm.spec), self._drafters())
        return await self._reply(request, visit, chat, [what], reply)

    def _admit(self, request: Request, data: dict[str, Any], asked: Sampling) -> Visit:
        self._check_model(asked.model)
        if not self.ready:
            self.reception.metrics.refused("draining")
            raise failure(ShuttingDown())
        return self.reception.admit(request.url.path, request.headers, data, asked)

    def _drafters(self) -> list[str]:
        return list(self.service.llm.drafters)

    def _head(self, prefix: str, logprobs: bool) -> tuple[str, str, str, Tokenizer, bool]:
        service = self.service
        name = f"{prefix}-{secrets.token_hex(12)}"
        return name, service.llm.name, service.fingerprint, service.llm.tokenizer, logprobs

    @contextmanager
    def _noted(self, visit: Visit, response: str, choices: Sequence[Choice] = ()) -> Iterator[None]:
        """A request that fails in here is noted as failed."""
        try:
            yield
        except ConstraintError as error:
            problem = misread(error, visit.body)
            self.reception.done(visit, choices, response, failed=kind_of(problem))
            raise problem from error
        except BaseException as problem:
            self.reception.done(visit, choices, response, failed=kind_of(problem))
            raise

    async def _reply(
        self,
        request: Request,
        visit: Visit,
        asked: Sampling,
        what: list[Asked],
        reply: AnyReply,
    ) -> Response:
        headers = {"x-request-id": reply.id}
        what = [self.reception.bound(visit, one) for one in what]
        if asked.stream:
            pieces = self._stream(what[0], visit, asked, reply)
            async with cancelled_by_disconnect(request):
                first = await anext(pieces)  # what is wrong with the request shows before any of the stream
            return StreamingResponse(after(first, pieces), media_type="text/event-stream", headers=headers)
        choices: list[Choice] = []
        with self._noted(visit, reply.id, choices):
            async with cancelled_by_disconnect(request):
                for one in what:
                    await self._run(one, visit, choices)
        self.reception.done(visit, choices, reply.id)
        whole = reply.whole(choices, usage(choices)) | self._metrics_of(visit, asked, choices)
        return JSONResponse(whole, headers=headers)

    async def _run(self, asked: Asked, visit: Visit, choices: list[Choice]) -> None:
        """Adds the choices of one prompt to those before."""
        mine: list[Choice] = []
        before = len(choices)

        def opened(choice: Choice) -> None:
            self.reception.opened(visit, choice)
            choices.append(choice)

        failed = partial(placed, body=visit.body)
        async with aclosing(self.service.answer(asked, visit.caller, mine, opened, failed)) as pieces:
            async for _ in pieces:
                pass
        for choice in mine:
            choice.index += before

    def _metrics_of(self, visit: Visit, asked: Sampling, choices: Sequence[Choice]) -> dict[str, Any]:
        if not asked.metrics:
            return {}
        return {"metrics": self.reception.report(visit, choices, asked.metrics == "detailed")}

    def _so_far(self, options: StreamOptions, choices: Sequence[Choice]) -> dict[str, Any]:
        return {"usage": usage(choices)} if options.continuous_usage_stats else {}

    async def _stream(
        self, asked: Asked, visit: Visit, wire: Sampling, reply: AnyReply
    ) -> AsyncIterator[bytes]:
        """Server-sent events, one or two for each round."""
        choices: list[Choice] = []
        begun: set[int] = set()
        options = wire.stream_options or StreamOptions()
        opened, failed = partial(self.reception.opened, visit), partial(placed, body=visit.body)
        answer = self.service.answer(asked, visit.caller, choices, opened, failed)
        try:
            with self._noted(visit, reply.id, choices):
                async with aclosing(answer) as pieces:
                    async for choice, piece in pieces:
                        if choice.index not in begun:
                            begun.add(choice.index)
                            yield event(reply.first(choice))
                        for chunk in reply.chunks(choice, piece):
                            yield event(chunk | self._so_far(options, choices))
        except Exception as problem:
            if not begun:
                raise
            yield event(reply.failed(as_failure(problem, visit.endpoint)))
        else:
            self.reception.done(visit, choices, reply.id)
            if options.include_usage:
                for chunk in reply.last(usage(choices)):
                    yield event(chunk | self._metrics_of(visit, wire, choices))
        yield reply.end

    async def _body(self, request: Request) -> dict[str, Any]:
        self.reception.check_key(request.headers)  # before anything is read for a stranger
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._max_body:
                raise Failure(413, f"the body is too large: at most {self._max_body:,} bytes are read")
        data = parse_json(bytes(body), self._max_body)
        if not isinstance(data, dict):
            raise Failure(400, "the body is not a JSON object")
        return data

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
        asked = shaped(await self._body(request), TokenizeRequest)
        if (asked.prompt is None) == (asked.messages is None):
            raise Failure(400, "give either prompt or messages", param="prompt")
        tokens = await asyncio.to_thread(self._tokens, asked)
        return JSONResponse(
            {"tokens": tokens, "count": len(tokens), "max_model_len": self.service.llm.target.max_context}
        )

    def _tokens(self, asked: TokenizeRequest) -> list[int]:
        tokenizer = self.service.llm.tokenizer
        if asked.prompt is not None:
            return tokenizer.encode(asked.prompt, special=asked.add_special_tokens)
        return tokenizer.encode_chat(asked.messages or [], asked.tools, asked.add_generation_prompt)

    async def detokenize(self, request: Request) -> Response:
        asked = shaped(await self._body(request), DetokenizeRequest)
        tokenizer = self.service.llm.tokenizer
        if strange := [token for token in asked.tokens if not 0 <= token < tokenizer.vocab_size]:
            raise Failure(400, f"tokens: {strange[0]} is not one of {tokenizer.vocab_size}", param="tokens")
        return JSONResponse({"prompt": await asyncio.to_thread(tokenizer.decode, asked.tokens)})

    async def health(self, request: Request) -> Response:
        alive = self.service.worker.alive
        return JSONResponse({"status": "ok" if alive else "the engine has stopped"}, 200 if alive else 503)

    async def metrics(self, request: Request) -> Response:
        body, kind = self.reception.metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": kind})

    async def is_ready(self, request: Request) -> Response:
        return JSONResponse({"ready": self.ready}, 200 if self.ready else 503)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(document(self.service.llm.name))
