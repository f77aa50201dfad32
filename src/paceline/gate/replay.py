"""The offline gate: cases on both upstreams, one pair after another, until the verdict is clear.

The legs of a pair follow one another, and which one goes first changes in the order ABBA, so that neither
gets the warm caches or the quiet moments. Verdicts hold however often they are computed: a look is free.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import httpx

from paceline.errors import UsageError, one_line
from paceline.gate.cases import CHAT, Case
from paceline.gate.evaluators import Reference, evaluated
from paceline.gate.pair import Divergence, Leg, Order, Pair, common_prefix
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
    if pair.greedy and pair.same is False:
        pair = await explained(client, arms[0], pair)
    return pair


async def _judged(client: httpx.AsyncClient, judge: Judge, pair: Pair, case: Case) -> Pair:
    """Both legs without their names, so that the judge cannot prefer one."""
    made = [await judge.score(client, case.request, leg, case.reference) for leg in pair.legs()]
    legs = [
        leg if score is None else replace(leg, scores={**leg.scores, "judge": score})
        for leg, score in zip(pair.legs(), made, strict=True)
    ]
    return replace(pair, baseline=legs[0], candidate=legs[1])


async def explained(client: httpx.AsyncClient, baseline: Upstream, pair: Pair) -> Pair:
    """With the baseline's lead of its own token over the candidate's, at the first divergence.

    The baseline writes its answer again with log-probabilities. Only texts of chats have them; the divergence
    of others, and of answers that are not the same again, stays unexplained.
    """
    if pair.endpoint != CHAT or pair.request is None or pair.baseline.tool_calls or pair.candidate.tool_calls:
        return pair
    request = {**baseline.body(pair.request), "stream": False, "logprobs": True, "top_logprobs": 20}
    request.pop("stream_options", None)
    url = baseline.endpoint(pair.endpoint)
    try:
        response = await client.post(url, json=request, headers=baseline.headers, timeout=TIMEOUT_S)
        choice = response.raise_for_status().json()["choices"][0]
        same = choice["message"]["content"] == pair.baseline.text
        explained_by = (
            first_divergence(choice["logprobs"]["content"], pair.candidate.text or "") if same else None
        )
    except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError):
        return pair
    return pair if explained_by is None else replace(pair, divergence=explained_by)


def first_divergence(tokens: Sequence[Mapping[str, Any]], text: str) -> Divergence | None:
    """Of the baseline's tokens, each with its alternatives, from the candidate's text.

    The lead is over the longest alternative that the candidate's text goes on with; one that is not among the
    alternatives is less probable than all of them. A text that ends there has no lead: its end is no text.
    """
    output, done = text.encode("utf-8", "replace"), b""
    for index, token in enumerate(tokens):
        written = _bytes(token)
        if output.startswith(done + written):
            done += written
            continue
        character = common_prefix("".join(_bytes(t).decode("utf-8", "replace") for t in tokens), text)
        lead = _lead(token, output[len(done) :])
        return Divergence(character, index, lead)
    return None


def _lead(token: Mapping[str, Any], rest: bytes) -> float | None:
    others = [other for other in token["top_logprobs"] if _bytes(other) != _bytes(token)]
    if not rest or not others:
        return None
    fitting = [other for other in others if _bytes(other) and rest.startswith(_bytes(other))]
    last = min(others, key=lambda other: float(other["logprob"]))
    rival = max(fitting, key=lambda other: len(_bytes(other)), default=last)
    return float(token["logprob"] - rival["logprob"])


def _bytes(token: Mapping[str, Any]) -> bytes:
    raw = token.get("bytes")
    return bytes(raw) if raw is not None else str(token["token"]).encode()
