"""Pairs for the tests of the gate."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.gate.pair import Leg, Pair


def leg(scale: float = 1.0, **fields: Any) -> Leg:
    """11 tokens: the first after 0.1 s, the others 0.02 s apart, times the scale."""
    times = tuple(scale * (0.1 + 0.02 * i) for i in range(11))
    given: dict[str, Any] = {
        "status": 200,
        "finish_reason": "stop",
        "seconds": times[-1],
        "chunk_s": times,
        "prompt_tokens": 50,
        "completion_tokens": 11,
        "text": "some words",
        **fields,
    }
    return Leg(**given)


def pairs(
    count: int,
    ratio: float = 1.0,
    *,
    seed: int = 0,
    spread: float = 0.3,
    change: Callable[[int, Pair], Pair] = lambda i, pair: pair,
    **fields: Any,
) -> list[Pair]:
    """Greedy pairs with equal texts; the candidate takes `ratio` of the baseline's time, log-normal."""
    rng = np.random.default_rng(seed)
    made = []
    for i, (load, noise) in enumerate(rng.normal(size=(count, 2))):
        base = np.exp(0.5 * load)
        pair = Pair(
            id=f"p{i}",
            created=float(i),
            baseline=leg(base),
            candidate=leg(base * ratio * np.exp(spread * noise)),
            **{"temperature": 0.0, **fields},
        )
        made.append(change(i, pair).compared())
    return made


def scored(pair: Pair, name: str, baseline: float, candidate: float) -> Pair:
    return replace(
        pair,
        baseline=replace(pair.baseline, scores={name: baseline}),
        candidate=replace(pair.candidate, scores={name: candidate}),
    )
