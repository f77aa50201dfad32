"""The offline gate: cases on both upstreams, one pair after another, until the verdict is clear.

The legs of a pair follow one another, and which one goes first changes in the order ABBA, so that neither
gets the warm caches or the quiet moments. Verdicts hold however often they are computed: a look is free.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import aiohttp

from paceline.errors import UsageError
from paceline.gate.cases import Case
from paceline.gate.divergence import rescoring_request, with_lead
from paceline.gate.evaluators import evaluated
from paceline.gate.judge import Judge, judged
from paceline.gate.pair import Leg, Order, Pair
from paceline.gate.policy import Policy
from paceline.gate.upstream import (
    TIMEOUT_S,
    Upstream,
    http_session,
    post_json,
    read_metrics,
    run_leg,
    served_models,
)
from paceline.gate.upstream_metrics import with_counters
from paceline.gate.verdict import Verdict, decide

LOOK_EVERY: Final = 10  # pairs
MAX_FAILURES: Final = 20  # pairs in a row that the baseline did not answer
COUNTED_S: Final = 0.05  # until a server's counters have the last token of an answer
PACELINE: Final = "paceline"  # `owned_by` in GET /v1/models
COUNTS_CHUNKS: Final = (PACELINE, "vllm")  # they take `continuous_usage_stats`


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
    replay: Replay,
    cases: Iterable[Case],
    progress: Callable[[Pair, Verdict | None], None] = lambda *_: None,
    earlier: Sequence[Pair] = (),
) -> GateRun:
    """progress: called with each pair, and the verdict where one was computed.

    earlier: pairs of a run that was cut. They count, and their cases do not run again.
    """
    pairs, answered = list(earlier), {pair.id for pair in earlier}
    async for pair in run_pairs(replay, (case for case in cases if case.id not in answered)):
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
    async with http_session() as session:
        arms = [await _prepared(session, arm) for arm in (replay.baseline, replay.candidate)]
        for index, case in enumerate(cases):
            pair = await _run_pair(session, replay, arms, case, index)
            if index >= replay.warmup:
                yield pair


@dataclass(frozen=True, slots=True)
class _Arm:
    upstream: Upstream
    has_metrics: bool


async def _prepared(session: aiohttp.ClientSession, upstream: Upstream) -> _Arm:
    """With the model it serves, and the report on speculation where it has one."""
    models = await served_models(session, upstream)
    if not models:
        raise UsageError(f"the {upstream.name} at {upstream.url} serves no model")
    owner = models[0].get("owned_by")
    extra = {"metrics": True} if owner == PACELINE else {}
    prepared = replace(
        upstream,
        model=upstream.model or str(models[0].get("id")),
        extra_body={**extra, **upstream.extra_body},
        counts_chunks=owner in COUNTS_CHUNKS,
    )
    return _Arm(prepared, await read_metrics(session, prepared) is not None)


async def _run_pair(
    session: aiohttp.ClientSession, replay: Replay, arms: list[_Arm], case: Case, index: int
) -> Pair:
    candidate_first = index % 4 in (1, 2)
    order: Order = "candidate_first" if candidate_first else "baseline_first"
    legs: dict[str, Leg] = {}
    for arm in reversed(arms) if candidate_first else arms:
        legs[arm.upstream.name] = await _run_leg(session, arm, case, replay.timeout_s)
    pair = Pair(
        id=case.id,
        created=time.time(),
        baseline=legs[arms[0].upstream.name],
        candidate=legs[arms[1].upstream.name],
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
    if replay.judge is not None:
        pair = await judged(session, replay.judge, pair, case.request, case.reference)
    return await explained(session, arms[0].upstream, pair)


async def _run_leg(session: aiohttp.ClientSession, arm: _Arm, case: Case, timeout_s: float) -> Leg:
    """With the growth of the upstream's counters meanwhile, for figures that its response does not have."""
    before = await read_metrics(session, arm.upstream) if arm.has_metrics else None
    leg = await run_leg(session, arm.upstream, case.endpoint, case.request, timeout_s=timeout_s)
    for _ in range(2):
        after = None if before is None else await read_metrics(session, arm.upstream)
        if before is None or after is None:
            return leg
        if (counted := with_counters(leg, after - before)) is not leg:
            return counted
        await asyncio.sleep(COUNTED_S)
    return leg


async def explained(session: aiohttp.ClientSession, baseline: Upstream, pair: Pair) -> Pair:
    """With the baseline's lead at the first divergence, where it can be had."""
    request = rescoring_request(pair, baseline.body(pair.request or {}))
    if request is None:
        return pair
    url = baseline.endpoint(pair.endpoint)
    try:
        return with_lead(pair, await post_json(session, url, request, baseline.headers, TIMEOUT_S))
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
        return pair
