"""python -m bench divergence: how far an engine's next-token distribution is from the float32 model's.

The reference is paceline's torch decoder in float32 on the same file's weights. KL(reference || engine) in
nats, over a few hundred positions of real prompts.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from bench import machine, pages, results_folder, workload
from bench.own.passes import PATIENCE, probed, start
from bench.peers.child import PeerFailed
from bench.peers.systems import BUILDS, Build
from bench.table import Column, Table, number
from paceline import hub, limits
from paceline.text import Tokenizer

POSITIONS: Final = 128  # of each text
TEXTS: Final = 3
Floats = NDArray[np.float64]


def log_softmax(logits: NDArray[np.float32]) -> Floats:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    found: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return found


def divergences(reference: NDArray[np.float32], other: NDArray[np.float32]) -> Floats:
    """One for each position."""
    found = []
    for i in range(0, len(reference), 16):  # a vocabulary in float64 is large
        p, q = log_softmax(reference[i : i + 16]), log_softmax(other[i : i + 16])
        found.append((np.exp(p) * (p - q)).sum(axis=-1))
    return np.concatenate(found)


def summary(reference: NDArray[np.float32], other: NDArray[np.float32]) -> dict[str, Any]:
    each = divergences(reference, other)
    agree = reference.argmax(axis=-1) == other.argmax(axis=-1)
    return {
        "mean_kl": float(each.mean()),
        "median_kl": float(np.median(each)),
        "max_kl": float(each.max()),
        "same_first_choice": round(float(agree.mean()), 4),
        "positions": len(each),
    }


def logits(build: Build, model: Path, threads: int, texts: Sequence[list[int]], **settings: Any) -> Any:
    child = start(build, model, threads, max(map(len, texts)) + 64, **settings)
    found = []
    try:
        for text in texts:
            with tempfile.TemporaryDirectory() as folder:
                file = f"{folder}/logits.npy"
                child.ask({"do": "logits", "tokens": text, "file": file}, PATIENCE)
                found.append(np.load(file))
    finally:
        child.close()
    return np.concatenate(found)


def texts(tokenizer: Tokenizer, seed: int = 0) -> list[list[int]]:
    """The ends of prompts of several workloads: there the conversation is."""
    found = []
    for name, path in workload.known().items():
        for prompt in workload.choose(name, path, tokenizer, 1, 1500, seed):
            found.append(list(prompt.tokens[-POSITIONS:]))
    return sorted(found, key=len, reverse=True)[:TEXTS]


def measure(model: Path, threads: int, console: Console) -> Mapping[str, dict[str, Any]]:
    chosen = texts(Tokenizer.load(model))
    ours = next(build for build in BUILDS if build.system == "paceline")
    reference = logits(ours, model, threads, chosen, dtype="float32")
    found = {}
    for build in probed():
        try:
            found[build.system] = summary(reference, logits(build, model, threads, chosen))
        except PeerFailed as problem:
            console.print(f"left out: {build.system}: {problem}", markup=False)
    return found


def table(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = [
        Column("engine", "engine"),
        Column("mean KL", lambda r: f"{r['mean_kl']:.2e}"),
        Column("median KL", lambda r: f"{r['median_kl']:.2e}"),
        Column("largest KL", lambda r: f"{r['max_kl']:.2e}"),
        Column("same first choice", lambda r: number(r["same_first_choice"], 3)),
        Column("positions", "positions"),
    ]
    return Table.of(columns, [{"engine": name, **row} for name, row in rows.items()])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench divergence", description=__doc__)
    parser.add_argument("--model", default=hub.DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=limits.cores())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help="write bench/results")
    options = parser.parse_args(arguments)
    console = Console()
    found = measure(hub.resolve(options.model), options.threads, console)
    console.print(table(found).terminal())
    result = {
        "machine": {"model": options.model, **machine.facts()},
        "command": " ".join(["python -m bench divergence", *(arguments or [])]),
        "rows": found,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.write:
        results_folder.write(result, f"divergence-{options.model}")
        pages.write()
