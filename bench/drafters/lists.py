"""python -m bench lists: tokens per pass and time per token of lists of drafters, as they learn in use.

Each list has an engine of its own on the one target, and a tenant for each workload: prompts come one after
the other and drafters remember. Lists take turns prompt by prompt. Time is the processor's, of one thread,
from the first token on, so that a busy machine counts for little; the prompt's pass is in the cache of all.
"""

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import process_time
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench import machine, workload
from bench.workload import FREE_TEXT, Prompt
from paceline import LLM, EngineConfig, SamplingParams, SpecConfig, hub
from paceline.drafters import model_free
from paceline.engine.control import Rate
from paceline.engine.engine import Engine
from paceline.types import Seq

CHAIN: Final = (8, 1)  # drafted tokens at most, in all and after one token
TREE: Final = (16, 4)
LISTS: Final = ("none", "ngram", "suffix", "recycle", "suffix+recycle")
SPECS: Final = {
    **{name: SpecConfig(tuple(name.split("+")), *CHAIN) for name in LISTS},
    **{f"{name}, trees": SpecConfig(tuple(name.split("+")), *TREE) for name in LISTS[2:]},
    "recycle, always": SpecConfig(("recycle",), *CHAIN, adaptive=False),
    "recycle, always trees": SpecConfig(("recycle",), *TREE, adaptive=False),
}


@dataclass
class Sum:
    """The results of a list on one kind of prompts, without first tokens."""

    tokens: int = 0
    passes: int = 0
    rows: int = 0
    seconds: float = 0.0

    def row(self) -> dict[str, float]:
        return {
            "tokens_per_pass": round(self.tokens / self.passes, 2),
            "rows_per_pass": round(self.rows / self.passes, 1),
            "ms_per_token": round(1000 * self.seconds / self.tokens, 2),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench lists", description=__doc__)
    parser.add_argument("--model", default=hub.DEFAULT_MODEL)
    parser.add_argument("--limit", type=int, default=6, help="prompts of each workload")
    parser.add_argument("--max-prompt", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args(arguments)
    llm = LLM(options.model, config=EngineConfig(device="cpu", threads=1))
    prompts = [
        prompt
        for name, path in workload.known().items()
        for prompt in workload.choose(name, path, llm.tokenizer, options.limit, options.max_prompt)
    ]
    params = SamplingParams(temperature=options.temperature, seed=0, max_tokens=options.max_tokens)
    found = measure(llm, prompts, params)
    show(found)
    print(json.dumps({"machine": {"model": llm.name, **machine.facts()}, "results": found}))


def measure(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, specs: Mapping[str, SpecConfig] = SPECS
) -> dict[str, dict[str, Any]]:
    """For each list its figures on agents' turns and on free text."""
    engines = {
        name: Engine(llm.target, model_free(), Rate(llm.cost or None), eos=llm.tokenizer.eos_ids)
        for name in specs
    }
    rng = random.Random(0)
    sums = {name: {"agents": Sum(), "free text": Sum()} for name in specs}
    for prompt in prompts:
        kind = "free text" if prompt.workload in FREE_TEXT else "agents"
        texts = set()
        for name in rng.sample(list(specs), len(specs)):
            seq = Seq(
                name, list(prompt.tokens), len(prompt.tokens), params, specs[name], tenant=prompt.workload
            )
            write(engines[name], seq, sums[name][kind])
            texts.add(tuple(seq.output))
        if len(texts) > 1:
            raise AssertionError(f"{prompt.workload} {prompt.id}: the text depends on the drafters")
    return {name: {kind: s.row() for kind, s in by.items() if s.passes} for name, by in sums.items()}


def write(engine: Engine, seq: Seq, into: Sum) -> None:
    engine.submit(seq)
    while engine.busy and not seq.output:
        engine.step()
    started = process_time()
    while engine.busy:
        for r in engine.step():
            into.tokens += len(r.tokens)
            into.passes += 1
            into.rows += r.rows
    into.seconds += process_time() - started


def show(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    table = Table("drafters", "prompts", "tokens per pass", "rows per pass", "ms per token")
    for name, by in found.items():
        for kind, row in by.items():
            table.add_row(name, kind, *(str(value) for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
