"""Forwards requests: chooses upstreams, retries before the first byte, streams event by event.

A stream is passed on in whole events as they come. Nothing but comments has been sent while another upstream
can still take over; after that an upstream's failure becomes the stream's last event.
"""

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from random import Random
from typing import Any, Final, NamedTuple

from opentelemetry.trace import Span
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.errors import ShuttingDown
from paceline.gate.gateway.circuit_breaker import RetryBudget
from paceline.gate.gateway.config import Route
from paceline.gate.gateway.metrics import GateMetrics
from paceline.gate.gateway.request_context import CHUNKED, RequestContext, choose, point
from paceline.gate.gateway.spans import GateSpans
from paceline.gate.gateway.upstream_client import (
    RETRYABLE,
    Answer,
    EventSplitter,
    UpstreamClient,
    UpstreamFailure,
    UpstreamState,
    WholeAnswer,
)
from paceline.gate.leg_recorder import LegRecorder
from paceline.web.api_errors import ApiError, api_error
from paceline.web.streaming import DONE, KEEP_ALIVE, cancelled_by_disconnect, event

log = logging.getLogger("paceline.gate")

UPSTREAM: Final = "x-paceline-upstream"  # the header that names who answered
ID_WITHIN: Final = 500  # bytes from the start of an answer
_ID: Final = re.compile(rb'"id": ?"([!#-\[\]-~]{1,128})"')
_LAST_EVENTS: Final = (b"event: response.completed", b"event: response.failed", b"event: response.incomplete")
MESSAGES: Final = {
    "connect": "cannot be reached",
    "timeout": "did not answer in time",
    "disconnect": "ended its answer before the end",
    "breaker_open": "has failed too often",
}


class Head(NamedTuple):
    status: int
    headers: list[tuple[str, str]]


Parts = AsyncGenerator[Head | bytes, None]
Finish = Callable[[RequestContext, BaseException | None], None]
CandidateShare = Callable[[Route], float]  # of users that the candidate serves


class Proxy:
    """candidate_share: of a route, by its rollout. rng: for the jitter between attempts."""

    def __init__(
        self,
        client: UpstreamClient,
        metrics: GateMetrics,
        spans: GateSpans,
        candidate_share: CandidateShare,
        rng: Random,
    ) -> None:
        self._client, self._metrics, self._spans = client, metrics, spans
        self._candidate_share, self._rng = candidate_share, rng
        self._budgets: dict[str, RetryBudget] = {}
        self._answers: set[Answer] = set()
        self._stopping = False

    def stop(self) -> None:
        """Ends what still runs with an error."""
        self._stopping = True
        for answer in list(self._answers):
            answer.cut()

    async def respond(self, http: Request, context: RequestContext, finish: Finish) -> Response:
        """The response begins when it is known who answers. `finish` is called once, at its very end."""
        parts = self._parts(context)
        try:
            async with cancelled_by_disconnect(http):
                head = await anext(parts)
        except BaseException as error:
            await parts.aclose()
            finish(context, error)
            raise
        assert isinstance(head, Head)
        return _Forwarded(context, head, parts, finish)

    def order(self, context: RequestContext) -> list[str]:
        """Upstreams in the order they are tried. Conversations stay with their upstream."""
        route = context.route
        others = sorted(route.upstreams, key=lambda name: -route.upstreams[name])
        first = choose(route.upstreams, point(context.conversation, f"upstream:{route.name}"))
        order = [first, *(name for name in others if route.upstreams[name])]
        if route.mirror is not None and self.serves_candidate(context):
            order.insert(0, route.mirror.candidate)
        return list(dict.fromkeys([*order, *route.fallback]))

    def serves_candidate(self, context: RequestContext) -> bool:
        """The rollout gives this conversation to the candidate; as the share grows, it keeps it."""
        share = self._candidate_share(context.route)
        return share > 0 and point(context.conversation, f"rollout:{context.route.name}") < share

    def _next(self, context: RequestContext) -> UpstreamState:
        states = [self._client.states[name] for name in self.order(context) if name in self._client.states]
        usable = [state for state in states if state.available]
        for state in usable:
            if state.name not in context.tried:
                return state
        if not usable:
            wait = min((state.breaker.retry_after_s for state in states), default=1.0)
            message = f"no upstream of the route {context.route.name} is available: try again later"
            raise ApiError(
                503, message, "server_error", code="no_upstream", retry_after=max(1.0, wait), refusal=None
            )
        return usable[0]

    def _may_retry(self, context: RequestContext) -> bool:
        if self._stopping or len(context.tried) >= context.route.retries.max_attempts:
            return False
        return self._budget(context.route).withdraw()

    def _budget(self, route: Route) -> RetryBudget:
        budget = self._budgets.get(route.name)
        config = route.retries
        if budget is None or (budget.share, budget.min_per_s) != (config.budget, config.min_per_s):
            budget = self._budgets[route.name] = RetryBudget(config.budget, config.min_per_s)
        return budget

    async def _parts(self, context: RequestContext) -> Parts:
        """A Head, then bytes; an error before the Head is raised."""
        self._budget(context.route).request()
        progress = _Progress()
        while True:
            try:
                state = self._next(context)
            except ApiError as error:
                if not progress.opened:
                    raise
                yield self._failure_events(context, error)
                return
            context.tried.append(state.name)
            span = self._spans.leg(context, state)
            try:
                async with aclosing(self._attempt(context, state, progress, span)) as parts:
                    async for part in parts:
                        yield part
                return
            except UpstreamFailure as failure:
                self._metrics.failure(context.route.name, state.name, failure.code)
                span.set_attribute("error.type", failure.code)
                if not progress.begun and self._may_retry(context):
                    await asyncio.sleep(self._backoff(context))
                    continue
                async for part in self._given_up(context, state, failure, progress):
                    yield part
                return
            finally:
                span.end()

    async def _given_up(
        self, context: RequestContext, state: UpstreamState, failure: UpstreamFailure, progress: "_Progress"
    ) -> Parts:
        """The upstream's own error response, or one of ours; as an event, where the response has begun."""
        context.error = failure.code
        if context.recorder is not None:
            if failure.answer is not None:
                context.recorder.status(failure.answer.status)
            context.recorder.fail(failure.code)
        if failure.answer is not None and not progress.opened:
            yield _head(state, failure.answer)
            yield failure.answer.body
            return
        error = self._error(state, failure)
        if not progress.opened:
            raise error
        yield self._failure_events(context, error)

    async def _attempt(
        self, context: RequestContext, state: UpstreamState, progress: "_Progress", span: Span
    ) -> Parts:
        body = await context.body_for(state.upstream)
        headers = self._spans.propagated(context.headers, span)
        sending = self._client.send(state, "POST", context.path, headers, body, context.deadline)
        if context.pair_id and context.recorder is None:
            context.recorder = LegRecorder(state.name)
        if context.recorder is not None:
            retries, fallback = len(context.tried) - 1, len(set(context.tried)) > 1
            context.recorder.set(upstream=state.name, retries=retries, fallback=fallback)
        async with sending as answer:
            self._answers.add(answer)
            try:
                if answer.streams:
                    async with aclosing(self._events(context, state, answer, progress)) as parts:
                        async for part in parts:
                            yield part
                    return
                whole = await answer.whole(context.deadline)
            finally:
                self._answers.discard(answer)
            if whole.status in RETRYABLE:
                raise UpstreamFailure(f"http_{whole.status}", whole)
        if progress.opened:
            raise UpstreamFailure(f"http_{whole.status}")
        self._count_whole(context, whole)
        yield _head(state, whole)
        yield whole.body

    async def _events(
        self, context: RequestContext, state: UpstreamState, answer: Answer, progress: "_Progress"
    ) -> Parts:
        """Whole events. A stream that ends without its last event has been cut."""
        splitter, last = EventSplitter(), b""
        recorder = context.recorder
        if recorder is not None:
            recorder.status(answer.status)
        async with aclosing(answer.raw(context.deadline)) as raw:
            async for data in raw:
                events = splitter.push(data)
                if data and not events:
                    continue
                if recorder is not None:
                    recorder.feed(events)
                if context.hides_usage or context.counts_tokens:
                    events = _without_usage(events, context)
                if not progress.opened:
                    progress.opened = True
                    context.status = answer.status
                    yield Head(answer.status, [*answer.headers, (UPSTREAM, state.name)])
                if not data:
                    yield KEEP_ALIVE
                if not progress.begun and b"data:" in events:
                    progress.begun = True
                    context.response_id = _response_id(events)
                    context.first_byte_s = time.perf_counter() - context.arrived
                if events:
                    last = events
                    context.complete = answer.complete = _ended(events)  # clients leave at the last event
                    yield events
        if not splitter.complete or (context.path in CHUNKED and not _ended(last)):
            raise UpstreamFailure("disconnect")

    def _count_whole(self, context: RequestContext, whole: WholeAnswer) -> None:
        context.status, context.complete = whole.status, True
        context.first_byte_s = time.perf_counter() - context.arrived
        if context.recorder is not None:
            context.recorder.status(whole.status)
            if whole.status < 400:
                context.recorder.body(whole.body)
        context.response_id = _response_id(whole.body)
        if context.counts_tokens and whole.status < 400:
            context.tokens = _total_tokens(_json(whole.body))

    def _backoff(self, context: RequestContext) -> float:
        longest: float = context.route.retries.backoff_s * 2 ** (len(context.tried) - 1)
        return longest * (0.5 + self._rng.random() / 2)

    def _error(self, state: UpstreamState, failure: UpstreamFailure) -> ApiError:
        if self._stopping:
            return api_error(ShuttingDown())
        timed_out = failure.code == "timeout"
        reason = MESSAGES.get(failure.code, "failed")
        return ApiError(
            504 if timed_out else 502,
            f"the upstream {state.name} {reason}: try again",
            "timeout_error" if timed_out else "server_error",
            code=f"upstream_{failure.code}",
            refusal=None,
        )

    def _failure_events(self, context: RequestContext, error: ApiError) -> bytes:
        context.error = context.error or error.code
        if context.path in CHUNKED:
            return event(error.body) + DONE
        return event({"type": "error", **error.body["error"]})


class _Progress:
    __slots__ = ("begun", "opened")

    def __init__(self) -> None:
        self.opened = False  # the response's head was sent
        self.begun = False  # and an event besides comments: no other upstream can take over


class _Forwarded(Response):
    """Sends the parts as they come; closes them, and so the upstream's answer, however it ends."""

    def __init__(self, context: RequestContext, head: Head, parts: Parts, finish: Finish) -> None:
        self._exchange, self._head, self._parts, self._finish = context, head, parts, finish
        self.background = None
        self.status_code = head.status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure: BaseException | None = None
        headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in self._head[1]]
        try:
            async with cancelled_by_disconnect(Request(scope, receive)), aclosing(self._parts) as parts:
                await send({"type": "http.response.start", "status": self._head.status, "headers": headers})
                async for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientDisconnect as error:
            failure = None if self._exchange.complete else error
        except BaseException as error:
            failure = error
            raise
        finally:
            await self._parts.aclose()
            self._finish(self._exchange, failure)


def _head(state: UpstreamState, whole: WholeAnswer) -> Head:
    length = ("content-length", str(len(whole.body)))
    return Head(whole.status, [*whole.headers, length, (UPSTREAM, state.name)])


def _response_id(data: bytes) -> str:
    """Of the first object in an answer, which begins with its id."""
    match = _ID.search(data, 0, ID_WITHIN)
    return "" if match is None else match[1].decode()


def _ended(last: bytes) -> bool:
    """They have the last event of a stream: DONE or an error, or that of a response."""
    final = last.rstrip().rpartition(b"\n\n")[2]
    return final.endswith(b"[DONE]") or final.startswith((b'data: {"error"', *_LAST_EVENTS))


def _without_usage(events: bytes, context: RequestContext) -> bytes:
    """Counts the tokens of a usage chunk, and drops the chunk if the client did not request it."""
    if b'"usage"' not in events:
        return events
    passed = []
    for one in events.split(b"\n\n"):
        chunk = _json(one.partition(b"data:")[2]) if b'"usage"' in one else {}
        if chunk.get("usage"):
            context.tokens = _total_tokens(chunk)
            if context.hides_usage and chunk.get("choices") == []:
                continue
        passed.append(one)
    return b"\n\n".join(passed)


def _json(data: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _total_tokens(answer: Mapping[str, Any]) -> int:
    usage = answer.get("usage")
    total = usage.get("total_tokens") if isinstance(usage, dict) else None
    return total if isinstance(total, int) else 0
