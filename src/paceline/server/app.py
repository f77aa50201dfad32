"""The HTTP application: paths, bodies, streams, errors."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route as Path

from paceline.errors import ConstraintError, ShuttingDown
from paceline.server.async_engine import AsyncEngine
from paceline.server.choice import Choice, usage
from paceline.server.openai.error_param import placed
from paceline.server.openai.params import GenerateParams, check_variables, from_chat, from_completion, prompts
from paceline.server.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    StreamOptions,
    TokenizeRequest,
)
from paceline.server.openai.replies import ChatReply, CompletionReply
from paceline.server.openai.responses import ResponsesReply, as_chat
from paceline.server.openai.responses_protocol import ResponsesRequest
from paceline.server.openai.tokenize import text_of, tokens_of
from paceline.server.reception import Reception, Visit
from paceline.server.watched import watched
from paceline.strings import short
from paceline.text import Tokenizer
from paceline.web.api_errors import ApiError, failure
from paceline.web.plumbing import (
    Handler,
    after,
    as_failure,
    cancelled_by_disconnect,
    event,
    guarded,
    not_allowed,
    not_found,
    read_object,
    shaped,
    together,
)
from paceline.web.refusals import word_for
from paceline.web.request_id import RequestIds, named

AnyReply = ChatReply | CompletionReply | ResponsesReply

MAX_BODY: Final = 8 << 20  # bytes
AT_ONCE: Final = 16  # outputs of one request with many prompts
CLOSING_S: Final = 5.0  # for the engine's thread, and for what is still to be written


class App:
    """Handlers around one service."""

    def __init__(
        self, service: AsyncEngine, reception: Reception, max_body: int = MAX_BODY, at_once: int = AT_ONCE
    ) -> None:
        self.service = service
        self.reception = reception
        self.ready = False
        self._max_body = max_body
        self._at_once = at_once
        self._started = int(time.time())

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
        opened = watched(self.service, self.reception, lambda: self.ready)
        paths = [*((path, self._keyed(handler), method) for path, handler, method in closed), *opened]
        routes = [Path(path, guarded(handler), methods=[method]) for path, handler, method in paths]
        problems = {404: not_found, 405: not_allowed}
        names = [Middleware(RequestIds)]
        return Starlette(
            routes=routes, middleware=names, lifespan=self._lifespan, exception_handlers=problems
        )

    def _keyed(self, handler: Handler) -> Handler:
        """Looks at the key before anything else: who has none learns nothing, and no body is read."""

        async def call(request: Request) -> Response:
            try:
                request.state.key = self.reception.check_key(request.headers)
                return await handler(request)
            except Exception as problem:
                if not hasattr(request.state, "visit"):  # whose end is noted
                    self.reception.turned_away(problem)
                raise

        return call

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.service.worker.start()
        self.reception.start()
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
        reply = ChatReply(*self._head(request, "chatcmpl-", bool(asked.logprobs)))
        with self._noted(visit, reply.id):
            check_variables(asked.chat_template_kwargs, self.service.llm.tokenizer.template)
            what = from_chat(asked, visit.route.spec(self.service.llm.spec), self._drafters())
        return await self._reply(request, visit, asked, [what], reply)

    async def completions(self, request: Request) -> Response:
        data = await self._body(request)
        asked = shaped(data, CompletionRequest)
        visit = self._admit(request, data, asked)
        reply = CompletionReply(*self._head(request, "cmpl-", asked.logprobs is not None))
        with self._noted(visit, reply.id):
            given, spec = prompts(asked.prompt), visit.route.spec(self.service.llm.spec)
            if asked.stream and len(given) > 1:
                raise ApiError(
                    400, "several prompts cannot be streamed: send them one by one", param="prompt"
                )
            what = [from_completion(asked, prompt, spec, self._drafters()) for prompt in given]
        return await self._reply(request, visit, asked, what, reply)

    async def responses(self, request: Request) -> Response:
        data = await self._body(request)
        asked = shaped(data, ResponsesRequest)
        chat = as_chat(asked)
        visit = self._admit(request, data, chat)
        reply = ResponsesReply(
            asked, self.service.llm.name, self.service.llm.tokenizer, named(request.scope, "resp_", 24)
        )
        with self._noted(visit, reply.id):
            what = from_chat(chat, visit.route.spec(self.service.llm.spec), self._drafters())
        return await self._reply(request, visit, chat, [what], reply)

    def _admit(self, request: Request, data: dict[str, Any], asked: Sampling) -> Visit:
        self._check_model(asked.model)
        if not self.ready:
            raise failure(ShuttingDown())
        key = request.state.key
        visit = request.state.visit = self.reception.admit(
            request.url.path, request.headers, data, asked, key
        )
        return visit

    def _drafters(self) -> dict[str, str]:
        llm = self.service.llm
        return {**llm.trained, **{name: name for name in llm.drafters}}

    def _head(self, request: Request, prefix: str, logprobs: bool) -> tuple[str, str, str, Tokenizer, bool]:
        service = self.service
        return (
            named(request.scope, prefix),
            service.llm.name,
            service.fingerprint,
            service.llm.tokenizer,
            logprobs,
        )

    @contextmanager
    def _noted(self, visit: Visit, response: str, choices: Sequence[Choice] = ()) -> Iterator[None]:
        """A request that fails in here is noted as failed."""
        try:
            yield
        except ConstraintError as error:
            problem = placed(error, visit.body)
            self.reception.done(visit, choices, response, failed=word_for(problem))
            raise problem from error
        except BaseException as problem:
            self.reception.done(visit, choices, response, failed=word_for(problem))
            raise

    async def _reply(
        self,
        request: Request,
        visit: Visit,
        asked: Sampling,
        what: list[GenerateParams],
        reply: AnyReply,
    ) -> Response:
        what = [self.reception.bound(visit, one) for one in what]
        if asked.stream:
            pieces = self._stream(what[0], visit, asked, reply)
            async with cancelled_by_disconnect(request):
                first = await anext(pieces)  # what is wrong with the request shows before any of the stream
            return StreamingResponse(after(first, pieces), media_type="text/event-stream")
        choices: list[Choice] = []
        with self._noted(visit, reply.id, choices):
            async with cancelled_by_disconnect(request):
                jobs = [self._run(one, visit, choices, i * one.n) for i, one in enumerate(what)]
                await together(jobs, max(1, self._at_once // what[0].n))
        choices.sort(key=lambda choice: choice.index)
        self.reception.done(visit, choices, reply.id)
        whole = reply.whole(choices, usage(choices)) | self._metrics_of(visit, asked, choices)
        return JSONResponse(whole)

    async def _run(self, asked: GenerateParams, visit: Visit, choices: list[Choice], first: int) -> None:
        """Adds the choices of one prompt; `first` is the index of its first."""
        mine: list[Choice] = []
        opened, failed = partial(self.reception.opened, visit), partial(placed, body=visit.body)
        caller = replace(visit.caller, admitted=first > 0)
        try:
            async with aclosing(self.service.answer(asked, caller, mine, opened, failed)) as pieces:
                async for _ in pieces:
                    pass
        finally:
            for choice in mine:
                choice.index += first
            choices += mine

    def _metrics_of(self, visit: Visit, asked: Sampling, choices: Sequence[Choice]) -> dict[str, Any]:
        if not asked.metrics:
            return {}
        return {"metrics": self.reception.report(visit, choices, asked.metrics == "detailed")}

    async def _stream(
        self, asked: GenerateParams, visit: Visit, wire: Sampling, reply: AnyReply
    ) -> AsyncIterator[bytes]:
        """Server-sent events, one or two for each round."""
        choices: list[Choice] = []
        begun: set[int] = set()
        options = wire.stream_options or StreamOptions()
        unused: dict[str, Any] = {"usage": None} if options.include_usage else {}
        opened, failed = partial(self.reception.opened, visit), partial(placed, body=visit.body)
        answer = self.service.answer(asked, visit.caller, choices, opened, failed)
        try:
            with self._noted(visit, reply.id, choices):
                async with aclosing(answer) as pieces:
                    async for choice, piece in pieces:
                        if choice.index not in begun:
                            begun.add(choice.index)
                            yield event(reply.first(choice) | unused)
                        for chunk in reply.chunks(choice, piece):
                            so_far = {"usage": usage(choices)} if options.continuous_usage_stats else unused
                            yield event(chunk | so_far)
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
        return await read_object(request, self._max_body)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.service.llm.name:
            raise ApiError(
                404,
                f"the model {short(name)} is not served here; {self.service.llm.name!r} is",
                param="model",
                code="model_not_found",
            )

    def _card(self) -> dict[str, Any]:
        target = self.service.llm.target
        return {
            "id": self.service.llm.name,
            "object": "model",
            "created": self._started,
            "owned_by": "paceline",
            "max_model_len": target.max_context,
        }

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card())

    async def tokenize(self, request: Request) -> Response:
        data = await self._body(request)
        asked = shaped(data, TokenizeRequest)
        self._check_model(asked.model)
        tokens = await asyncio.to_thread(tokens_of, asked, self.service.llm.tokenizer, data)
        return JSONResponse(
            {"tokens": tokens, "count": len(tokens), "max_model_len": self.service.llm.target.max_context}
        )

    async def detokenize(self, request: Request) -> Response:
        asked = shaped(await self._body(request), DetokenizeRequest)
        self._check_model(asked.model)
        return JSONResponse({"prompt": await asyncio.to_thread(text_of, asked, self.service.llm.tokenizer)})
