"""The demo's agent workflow, plain and speculative, interleaved."""

import importlib.util
import sys
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from bench.spread import Spread, interleaved, ratio
from paceline import LLM, SpecConfig

SPECS = {"plain": SpecConfig(("none",), max_draft=0), "speculative": SpecConfig(("suffix", "ngram"))}


def measure(llm: LLM, repeats: int) -> dict[str, Any]:
    """Every run has a tenant of its own: no cache or index has seen its text."""
    demo = _demo()
    quiet, tenants = Console(quiet=True), count()
    answers: dict[str, list[tuple[int, ...]]] = {}
    per_pass: dict[str, float] = {}

    def once(name: str) -> float:
        workflow = demo.run(llm, SPECS[name], f"bench-{next(tenants)}", quiet)
        tokens, passes, seconds = workflow.sums()
        answers[name] = [r.token_ids for r in workflow.results]
        per_pass[name] = tokens / passes
        return float(seconds)

    values = interleaved({name: partial(once, name) for name in SPECS}, repeats)
    return {
        "what": "seconds for the agent workflow of examples/agent.py, temperature 0",
        "plain_s": Spread.of(values["plain"]).text(2),
        "speculative_s": Spread.of(values["speculative"]).text(2),
        "ratio": ratio(values["plain"], values["speculative"]).text(2),
        "tokens_per_pass": round(per_pass["speculative"], 2),
        "identical_text": answers["plain"] == answers["speculative"],
        "runs": values,
    }


def _demo() -> ModuleType:
    path = Path(__file__).parent.parent.parent / "examples" / "agent.py"
    spec = importlib.util.spec_from_file_location("agent_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
