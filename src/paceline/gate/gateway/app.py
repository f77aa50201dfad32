"""The gate as an HTTP application: paths, admission, health, models and metrics."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from random import Random
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as Path

from paceline import __version__
from paceline.errors import ShuttingDown, short
from paceline.gate.gateway.config import GateConfig, GateFile, Route
from paceline.gate.gateway.metrics import GateMetrics
from paceline.gate.gateway.metrics_poller import MetricsPoller
from paceline.gate.gateway.mirror import Mirror
from paceline.gate.gateway.page import GatePage
from paceline.gate.gateway.proxy import Proxy
from paceline.gate.gateway.request_context import PATHS, RequestContext, request_usage
from paceline.gate.gateway.spans import GateSpans
from paceline.gate.gateway.store_writer import StoreWriter
from paceline.gate.gateway.upstream_client import UpstreamClient, listed_models, request_headers
from paceline.gate.pair import Feedback, Pair
from paceline.gate.promotion import Plan, Promoter
from paceline.gate.store import GateStore, Rollout, Served
from paceline.gate.upstream_metrics import UpstreamWindow
from paceline.web.access_log import AccessLog
from paceline.web.api_errors import (
    FORBIDDEN,
    ApiError,
    Handler,
    api_error,
    error_code,
    not_allowed,
    not_found,
    with_error_responses,
)
from paceline.web.api_keys import ApiKeys, Key
from paceline.web.conversation import conversation_of
from paceline.web.otel import Exporter
from paceline.web.rate_limit import RateLimiter, Ticket
from paceline.web.request_body import BODY_TIMEOUT_S, FailFastModel, LimitedBodies, read_object, read_request
from paceline.web.request_id import HEADER as REQUEST_ID
from paceline.web.request_id import RequestIds, request_id

MAX_BODY: Final = 8 * 2**20  # bytes
MAX_BODIES: Final = 64  # of the largest size, in memory at once
MAX_FEEDBACK: Final = 4096  # bytes
CLOSING_S: Final = 5.0  # for second legs in flight, and for entries that are not written yet
COHORT: Final = "x-cohort"  # the header that names a group of users
PRUNE_S: Final = 600.0
MODELS_S: Final = 5.0  # for which a list of models is used


Plans = Callable[[], Mapping[str, Plan]]
Changed = Callable[[Rollout], None]


class FeedbackRequest(FailFastModel):
    """request_id: the header x-request-id of a response, or the response's `id`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    request_id: Annotated[str, Field(min_length=1, max_length=200)]
    thumbs: Literal["up", "down"] | None = None
    escalation: bool = False  # to a human


class GateApp:
    """rng: jitter of retries, and seeds of mirrored requests that have none.

    store_url: of the store, for other processes. local: only this machine's users reach the gate. files: of
    the page, by path.
    """

    def __init__(
        self,
        config: GateFile,
        keys: ApiKeys | None = None,
        exporter: Exporter | None = None,
        rng: Random | None = None,
        store: GateStore | None = None,
        promoter: Callable[[GateStore, Plans, Changed], Promoter] | None = None,
        max_body: int = MAX_BODY,
        body_timeout_s: float = BODY_TIMEOUT_S,
        store_url: str | None = None,
        local: bool = False,
        files: Mapping[str, Handler] | None = None,
    ) -> None:
        self.open = False  # new requests are admitted
        self._file, self._keys = config, keys
        self._max_body, self._body_timeout_s = max_body, body_timeout_s
        self._rng = Random() if rng is None else rng
        self._limiter = RateLimiter()
        self.client = UpstreamClient(time.monotonic)
        self.metrics = GateMetrics(lambda: self.client.states)
        self.spans = GateSpans(exporter or Exporter(None))
        self._store, self.writer = store, StoreWriter()
        self.promoter = None
        if store is not None and promoter is not None:
            self.promoter = promoter(store, lambda: self.config().plans, self._rollout_changed)
        self.proxy = Proxy(self.client, self.metrics, self.spans, self._candidate_share, self._rng)
        self.mirror = Mirror(self.client, self.metrics, self.spans, self._save_pair, self._rng)
        self.reader = MetricsPoller(self.client, self.config, self.metrics, self._save_window)
        self._local, self._files = local, files or {}
        self.page = GatePage(
            self.config,
            self.metrics,
            store,
            store_url,
            self._is_operator,
            lambda: None if self.promoter is None else self.promoter.executor,
        )
        self._in_flight: Counter[str] = Counter()  # user requests by route
        self._config: GateConfig | None = None
        self._models: tuple[float, list[Any]] = (float("-inf"), [])
        self.config()

    def config(self) -> GateConfig:
        """The configuration as it is now."""
        current = self._file.current()
        if current is not self._config:
            self._config = current
            self.client.configure(current.upstreams)
        return current

    def asgi(self) -> Starlette:
        with_key = [
            *((path, self.forward, "POST") for path in PATHS),
            ("/v1/models", self.models, "GET"),
            ("/v1/feedback", self.feedback, "POST"),
        ]
        for_page = [
            ("/page/about", self.page.about),
            ("/page/gate", self.page.experiments),
            ("/page/gate/{experiment}", self.page.report),
            ("/page/gate/{experiment}/pairs/{id}", self.page.pair),
        ]
        paths = [(path, self._authenticated(handler), method) for path, handler, method in with_key]
        if self._files:
            paths += [(path, self._authenticated(handler, False), "GET") for path, handler in for_page]
            paths += [(path, handler, "GET") for path, handler in self._files.items()]
        paths += [
            ("/health", self.health, "GET"),
            ("/ready", self.ready, "GET"),
            ("/metrics", self.render_metrics, "GET"),
            ("/version", self.version, "GET"),
        ]
        return Starlette(
            routes=[Path(path, with_error_responses(call), methods=[method]) for path, call, method in paths],
            middleware=[
                Middleware(RequestIds),
                Middleware(AccessLog, figures=_figures),
                Middleware(
                    LimitedBodies,
                    timeout_s=self._body_timeout_s,
                    max_bytes=MAX_BODIES * self._max_body,
                    after_large=lambda: None,
                ),
            ],
            lifespan=self._lifespan,
            exception_handlers={404: not_found, 405: not_allowed},
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.client.start()
        background = [asyncio.ensure_future(self._prune()), asyncio.ensure_future(self.reader.run())]
        if self.promoter is not None:
            # Before the first request: the rollout may be in any stage.
            await asyncio.to_thread(self.promoter.refresh, self.config().plans)
            background.append(asyncio.ensure_future(self.promoter.run()))
        self.open = True
        yield
        self.open = False
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await self.mirror.drain(CLOSING_S)
        await self.client.close()
        await asyncio.to_thread(self._close)

    async def _prune(self) -> None:
        while self._store is not None:
            self.writer.submit(self._store.prune)
            await asyncio.sleep(PRUNE_S)

    def _rollout_changed(self, rollout: Rollout) -> None:
        self.metrics.candidate_share(rollout.experiment, rollout.share)

    def _candidate_share(self, route: Route) -> float:
        if self.promoter is None or route.promotion is None:
            return 0.0
        return self.promoter.share(route.experiment)

    def _mirrors(self, route: Route) -> bool:
        if self._store is None or route.mirror is None:
            return False
        return route.promotion is None or self.promoter is None or self.promoter.mirrors(route.experiment)

    def _close(self) -> None:
        self.spans.close()
        if self.promoter is not None:
            self.promoter.close()
        self.writer.close(CLOSING_S)
        if self._store is not None:
            self._store.close()

    def drain(self) -> None:
        """Admits nothing new; admitted requests may end."""
        self.open = False

    def stop(self) -> None:
        """Ends admitted requests with an error."""
        self.proxy.stop()

    def _is_operator(self, key: Key | None) -> bool:
        """May see the texts of others. Without keys: everybody, where the gate is local."""
        return self._local if self._keys is None else key is not None and key.operator

    def _authenticated(self, handler: Handler, limited: bool = True) -> Handler:
        """limited: False: for the page's own endpoints, which count for no limit."""

        async def handle(http: Request) -> Response:
            http.state.key, http.state.tickets = None, []
            try:
                if not self.open:
                    raise ShuttingDown
                if self._keys is not None:
                    http.state.key = self._keys.authenticate(http.headers)
                    if limited:
                        self._enter(http, http.state.key)
                return await handler(http)
            except Exception as error:
                http.state.error = error
                if not hasattr(http.state, "context"):
                    self._refuse(http, error)
                raise

        return handle

    def _enter(self, http: Request, account: Key) -> None:
        http.state.tickets.append(self._limiter.admit(account, time.monotonic()))

    def _refuse(self, http: Request, error: Exception) -> None:
        """A request that ended before it had a context."""
        self.refused(error)
        _leave(http.state.tickets, 0, api_error(error).retryable)

    def refused(self, error: Exception) -> None:
        if (reason := api_error(error).refusal) is not None:
            self.metrics.refused(reason)

    async def forward(self, http: Request) -> Response:
        raw, body = await read_object(http, self._max_body)
        context = self._admit(http, raw, body)
        self.spans.start(context, http.headers)
        self._in_flight[context.route.name] += 1
        if self._mirrors(context.route):
            self.mirror.admit(context, self._in_flight[context.route.name])
            self.mirror.begun(context, self.proxy.serves_candidate(context))
        return await self.proxy.respond(http, context, self._finished)

    def _admit(self, http: Request, raw: bytes, body: dict[str, Any]) -> RequestContext:
        path, key = http.url.path, http.state.key
        route = self._route(http, path, body, key)
        if route.limits.model_fields_set:
            self._enter(http, route.account)
        timeout = route.timeout_s
        context = http.state.context = RequestContext(
            id=request_id(http.scope),
            path=path,
            route=route,
            key=key,
            headers=self._passed_on(http),
            raw=raw,
            body=body,
            conversation=conversation_of(http.headers, key, body),
            deadline=None if timeout is None else asyncio.get_running_loop().time() + timeout,
            tickets=tuple(http.state.tickets),
            cohort=cohort_of(http.headers),
        )
        accounts = [one.limits.tokens_per_minute for one in (key, route.account) if one is not None]
        if any(limit is not None for limit in accounts):
            context.counts_tokens = True
            request_usage(context)
        return context

    def _route(self, http: Request, path: str, body: dict[str, Any], key: Key | None) -> Route:
        given = body.get("model")
        model = given if isinstance(given, str) else ""
        route = self.config().route(path, http.headers, model, key)
        if route is None:
            raise ApiError(
                404,
                f"no route takes the model {short(model)} at {path}: GET /v1/models lists what is served",
                param="model",
                code="model_not_found",
            )
        if route.keys is not None and (key is None or key.name not in route.keys):
            raise ApiError(
                403,
                f"the route {route.name} is not open to this key",
                "permission_error",
                code="route_not_allowed",
                refusal=FORBIDDEN,
            )
        return route

    def _passed_on(self, http: Request) -> list[tuple[str, str]]:
        """A client's key that is the gate's own stays here."""
        own = {REQUEST_ID} | ({"authorization"} if self._keys is not None else set())
        passed = [(name, value) for name, value in request_headers(http.headers) if name not in own]
        return [*passed, (REQUEST_ID, request_id(http.scope))]

    def _finished(self, context: RequestContext, error: BaseException | None) -> None:
        """Called once for every context."""
        if error is not None:
            context.error = context.error or error_code(error)
        outcome = context.error or f"http_{context.status}"
        seconds = time.perf_counter() - context.arrived
        self.metrics.finished(
            context.route.name,
            context.upstream,
            outcome,
            context.first_byte_s,
            seconds,
            len(context.tried),
        )
        _leave(context.tickets, context.tokens, refused=False)
        self._in_flight[context.route.name] -= 1
        self.mirror.finished(context)
        self._record_served(context)
        self.spans.finish(context, context.error)

    def _save_pair(self, pair: Pair) -> bool:
        store = self._store
        return store is not None and self.writer.submit(lambda: store.save_pair(pair))

    def _save_window(self, experiment: str, window: UpstreamWindow) -> None:
        if (store := self._store) is not None:
            self.writer.submit(lambda: store.save_window(experiment, window))

    def _record_served(self, context: RequestContext) -> None:
        """So that feedback finds its arm."""
        store = self._store
        if store is None or context.route.mirror is None or context.error is not None:
            return
        served = Served(
            request=context.id,
            response=context.response_id,
            created=context.created,
            client="" if context.key is None else context.key.name,
            experiment=context.route.experiment,
            route=context.route.name,
            cohort=context.cohort,
            arm=context.answered_by,
        )
        self.writer.submit(lambda: store.save_served(served))

    async def feedback(self, http: Request) -> Response:
        """A user's word on an answer, by the id of the request or of the response."""
        _, given = await read_request(http, FeedbackRequest, MAX_FEEDBACK)
        if given.thumbs is None and not given.escalation:
            raise ApiError(400, "thumbs: missing: expected thumbs, escalation or both", param="thumbs")
        store = self._store
        served = None if store is None else await asyncio.to_thread(store.served, given.request_id)
        client = "" if http.state.key is None else http.state.key.name
        if store is None or served is None or served.client != client:
            raise ApiError(
                404,
                f"there is no request {short(given.request_id)} of a route with a candidate",
                param="request_id",
                code="request_not_found",
            )
        word = Feedback(
            request=served.request,
            arm=served.arm,
            created=time.time(),
            thumbs=given.thumbs,
            escalation=given.escalation,
            route=served.route,
            cohort=served.cohort,
        )
        await asyncio.to_thread(store.save_feedback, word, served.experiment)
        self.metrics.feedback(served.arm, given.thumbs or "escalation")
        _leave(http.state.tickets, 0, refused=False)
        return JSONResponse({"object": "feedback", "request_id": served.request})

    async def models(self, http: Request) -> Response:
        """The models of all upstreams, each once, and the names that routes wait for."""
        config, (at, listed) = self.config(), self._models
        if time.monotonic() - at > MODELS_S:
            states = list(self.client.states.values())
            headers = self._passed_on(http)
            lists = await asyncio.gather(*(listed_models(self.client, state, headers) for state in states))
            listed = [entry for entries in lists for entry in entries]
            self._models = (time.monotonic(), listed)
        _leave(http.state.tickets, 0, refused=False)
        merged = {entry["id"]: entry for entry in reversed([*listed, *_named(config)])}
        shown = [
            entry
            for name, entry in sorted(merged.items())
            if config.route(PATHS[0], http.headers, name, http.state.key) is not None
        ]
        return JSONResponse({"object": "list", "data": shown})

    async def health(self, http: Request) -> Response:
        self.config()
        states = {name: state.breaker.state for name, state in self.client.states.items()}
        return JSONResponse({"status": "ok", "upstreams": states})

    async def ready(self, http: Request) -> Response:
        return JSONResponse({"ready": self.open}, 200 if self.open else 503)

    async def render_metrics(self, http: Request) -> Response:
        body, content_type = self.metrics.render(http.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def version(self, http: Request) -> Response:
        return JSONResponse({"version": __version__})


def cohort_of(headers: Mapping[str, str]) -> str:
    """Of a client that names one; it becomes a label, so that it must be short and plain."""
    given = headers.get(COHORT, "")
    return given if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", given) else ""


def _named(config: GateConfig) -> Iterator[dict[str, Any]]:
    """Models that a route knows by a name of its own."""
    for route in config.routes:
        name = None if route.match is None else route.match.model
        if name is not None and not set(name) & set("*?["):
            yield {"id": name, "object": "model", "created": 0, "owned_by": "paceline-gate"}


def _leave(tickets: "list[Ticket] | tuple[Ticket, ...]", tokens: int, refused: bool) -> None:
    for ticket in tickets:
        ticket.leave(tokens, time.monotonic(), refused)


def _figures(context: RequestContext) -> Iterator[str]:
    """Of a request, in the access log."""
    yield f"route={context.route.name}"
    yield f"upstream={'>'.join(context.tried) or '-'}"
    if context.first_byte_s is not None:
        yield f"first={context.first_byte_s:.3f}"
    if context.error is not None:
        yield f"error={context.error}"
