"""The offline gate: cases on both upstreams, one pair after another, until the verdict is clear.

The legs of a pair follow one another, and which one goes first changes in the order ABBA, so that neither
gets the warm caches or the quiet moments. Verdicts hold however often they are computed: a look is free.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import httpx

from paceline.errors import UsageError, one_line
from paceline.gate.cases import Case
from paceline.gate.divergence import rescoring_request, with_lead
from paceline.gate.evaluators import Reference, evaluated
from paceline.gate.pair import Leg, Order, Pair
from paceline.gate.policy import Policy
from paceline.gate.upstream import TIMEOUT_S, Upstream, http_client, run_leg, served_models
from paceline.gate.verdict import Verdict, decide

log = logging.getLogger("paceline.gate")

LOOK_EVERY: Final = 10  # pairs
MAX_FAILURES: Final = 20  # pairs in a row that the baseline did not answer
PACELINE: Final = "paceline"  # `owned_by` in GET /v1/models


@dataclass(frozen=True, slots=True)
class Judge:
    """A judge model behind a URL: POST {request, answer, reference} gives {"score": 0 to 1}."""

    url: str
    timeout_s: float = 60.0

    async def score(
        self, client: httpx.AsyncClient, request: Mapping[str, Any], leg: Leg, reference: Reference | None
    ) -> float | None:
        """None where the judge gives none: a pair without a score is not compared."""
        body = {
            "request": request,
            "answer": leg.text,
            "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in leg.tool_calls],
            "reference": reference.answer if reference else "",
        }
        try:
            response = await client.post(self.url, json=body, timeout=self.timeout_s)
            return min(1.0, max(0.0, float(response.raise_for_status().json()["score"])))
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            log.warning("the judge gave no score: %s", one_line(error))
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Settings of an offline run."""

    baseline: Upstream
    candidate: Upstream
    policy: Policy = field(default_factory=Policy)
    judge: Judge | None = None
    timeout_s: float = TIMEOUT_S
    warmup: int = 2  # pairs that do not count
    stop_early: bool = True  # as soon as the verdict is promote or roll back


@dataclass(frozen=True, slots=True)
class GateRun:
    verdict: Verdict
    pairs: tuple[Pair, ...]


async def run_gate(
    replay: Replay, cases: Iterable[Case], progress: Callable[[Pair, Verdict | None], None] = lambda *_: None
) -> GateRun:
    """progress: called with each pair, and the verdict where one was computed."""
    pairs: list[Pair] = []
    async for pair in run_pairs(replay, cases):
        pairs.append(pair)
        looked = decide(pairs, replay.policy) if len(pairs) % LOOK_EVERY == 0 else None
        progress(pair, looked)
        if looked is not None and looked.decision != "hold" and replay.stop_early:
            return GateRun(looked, tuple(pairs))
        if len(pairs) == MAX_FAILURES and not any(p.baseline.ok for p in pairs):
            first = pairs[0].baseline
            raise UsageError(f"the baseline answered none of {MAX_FAILURES} requests: {first.error}")
    if not pairs:
        raise UsageError(f"there is no request to compare, after {replay.warmup} that only warm up")
    return GateRun(decide(pairs, replay.policy), tuple(pairs))


async def run_pairs(replay: Replay, cases: Iterable[Case]) -> AsyncIterator[Pair]:
    async with http_client() as client:
        arms = [await _prepared(client, arm) for arm in (replay.baseline, replay.candidate)]
        for index, case in enumerate(cases):
            pair = await _run_pair(client, replay, arms, case, index)
            if index >= replay.warmup:
                yield pair


async def _prepared(client: httpx.AsyncClient, upstream: Upstream) -> Upstream:
    """With the model it serves, and the report on speculation where it has one."""
    models = await served_models(client, upstream)
    if not models:
        raise UsageError(f"the {upstream.name} at {upstream.url} serves no model")
    extra = {"metrics": True} if models[0].get("owned_by") == PACELINE else {}
    return replace(
        upstream,
        model=upstream.model or str(models[0].get("id")),
        extra_body={**extra, **upstream.extra_body},
    )


async def _run_pair(
    client: httpx.AsyncClient, replay: Replay, arms: list[Upstream], case: Case, index: int
) -> Pair:
    candidate_first = index % 4 in (1, 2)
    order: Order = "candidate_first" if candidate_first else "baseline_first"
    legs: dict[str, Leg] = {}
    for arm in reversed(arms) if candidate_first else arms:
        legs[arm.name] = await run_leg(client, arm, case.endpoint, case.request, timeout_s=replay.timeout_s)
    pair = Pair(
        id=case.id,
        created=time.time(),
        baseline=legs[arms[0].name],
        candidate=legs[arms[1].name],
        route=case.route,
        cohort=case.cohort,
        conversation=case.conversation,
        endpoint=case.endpoint,
        order=order,
        prompt_hash=case.prompt_hash,
        temperature=case.request.get("temperature"),
        seed=case.request.get("seed"),
        request=case.request,
    ).compared()
    pair = await asyncio.to_thread(evaluated, pair, case.request, case.reference)
    if replay.judge is not None and pair.ok:
        pair = await _judged(client, replay.judge, pair, case)
    return await explained(client, arms[0], pair)


async def _judged(client: httpx.AsyncClient, judge: Judge, pair: Pair, case: Case) -> Pair:
    """Both legs without their names, so that the judge cannot prefer one."""
    made = [await judge.score(client, case.request, leg, case.reference) for leg in pair.legs()]
    legs = [
        leg if score is None else replace(leg, scores={**leg.scores, "judge": score})
        for leg, score in zip(pair.legs(), made, strict=True)
    ]
    return replace(pair, baseline=legs[0], candidate=legs[1])


async def explained(client: httpx.AsyncClient, baseline: Upstream, pair: Pair) -> Pair:
    """With the baseline's lead at the first divergence, where it can be had."""
    request = rescoring_request(pair, baseline.body(pair.request or {}))
    if request is None:
        return pair
    url = baseline.endpoint(pair.endpoint)
    try:
        response = await client.post(url, json=request, headers=baseline.headers, timeout=TIMEOUT_S)
        return with_lead(pair, response.raise_for_status().json())
    except (httpx.HTTPError, ValueError):
        return pair
