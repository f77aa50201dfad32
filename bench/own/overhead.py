"""Time of a round outside the forward pass, and time of a pass by its rows."""

import time
from statistics import median
from typing import Any

from paceline import LLM, SpecConfig

NEW_TOKENS = 120
SAMPLING: dict[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.95,
    "seed": 3,
    "max_tokens": NEW_TOKENS,
    "ignore_eos": True,
}
PROMPT = "Once upon a time in a small village by the sea there lived"


def measure(llm: LLM) -> dict[str, Any]:
    """The answer itself is given as the prediction, so that all nine rows of a round are sampled and kept."""
    answer = llm.generate(PROMPT, spec=SpecConfig(("none",), max_draft=0), **SAMPLING).text
    spec = SpecConfig(("prediction",), max_draft=8, adaptive=False)
    stream = llm.stream(PROMPT, spec=spec, prediction=answer, **SAMPLING)
    outside: list[float] = []
    by_rows: dict[int, list[float]] = {}
    for _ in range(NEW_TOKENS):
        started = time.perf_counter_ns()
        rounds = llm.engine.step()
        spent = (time.perf_counter_ns() - started) / 1e6
        if not rounds:
            break
        r = rounds[0]
        if len(r.tokens) == 9:
            outside.append(spent - r.target_us / 1000)
        by_rows.setdefault(r.rows, []).append(r.target_us / 1000)
    stream.close()
    return {
        "what": "ms per round outside the forward pass, 9 rows sampled at T=0.8, top-p 0.95",
        "rounds": len(outside),
        "median_ms": round(median(outside), 3) if outside else None,
        "pass_ms_by_rows": ", ".join(f"{n} rows {median(v):.1f}" for n, v in sorted(by_rows.items())),
    }
