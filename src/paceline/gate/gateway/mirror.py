"""Mirroring: a share of conversations is answered by baseline and candidate, and recorded as pairs.

The user's leg is never delayed: second legs have their own queue, concurrency and circuit breakers, and what
does not fit is dropped and counted. The gate executes no tools. Requests whose tools run in the server, or
that refer to its state, are not mirrored, and a second leg is never stored by its server.
"""

import asyncio
import hashlib
import json
import logging
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from opentelemetry.trace import Span

from paceline.gate.divergence import rescoring_request, with_lead
from paceline.gate.evaluators import evaluated
from paceline.gate.gateway.config import MirrorConfig, Route
from paceline.gate.gateway.metrics import GateMetrics
from paceline.gate.gateway.request_context import (
    CHUNKED,
    GENERATING,
    RequestContext,
    choose,
    point,
    request_usage,
)
from paceline.gate.gateway.spans import EXPERIMENT, PAIR, ROLE, GateSpans, set_leg
from paceline.gate.gateway.upstream_client import UpstreamClient, UpstreamFailure, UpstreamState
from paceline.gate.judge import judged
from paceline.gate.leg_recorder import LegRecorder
from paceline.gate.pair import Arm, Leg, Order, Pair
from paceline.log import log_error
from paceline.web.api_errors import CANCELLED

log = logging.getLogger("paceline.gate")

OPT_OUT: Final = ("x-paceline-mirror", "never")  # a header of requests that must not be mirrored
MIRRORED: Final = "x-paceline-mirror"  # a header of second legs: the pair's id
MAX_BYTES: Final = 2**20  # of a body that waits for its second leg
MAX_SEED: Final = 2**31 - 1
CLIENT_TOOLS: Final = frozenset({"function", "custom"})  # those that the client runs
SERVER_STATE: Final = ("previous_response_id", "conversation")
# Fields that do not change the answer.
_UNHASHED: Final = frozenset({"seed", "stream", "stream_options", "user", "metadata", "store"})

Save = Callable[[Pair], bool]  # False: there was no room


@dataclass(slots=True)
class _Job:
    """A second leg."""

    context: RequestContext
    config: MirrorConfig
    span: Span  # of the user's request
    ended: "asyncio.Future[Leg]"  # the user's leg
    order: Order


@dataclass(slots=True)
class _Lane:
    """The second legs of one experiment."""

    waiting: "deque[_Job]" = field(default_factory=deque)
    running: int = 0


class Mirror:
    """save: takes a pair at its end, without waiting. rng: seeds of requests that have none."""

    def __init__(
        self, client: UpstreamClient, metrics: GateMetrics, spans: GateSpans, save: Save, rng: Random
    ) -> None:
        self._client, self._metrics, self._spans = client, metrics, spans
        self._save, self._rng = save, rng
        self._lanes: defaultdict[str, _Lane] = defaultdict(_Lane)
        self._states: dict[str, UpstreamState] = {}  # apart from those of users
        self._judged_at: defaultdict[str, deque[float]] = defaultdict(deque)  # of the last minute
        self._tasks: set[asyncio.Task[None]] = set()
        self._jobs: dict[str, _Job] = {}  # by the id of their request, until the user's leg ends

    def admit(self, context: RequestContext, in_flight: int) -> None:
        """Decides whether the request becomes a pair, and prepares both legs alike. in_flight: of users."""
        config = context.route.mirror
        if config is None or point(context.conversation, f"mirror:{context.route.name}") >= config.share:
            return
        if (reason := ineligible(context)) is not None:
            self._metrics.mirrored(context.route.name, reason)
            return
        lane = self._lanes[context.route.experiment]
        if config.shed_above is not None and in_flight > config.shed_above:
            self._metrics.mirrored(context.route.name, "shed")
            return
        if len(lane.waiting) >= config.max_waiting:
            self._metrics.mirrored(context.route.name, "queue_full")
            return
        context.pair_id = f"pair-{secrets.token_hex(12)}"
        request_usage(context)
        if "seed" not in context.body and context.path in CHUNKED:
            context.added["seed"] = self._rng.randrange(MAX_SEED)

    def begun(self, context: RequestContext, candidate_first: bool) -> None:
        """The user's request is about to be sent."""
        config = context.route.mirror
        if config is None or not context.pair_id:
            return
        order: Order = "candidate_first" if candidate_first else "baseline_first"
        span = self._spans.request(context)
        span.set_attributes({PAIR: context.pair_id, EXPERIMENT: context.route.experiment})
        job = _Job(
            context,
            config,
            span,
            asyncio.get_running_loop().create_future(),
            "concurrent" if config.order == "concurrent" else order,
        )
        self._jobs[context.id] = job
        if config.order == "concurrent":
            self._enqueue(job)

    def finished(self, context: RequestContext) -> None:
        """The user's leg has ended, well or not."""
        job = self._jobs.pop(context.id, None)
        if job is None:
            return
        if context.error == CANCELLED or context.recorder is None:  # half an answer compares with nothing
            self._metrics.mirrored(context.route.name, "client_left")
            job.ended.cancel()
            return
        leg = context.recorder.leg()
        set_leg(job.span, leg)
        job.ended.set_result(leg)
        if job.config.order == "after":
            self._enqueue(job)

    def _enqueue(self, job: _Job) -> None:
        lane = self._lanes[job.context.route.experiment]
        if len(lane.waiting) >= job.config.max_waiting:
            self._metrics.mirrored(job.context.route.name, "queue_full")
            return
        lane.waiting.append(job)
        self._metrics.mirror_waiting.inc()
        self._advance(lane)

    def _advance(self, lane: _Lane) -> None:
        while lane.waiting and lane.running < lane.waiting[0].config.max_concurrent:
            job = lane.waiting.popleft()
            self._metrics.mirror_waiting.dec()
            lane.running += 1
            self._metrics.mirror_running.inc()
            task = asyncio.ensure_future(self._run(job))
            self._tasks.add(task)
            task.add_done_callback(lambda task: self._ended(task, lane))

    def _ended(self, task: "asyncio.Task[None]", lane: _Lane) -> None:
        self._tasks.discard(task)
        self._metrics.mirror_running.dec()
        lane.running -= 1
        if not task.cancelled():
            if (error := task.exception()) is not None:  # ours: those of upstreams are their legs'
                log_error(log, "a second answer failed", error)
            self._advance(lane)

    async def _run(self, job: _Job) -> None:
        context, route = job.context, job.context.route
        arm: Arm = "candidate" if context.arm == "baseline" else "baseline"
        name = job.config.candidate if arm == "candidate" else _baseline(context)
        state = self._state(name)
        if state is None or not state.available:
            self._metrics.mirrored(route.name, "breaker_open")
            return
        span = self._spans.leg(context, state, job.span)
        span.set_attributes({PAIR: context.pair_id, EXPERIMENT: route.experiment, ROLE: arm})
        second = await self._second_leg(context, job.config, state, span)
        set_leg(span, second)
        span.end()
        try:
            first = await job.ended
        except asyncio.CancelledError:
            if not job.ended.cancelled():
                raise
            return  # counted already
        legs: dict[Arm, Leg] = {context.arm: first, arm: second}

        def make() -> Pair:
            return evaluated(_pair(context, job.order, legs), context.body)  # the scores outlive the texts

        pair = await self._explained(context, job.config, await asyncio.to_thread(make), span)
        pair = await self._judged(context, job.config, pair)
        pair = pair if job.config.text else pair.without_text()
        self._metrics.mirrored(route.name, "recorded" if self._save(pair) else "store_full")

    def _state(self, name: str) -> UpstreamState | None:
        current = self._client.states.get(name)
        if current is None:
            return None
        state = self._states.get(name)
        if state is None:
            state = self._states[name] = UpstreamState(current.config, time.monotonic)
        elif state.config != current.config:
            state.configure(current.config)
        return state

    async def _second_leg(
        self, context: RequestContext, config: MirrorConfig, state: UpstreamState, span: Span
    ) -> Leg:
        body = await context.encoded(_second_body(context, state))
        headers = self._spans.propagated([*context.headers, (MIRRORED, context.pair_id)], span)
        deadline = asyncio.get_running_loop().time() + config.timeout_s
        recorder = LegRecorder(state.name)
        try:
            async with self._client.send(state, "POST", context.path, headers, body, deadline) as answer:
                recorder.status(answer.status)
                if answer.streams:
                    async for data in answer.raw(deadline):
                        if not recorder.feed(data):
                            break
                else:
                    whole = await answer.whole(deadline)
                    if whole.status < 400:
                        recorder.body(whole.body)
        except UpstreamFailure as failure:
            recorder.fail(failure.code)
        return recorder.leg()

    async def _explained(self, context: RequestContext, config: MirrorConfig, pair: Pair, span: Span) -> Pair:
        """With the baseline's lead at the first divergence of greedy answers, by a third request."""
        state = self._state(_baseline(context))
        if state is None or not state.available:
            return pair
        request = rescoring_request(pair, _second_body(context, state))
        if request is None:
            return pair
        body = json.dumps(request, ensure_ascii=False, separators=(",", ":")).encode()
        headers = self._spans.propagated([*context.headers, (MIRRORED, context.pair_id)], span)
        deadline = asyncio.get_running_loop().time() + config.timeout_s
        try:
            async with self._client.send(state, "POST", context.path, headers, body, deadline) as answer:
                whole = await answer.whole(deadline)
            return with_lead(pair, json.loads(whole.body)) if whole.status < 400 else pair
        except (UpstreamFailure, ValueError):
            return pair

    async def _judged(self, context: RequestContext, config: MirrorConfig, pair: Pair) -> Pair:
        """With the scores of a judge model, for a share of conversations and so many a minute at most."""
        chosen = config.judge
        if chosen is None or point(context.conversation, f"judge:{context.route.name}") >= chosen.share:
            return pair
        now, recent = time.monotonic(), self._judged_at[context.route.experiment]
        while recent and recent[0] <= now - 60:
            recent.popleft()
        if len(recent) >= chosen.max_per_minute:
            return pair
        recent.append(now)
        return await judged(self._client.session, chosen.judge(), pair, context.body)

    async def drain(self, seconds: float) -> None:
        """Waits for running second legs; those that wait still are dropped."""
        for lane in self._lanes.values():
            lane.waiting.clear()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        for task in self._tasks:
            task.cancel()


def ineligible(context: RequestContext) -> str | None:
    """Why a request is not mirrored; None: it may be."""
    body = context.body
    if context.path not in GENERATING:
        return "path"
    if OPT_OUT in ((name.lower(), value) for name, value in context.headers):
        return "opted_out"
    if len(context.raw) > MAX_BYTES:
        return "too_large"
    if any(body.get(name) not in (None, 1) for name in ("n", "best_of")):
        return "several_choices"
    if any(body.get(name) is not None for name in SERVER_STATE) or body.get("background"):
        return "server_state"
    tools = body.get("tools")
    kinds = {tool.get("type") if isinstance(tool, dict) else None for tool in tools or ()}
    if not kinds <= CLIENT_TOOLS or body.get("web_search_options") is not None:
        return "server_tools"
    return None


def _second_body(context: RequestContext, state: UpstreamState) -> dict[str, Any]:
    """As the user's, and never stored."""
    body = {**context.body, **context.changes_for(state.upstream)}
    if context.path == "/v1/responses":
        body["store"] = False  # where it is not given, OpenAI's servers store
    else:
        body.pop("store", None)
    return body


def _baseline(context: RequestContext) -> str:
    route: Route = context.route
    return choose(route.upstreams, point(context.conversation, f"upstream:{route.name}"))


def _pair(context: RequestContext, order: Order, legs: Mapping[Arm, Leg]) -> Pair:
    body = {**context.body, **context.added}
    seed, temperature = body.get("seed"), body.get("temperature")
    return Pair(
        id=context.pair_id,
        created=context.created,
        baseline=legs["baseline"],
        candidate=legs["candidate"],
        route=context.route.name,
        cohort=context.cohort,
        conversation=context.conversation,
        endpoint=context.path,
        order=order,
        experiment=context.route.experiment,
        prompt_hash=_prompt_hash(context.body),
        temperature=float(temperature) if isinstance(temperature, int | float) else None,
        seed=seed if isinstance(seed, int) else None,
        request=context.body,
    ).compared()


def _prompt_hash(body: Mapping[str, Any]) -> str:
    shaping = {name: value for name, value in body.items() if name not in _UNHASHED}
    text = json.dumps(shaping, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
