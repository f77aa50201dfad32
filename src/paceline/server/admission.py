"""Admission: API key, route, limits of the key, tenant, priority and deadline. Makes a RequestContext."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from paceline.errors import PromptTooLong, ShuttingDown
from paceline.output import RequestOutput
from paceline.server.model_pool import ModelPool, ServedModel
from paceline.server.online.online_trainer import OnlineTrainer
from paceline.server.openai.protocol import AdmittedRequest
from paceline.server.routes import Route, RouteFile, RouteRequest, Routes
from paceline.server.telemetry.otel import NO_SPANS, RequestSpan, Spans
from paceline.server.tool_prediction import ToolPrediction
from paceline.web.api_errors import ApiError
from paceline.web.api_keys import ApiKeys, Key, tenant
from paceline.web.conversation import conversation_of
from paceline.web.rate_limit import RateLimiter, Ticket, over_limit
from paceline.web.request_id import new_request_id

if TYPE_CHECKING:
    from paceline.server.async_engine import AsyncEngine


@dataclass(slots=True, kw_only=True)
class RequestContext:
    """One request in flight, from its admission until the request log has its end."""

    id: str  # of the response
    endpoint: str  # the path of the URL
    model: ServedModel
    route: Route
    tenant: str
    anonymous: bool  # no key and no name: strangers share its tenant
    client: str  # the name of its key, or empty: answers are shared out among clients first
    conversation: str  # a hash that its turns share
    priority: int
    deadline: float | None  # by time.monotonic
    remember: bool  # drafters may remember it
    body: Mapping[str, Any]  # as sent
    request: AdmittedRequest
    span: RequestSpan
    ticket: Ticket | None
    large: bool = False  # its body is
    outputs: list[RequestOutput] = field(default_factory=list)  # one for each choice that was submitted
    tool_prediction: ToolPrediction | None = None  # where the request asks for predicted tool calls
    error: str | None = None  # the code of the error that ended it
    refusal: str | None = None  # why it was refused before its first pass
    loaded: "AsyncEngine | None" = None  # of its model, from when that is loaded until its end
    at_end: list[Callable[[], object]] = field(default_factory=list)  # called once its end is recorded
    arrived: float = field(default_factory=time.perf_counter)
    created: float = field(default_factory=time.time)  # unix seconds

    @property
    def engine(self) -> "AsyncEngine":
        assert self.loaded is not None, "its model has not been waited for"
        return self.loaded

    def hold(self, engine: "AsyncEngine", release: Callable[[], None]) -> "AsyncEngine":
        """Its model is loaded, until `release` is called at its end."""
        self.loaded = engine
        self.at_end.append(release)
        return engine

    def check_prompt_length(self, tokens: int) -> None:
        limit = self.route.max_prompt_tokens
        if limit is not None and tokens > limit:
            raise PromptTooLong(f"the prompt has {tokens} tokens; the route {self.route.name} takes {limit}")

    def charge(self, tokens: int) -> None:
        """Charges the key all tokens that the request may use, before it runs. The request log settles."""
        rejection = None if self.ticket is None else self.ticket.charge(tokens, time.monotonic())
        if rejection is not None:
            more = f"this request may use {tokens:,} tokens; a smaller max_tokens or n needs fewer"
            raise over_limit(rejection, f"; {more}")


class Admission:
    """Decides which requests run, and on which terms. Keys, routes, spans and trainer are optional."""

    def __init__(
        self,
        models: ModelPool,
        keys: ApiKeys | None = None,
        routes: RouteFile | None = None,
        spans: Spans = NO_SPANS,
        remember: bool = True,
        trainer: OnlineTrainer | None = None,
        single_user: bool = False,
        local: bool = False,
    ) -> None:
        self.open = False  # new requests are admitted
        self.in_flight: dict[str, RequestContext] = {}  # by id, until the request log has their end
        self._models = models
        self._keys = keys
        self._route_file = routes
        self._spans = spans
        self._remember = remember
        self._trainer = trainer
        self._single_user = single_user  # requests without a key and a name are one user's
        self._local = local  # without keys, only this machine's users reach the server
        self._limiter = RateLimiter()
        self._set_routes(Routes() if routes is None else routes.current())

    def authenticate(self, headers: Mapping[str, str]) -> Key | None:
        if self._keys is None:
            return None
        return self._keys.authenticate(headers)

    def is_operator(self, key: Key | None) -> bool:
        """May see the requests of others. Without keys: all, where the server is one user's or local."""
        if self._keys is None:
            return self._single_user or self._local
        return key is not None and key.operator

    @property
    def key_names(self) -> Sequence[str]:
        return () if self._keys is None else [key.name for key in self._keys.current().keys]

    def enter(self, key: Key | None) -> Ticket | None:
        """Counts a request to any endpoint, before its body is read. The ticket's holder must leave."""
        if key is None:
            return None
        return self._limiter.admit(key, time.monotonic())

    def admit(
        self,
        http: Request,
        body: Mapping[str, Any],
        request: AdmittedRequest,
        id_prefix: str,
        id_bytes: int = 12,
    ) -> RequestContext:
        """From here on the end of the request is recorded; an error before this is counted as a refusal."""
        model = self._models.find(request.model)
        if not self.open:
            raise ShuttingDown
        path, key = http.url.path, http.state.key
        route = self._route(path, http.headers, {**body, "model": body.get("model") or model.name})
        names = (request.end_user, request.cache_key, request.cache_salt)
        context = RequestContext(
            endpoint=path,
            model=model,
            route=route,
            tenant=tenant(key, *names),
            anonymous=key is None and not self._single_user and all(name is None for name in names),
            client="" if key is None else key.name,
            conversation=conversation_of(http.headers, key, body),
            priority=_priority(key, request.priority, route.priority),
            deadline=None if route.timeout_s is None else time.monotonic() + route.timeout_s,
            remember=request.remember is not False and route.remember is not False and self._remember,
            body=body,
            request=request,
            span=self._spans.start(path, model.name, http.headers),
            ticket=http.state.ticket,
            large=http.state.large,
            id=new_request_id(http.scope, id_prefix, id_bytes),
        )
        http.state.context = self.in_flight[context.id] = context
        context.at_end.append(partial(self.in_flight.pop, context.id, None))
        if self._trainer is not None:
            self._trainer.request_arrived()
        return context

    def _route(self, path: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> Route:
        return self._read_routes().find(RouteRequest.of_body(path, headers, body))

    @property
    def routes(self) -> Sequence[Route]:
        """As they are now, in the order they are tried."""
        self._read_routes()
        return self._routes.routes

    def _read_routes(self) -> Routes:
        routes = self._routes if self._route_file is None else self._route_file.current()
        if routes is not self._routes:  # the file was read again
            self._set_routes(routes)
        return routes

    def _set_routes(self, routes: Routes) -> None:
        self._routes = routes
        predictions = {route.name: route.predicted for route in routes.routes if route.predicted is not None}
        for model in self._models.models:
            model.metrics.add_routes(route.name for route in routes.routes)
            model.metrics.accounting.predict(predictions)


def _priority(key: Key | None, own: int | None, of_route: int) -> int:
    """Within the bound of the key. own: what the request asks for, if it does."""
    if key is None:
        return (own or 0) + of_route
    limit = key.limits.max_priority
    if own is not None and own > (limit or 0):
        raise ApiError(
            400, f"priority: {own} is too high, this key has at most {limit or 0}", param="priority"
        )
    total = (own or 0) + of_route
    return total if limit is None else min(total, limit)
