"""Advice for tests: routes with made-up figures."""

from typing import Any

from paceline.advise.advice import Candidate, Interval, LengthPoint, LoadPoint, Measured, RouteAdvice
from paceline.advise.memory_estimate import MIB, MemoryEstimate
from paceline.advise.report import Advice
from paceline.advise.traffic import Spread, Workload

DEFAULT = ("grammar", "suffix", "ngram")
WORKLOAD = Workload(
    requests=40,
    conversations=10,
    turns=4.0,
    prompt_tokens=Spread(900, 2100, 1000.0),
    output_tokens=Spread(80, 240, 100.0),
    json_share=0.4,
    repetition=0.5,
    prefix_overlap=0.8,
    temperature=0.0,
    concurrency=1.5,
)


def around(value: float) -> Interval:
    return Interval(value, 0.97 * value, 1.03 * value)


def candidate(rate: float = 2.4, speedup: float = 1.9, turns: float = 1.4) -> Candidate:
    return Candidate(DEFAULT, 8, around(rate), around(speedup), around(turns), {"suffix": 12})


def advised(route: str = "agents", **given: Any) -> RouteAdvice:
    values: dict[str, Any] = {
        "workload": WORKLOAD,
        "decision": "speculate",
        "reason": "2.40 tokens per pass",
        "best": candidate(),
        "candidates": (candidate(), candidate(2.0, 1.5)),
        "lengths": (LengthPoint(0, 1.0, 1.0), LengthPoint(4, 2.0, 1.6), LengthPoint(8, 2.4, 1.5)),
        "loads": (LoadPoint(1, 1.9, 2.4), LoadPoint(4, 1.2, 1.9)),
        "concurrency": 2,
        "prefill_ms": 300.0,
        "decode_ms": 700.0,
        "outputs": 24,
        "replayed": 8,
        "left_out": {"prompts of more than 8192 tokens": 2},
        "own_text": True,
        "measured": Measured(2.2, 1.7),
        "answered": None,
        "match": {"prompt": "tools"},
        "by_batch": ((1, 8, 4), (9, 64, 0)),
    }
    return RouteAdvice(route=route, **(values | given))


def an_advice(*routes: RouteAdvice, **given: Any) -> Advice:
    bill = MemoryEstimate(
        {"weights": 98 * MIB}, {"block": 9 * MIB}, 1024 * MIB, 50_000, 800 * MIB, 2, 2340, 8000 * MIB
    )
    values: dict[str, Any] = {
        "target": "smollm2-135m",
        "machine": {"cpu": "x <y>"},
        "busy": True,
        "rejected": {},
    }
    costs = {256: dict.fromkeys((1, 2, 3, 4, 6, 8, 12, 16), 4.0)}
    return Advice(routes=routes, memory=bill, costs=costs, **(values | given))
