"""The HTTP application: paths, middleware, lifespan, health and metrics."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute
from starlette.routing import Route as Path

from paceline import __version__
from paceline.server.access_log import figures
from paceline.server.admission import Admission
from paceline.server.async_engine import AsyncEngine
from paceline.server.heap import HeapTrimmer
from paceline.server.model_pool import ModelPool
from paceline.server.openai.chat import ChatServing
from paceline.server.openai.completions import CompletionServing
from paceline.server.openai.embeddings import EmbeddingServing
from paceline.server.openai.models import ModelServing
from paceline.server.openai.openapi import document
from paceline.server.openai.prefill import PrefillServing
from paceline.server.openai.responses import ResponsesServing
from paceline.server.openai.serving import KEEP_ALIVE_S, MAX_BODY, MAX_PARALLEL
from paceline.server.page.about import AboutServing
from paceline.server.page.advice import AdviceServing
from paceline.server.page.assets import ASSETS, PageAssets
from paceline.server.page.live import LiveServing
from paceline.server.page.traces import TraceServing
from paceline.server.request_log import RequestLog
from paceline.web.access_log import AccessLog
from paceline.web.api_errors import Handler, api_error, not_allowed, not_found, with_error_responses
from paceline.web.request_body import BODY_TIMEOUT_S, LimitedBodies, lenient, shown_name
from paceline.web.request_id import RequestIds

if TYPE_CHECKING:  # a server without traces starts without a database
    from paceline.trace.store import Store

IGNORED_HEADER: Final = "x-ignored-parameters"
MAX_BODIES: Final = 32  # of the largest size, in memory at once
CLOSING_S: Final = 5.0  # for the engine's thread, and for records that are not written yet


class App:
    """One model or several behind the OpenAI API."""

    def __init__(
        self,
        models: ModelPool,
        admission: Admission,
        log: RequestLog,
        max_body: int = MAX_BODY,
        max_parallel: int = MAX_PARALLEL,
        keep_alive_s: float = KEEP_ALIVE_S,
        body_timeout_s: float = BODY_TIMEOUT_S,
        store: "Store | None" = None,
        advice: str | None = None,
        lenient: bool = False,
    ) -> None:
        """lenient: unknown parameters of requests are ignored."""
        self.models, self.admission, self.log = models, admission, log
        self._body_timeout_s, self._max_bodies = body_timeout_s, MAX_BODIES * max_body
        self._lenient = lenient
        parts = (models, admission, log, max_body, max_parallel, keep_alive_s)
        self.chat = ChatServing(*parts)
        self.completions = CompletionServing(*parts)
        self.responses = ResponsesServing(*parts)
        self.prefill = PrefillServing(*parts)
        self.embeddings = EmbeddingServing(*parts)
        self.model_list = ModelServing(*parts)
        self.about = AboutServing(*parts)
        self.live = LiveServing(admission, log, store)
        self.traces = TraceServing(admission, store)
        self.advice = AdviceServing(admission, advice)
        self.assets = PageAssets()
        self.extra_routes: list[BaseRoute] = []  # of other parts of the package, such as split

    @property
    def engine(self) -> AsyncEngine:
        """Of the default model, which must be loaded: for what is built around one model."""
        engine = self.models.default.engine
        assert engine is not None, "the default model is not loaded"
        return engine

    def asgi(self) -> Starlette:
        with_key = [
            ("/v1/chat/completions", self.chat.create, "POST"),
            ("/v1/completions", self.completions.create, "POST"),
            ("/v1/responses", self.responses.create, "POST"),
            ("/v1/prefill", self.prefill.create, "POST"),
            ("/v1/embeddings", self.embeddings.create, "POST"),
            ("/v1/models", self.model_list.all, "GET"),
            ("/v1/models/{name:path}", self.model_list.model, "GET"),
            ("/v1/routes", self.model_list.routes, "GET"),
            ("/tokenize", self.model_list.tokenize, "POST"),
            ("/detokenize", self.model_list.detokenize, "POST"),
        ]
        for_page = [
            ("/page/about", self.about.about, "GET"),
            ("/page/live", self.live.live, "GET"),
            ("/page/hour", self.live.hour, "GET"),
            ("/page/runs", self.traces.runs, "GET"),
            ("/page/runs/{id}", self.traces.run, "GET"),
            ("/page/runs/{baseline}/{candidate}", self.traces.compare, "GET"),
            ("/page/traces/{id}", self.traces.trace, "GET"),
            ("/page/advice", self.advice.report, "GET"),
        ]
        without_key = [
            ("/", self.assets.index, "GET"),
            (ASSETS, self.assets.asset, "GET"),
            ("/health", self.health, "GET"),
            ("/ready", self.ready, "GET"),
            ("/metrics", self.metrics, "GET"),
            ("/version", self.version, "GET"),
            ("/openapi.json", self.openapi, "GET"),
        ]
        paths = [(path, self.authenticated(handler), method) for path, handler, method in with_key]
        paths += [(path, self.authenticated(handler, False), method) for path, handler, method in for_page]
        paths += without_key
        return Starlette(
            routes=[
                *(Path(path, with_error_responses(call), methods=[method]) for path, call, method in paths),
                *self.extra_routes,
            ],
            middleware=[
                Middleware(RequestIds),
                Middleware(AccessLog, figures=figures),
                Middleware(
                    LimitedBodies,
                    timeout_s=self._body_timeout_s,
                    max_bytes=self._max_bodies,
                    after_large=HeapTrimmer().request,
                ),
            ],
            lifespan=self._lifespan,
            exception_handlers={404: not_found, 405: not_allowed},
        )

    def authenticated(self, handler: Handler, limited: bool = True) -> Handler:
        """Checks the key and its limits before anything else: a request over them has no body read.

        limited: False: for the page's own endpoints, which it polls; they count for no limit.
        """

        async def handle(http: Request) -> Response:
            http.state.ticket = None
            http.state.used_tokens = 0  # by an endpoint that generates nothing
            retryable = False
            try:
                http.state.key = self.admission.authenticate(http.headers)
                http.state.ticket = self.admission.enter(http.state.key) if limited else None
                return await (self._ignoring(handler, http) if self._lenient else handler(http))
            except Exception as error:
                http.state.error = error
                retryable = api_error(error).retryable
                if not hasattr(http.state, "context"):  # else its end is recorded
                    self.log.refused(error, http)
                raise
            finally:
                if http.state.ticket is not None and not hasattr(http.state, "context"):
                    http.state.ticket.leave(http.state.used_tokens, time.monotonic(), retryable)

        return handle

    async def _ignoring(self, handler: Handler, http: Request) -> Response:
        """Ignores unknown parameters; a header, the metrics and the log say which."""
        with lenient() as ignored:
            try:
                response = await handler(http)
            finally:
                for name in (named := dict.fromkeys(map(shown_name, ignored))):
                    self.log.ignored_parameter(name)
        if named:
            response.headers[IGNORED_HEADER] = ", ".join(named)
        return response

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.models.start()
        self.log.start()
        self.admission.open = True
        yield
        self.admission.open = False
        await self.models.stop(CLOSING_S)
        try:
            await asyncio.to_thread(self.log.close, CLOSING_S)
        except RuntimeError:  # no memory for a thread
            self.log.close(CLOSING_S)

    def drain(self) -> None:
        """Admits nothing new; admitted requests may end, with all their prompts and choices."""
        self.admission.open = False

    async def health(self, http: Request) -> Response:
        alive = all(engine.thread.alive for _, engine in self.models.loaded)
        return JSONResponse({"status": "ok" if alive else "the engine has stopped"}, 200 if alive else 503)

    async def ready(self, http: Request) -> Response:
        ready = self.admission.open
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def metrics(self, http: Request) -> Response:
        body, content_type = self.log.metrics.render(http.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def version(self, http: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def openapi(self, http: Request) -> Response:
        return JSONResponse(document([name for model in self.models.models for name in model.names]))
