"""python -m bench reading: what a prompt token costs by the length of the prompt before it.

paceline alone. One piece of a prompt, as the engine reads it, is timed after contexts of several lengths,
whose keys and values are noise: the time does not depend on what they hold. Beside it stands what must be
computed: multiply-adds of the weights, and of attention, which grow with the context.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any, Final, cast

import numpy as np
from rich.console import Console

from bench import machine, pages, results_folder
from bench.spread import Spread, interleaved
from bench.table import Column, Table, number, spread
from paceline import LLM, EngineConfig, hub
from paceline.target.base import ModelTarget
from paceline.target.weights.model_config import ModelConfig
from paceline.types import Feed, Seq

CONTEXTS: Final = (300, 1000, 2000, 4000, 8000)
REPEATS: Final = 7


def attention_products(shape: ModelConfig, context: int) -> int:
    """Multiply-adds for one token that is not scored: queries with keys, weights with values."""
    return 2 * (shape.layers - 1) * shape.heads * shape.head_dim * context


def weight_products(shape: ModelConfig) -> int:
    """Multiply-adds for one token that is not scored: of the last layer only its key and value."""
    queries, keys = (2 * shape.head_dim * heads for heads in (shape.heads, shape.kv_heads))
    whole = queries + keys + 3 * shape.ff_width
    return shape.width * ((shape.layers - 1) * whole + keys)


def measure(target: ModelTarget, contexts: Sequence[int], piece: int, repeats: int) -> dict[int, list[float]]:
    """Milliseconds per token, by context, in shuffled order; the first of each is for warming."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, target.vocab_size, max(contexts) + piece).tolist()

    def timed(context: int) -> Callable[[], float]:
        def run() -> float:
            name = f"reading-{context}"
            count = min(piece, target.max_context - context - 1)
            with target.noise(Seq(name, tokens[: context + 1], context + 1, tenant=name)):
                started = perf_counter()
                target.forward([Feed(name, tokens[context : context + count], scored=False)])
                return 1000 * (perf_counter() - started) / count

        return run

    found = interleaved({str(context): timed(context) for context in contexts}, repeats)
    return {int(context): values for context, values in found.items()}


def summary(found: Mapping[int, list[float]], shape: ModelConfig) -> list[dict[str, Any]]:
    """One row for each context. The ratio is that of the fastest times."""
    first = min(found[min(found)])
    return [
        {
            "context": context,
            "ms": asdict(Spread.of(values)),
            "times_first": min(values) / first,
            "weights_mmac": weight_products(shape) / 1e6,
            "attention_mmac": attention_products(shape, context) / 1e6,
        }
        for context, values in sorted(found.items())
    ]


def table(rows: Sequence[dict[str, Any]], title: str = "") -> Table:
    columns = [
        Column("tokens before", "context"),
        Column("ms per prompt token", lambda row: spread(row["ms"])),
        Column("fastest, x the first", lambda row: number(row["times_first"])),
        Column("weights, M multiply-adds", lambda row: number(row["weights_mmac"], 0)),
        Column("attention, M multiply-adds", lambda row: number(row["attention_mmac"], 0)),
    ]
    return Table.of(columns, rows, title)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench reading", description=__doc__)
    parser.add_argument("--model", default=hub.DEFAULT_MODEL)
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)))
    parser.add_argument("--piece", type=int, default=EngineConfig().prefill_chunk, help="tokens in a pass")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help="write bench/results")
    options = parser.parse_args(arguments)
    contexts = [int(context) for context in options.contexts.split(",")]
    target = LLM(options.model, config=EngineConfig(device="cpu", cache_mb=1024)).target
    shape: ModelConfig = cast(Any, target).shape
    rows = summary(measure(target, contexts, options.piece, options.repeats), shape)
    console = Console(width=None if Console().is_terminal else 160)
    console.print(table(rows, f"{options.model}, {target.describe()}").terminal())
    result = {
        "machine": {"model": options.model, **machine.facts()},
        "command": " ".join(["python -m bench reading", *(arguments or [])]),
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.write:
        results_folder.write(result, f"reading-{options.model}")
        pages.write()
