"""python -m bench experts: what a pass of a mixture of experts costs by its rows, and by how alike they are.

paceline alone, on random weights in the proportions of published mixtures, of fewer and narrower layers. Rows
of different tokens choose experts of their own, rows of one token nearly the same: text lies between the two.
Beside them stands a dense model whose rows are multiplied with as many weights.
"""

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from rich.console import Console

from bench import machine, pages, results_folder
from bench.spread import Spread, interleaved
from bench.table import Column, Table, number, spread
from paceline import EngineConfig
from paceline.target.base import ModelTarget
from paceline.target.cost import ROWS, measure
from paceline.target.eager.target import TorchTarget
from paceline.target.load import load_target
from paceline.types import Draft, Feed, Seq

CONTEXT: Final = 256
REPEATS: Final = 9
WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 1024, 16, 4, 64, 8192
CODES: Final = np.arange(1, 16, dtype=np.uint8)  # without -8: weights of a mean of zero
PAIRS: Final = (CODES[:, None] | CODES << 4).flatten()
ARMS: Final = {"unlike": "own experts", "alike": "the same experts", "dense": "none: dense"}
ENGINES: Final = {"native": ("auto", 8), "torch": ("float32", 2)}  # dtype, layers


@dataclass(frozen=True, slots=True)
class Mixture:
    """experts 0: dense."""

    name: str
    architecture: str
    experts: int
    used: int
    ff: int

    @property
    def dense(self) -> "Mixture":
        return replace(self, name=f"dense as {self.name}", experts=0, used=0, ff=self.used * self.ff)


MIXTURES: Final = (
    Mixture("Qwen3-MoE, 128 experts, 8 used", "qwen3moe", 128, 8, 384),
    Mixture("Mixtral, 8 experts, 2 used", "llama", 8, 2, 3584),
)


def write(path: Path, mixture: Mixture, layers: int) -> Path:
    """Random weights in Q4_0. The embedding outweighs what layers add: a row's token decides its experts."""
    import gguf

    random = np.random.default_rng(0)
    family = mixture.architecture if mixture.experts else mixture.architecture.removesuffix("moe")
    writer = gguf.GGUFWriter(path, family)
    sizes: dict[str, int] = {
        "block_count": layers,
        "context_length": 4096,
        "embedding_length": WIDTH,
        "feed_forward_length": mixture.ff,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
    }
    if mixture.experts:
        sizes |= {"expert_count": mixture.experts, "expert_used_count": mixture.used}
        sizes["expert_feed_forward_length"] = mixture.ff
    for key, value in sizes.items():
        writer.add_uint32(f"{family}.{key}", value)
    writer.add_float32(f"{family}.attention.layer_norm_rms_epsilon", 1e-6)

    def matrix(name: str, *shape: int, size: float = 0.0) -> None:
        """size: standard deviation of its weights."""
        blocks = PAIRS[random.integers(0, len(PAIRS), (*shape[:-1], shape[-1] // 32, 18), np.uint8)]
        scale = np.float16((size or shape[-1] ** -0.5) / 4.3)  # codes have a deviation of 4.3
        blocks[..., :2] = np.frombuffer(scale.tobytes(), np.uint8)
        kind = gguf.GGMLQuantizationType.Q4_0
        writer.add_tensor(name, blocks.reshape(*shape[:-1], -1), raw_dtype=kind)

    def ones(name: str, length: int) -> None:
        writer.add_tensor(name, np.ones(length, np.float32))

    matrix("token_embd.weight", VOCAB, WIDTH, size=1.0)
    ones("output_norm.weight", WIDTH)
    for layer in range(layers):
        at = f"blk.{layer}."
        ones(f"{at}attn_norm.weight", WIDTH)
        ones(f"{at}ffn_norm.weight", WIDTH)
        if family.startswith("qwen3"):
            ones(f"{at}attn_q_norm.weight", HEAD_DIM)
            ones(f"{at}attn_k_norm.weight", HEAD_DIM)
        for part, heads in {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}.items():
            matrix(f"{at}attn_{part}.weight", heads * HEAD_DIM, WIDTH)
        matrix(f"{at}attn_output.weight", WIDTH, HEADS * HEAD_DIM)
        stack = (mixture.experts,) if mixture.experts else ()
        suffix = "_exps.weight" if mixture.experts else ".weight"
        matrix(f"{at}ffn_gate{suffix}", *stack, mixture.ff, WIDTH)
        matrix(f"{at}ffn_up{suffix}", *stack, mixture.ff, WIDTH)
        matrix(f"{at}ffn_down{suffix}", *stack, WIDTH, mixture.ff)
        if mixture.experts:
            router = random.standard_normal((mixture.experts, WIDTH), np.float32) * np.float32(WIDTH**-0.5)
            writer.add_tensor(f"{at}ffn_gate_inp.weight", router)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Touched:
    """Counts the experts of a pass on torch, layer by layer."""

    def __init__(self, target: TorchTarget) -> None:
        for layer in target._decoder._layers:
            if layer.mixture is not None:
                for expert in layer.mixture._experts:
                    self._watch(expert)
        self._seen: set[int] = set()

    def _watch(self, expert: Any) -> None:
        run = expert.down

        def down(x: Any) -> Any:
            self._seen.add(id(expert))
            return run(x)

        expert.down = down

    def take(self) -> int:
        count, self._seen = len(self._seen), set()
        return count


def passes(target: ModelTarget, alike: bool) -> Mapping[str, Callable[[], float]]:
    """By rows: milliseconds of a pass with tokens that no pass before had."""
    random = np.random.default_rng(1)

    def run(rows: int) -> float:
        tokens = random.integers(0, target.vocab_size, rows).tolist()
        tokens = tokens[:1] * rows if alike else tokens
        seq = Seq("experts", [0] * CONTEXT + tokens[:1], CONTEXT + 1, tenant="experts")
        with target.noise(seq):
            started = perf_counter()
            target.forward([Feed(seq.id, tokens[:1], Draft(tuple(tokens[1:])))]).logits[-1:, :1].tolist()
            return 1000 * (perf_counter() - started)

    return {str(rows): partial(run, rows) for rows in ROWS}


def rows_of(mixture: Mixture, engine: str, folder: Path, repeats: int) -> list[dict[str, Any]]:
    """One row for each row count."""
    dtype, layers = ENGINES[engine]
    config = EngineConfig(device="cpu", dtype=dtype, cache_mb=64)
    found: dict[str, dict[str, list[float]]] = {}
    experts: dict[str, dict[str, float]] = {}
    for name, model in (("dense", mixture.dense), ("mixture", mixture)):
        path = write(folder / "model.gguf", model, layers)
        target = load_target(path, config)
        path.unlink()
        arms = ("unlike", "alike") if model.experts else ("dense",)
        for arm in arms:
            found[arm] = interleaved(passes(target, arm == "alike"), repeats)
        if name == "mixture":
            curve = measure(target).ms[CONTEXT]
            if isinstance(target, TorchTarget):
                touched = Touched(target)
                for arm in arms:
                    experts[arm] = {}
                    for rows, run in passes(target, arm == "alike").items():
                        touched.take()
                        run()
                        experts[arm][rows] = touched.take() / layers
        del target
    first = min(found["alike"]["1"] + found["unlike"]["1"])
    return [
        {
            "model": mixture.name,
            "engine": engine,
            "rows": rows,
            **{arm: asdict(Spread.of(values[str(rows)])) for arm, values in found.items()},
            "times_first": {
                arm: min(values[str(rows)]) / (min(values["1"]) if arm == "dense" else first)
                for arm, values in found.items()
            },
            "experts": {arm: counts[str(rows)] for arm, counts in experts.items()},
            "measured_at_start": curve[rows],
        }
        for rows in ROWS
    ]


def table(rows: Sequence[dict[str, Any]], title: str = "") -> Table:
    columns = [
        Column("mixture", "model"),
        Column("engine", "engine"),
        Column("rows", "rows"),
        *(Column(f"{what}, ms", partial(_time, arm)) for arm, what in ARMS.items()),
        *(Column(f"{what}, x one row", partial(_flat, arm)) for arm, what in ARMS.items()),
        Column("experts of a layer", _experts),
        Column("curve at the start, ms", lambda row: number(row["measured_at_start"])),
    ]
    return Table.of(columns, rows, title)


def short(rows: Sequence[dict[str, Any]]) -> Table:
    """A line for each mixture, engine and choice of experts: how many times one row's pass takes."""
    lines = [
        {"model": model, "engine": engine, "what": what}
        | {
            str(row["rows"]): row["times_first"][arm]
            for row in rows
            if (row["model"], row["engine"]) == (model, engine)
        }
        for model, engine in dict.fromkeys((row["model"], row["engine"]) for row in rows)
        for arm, what in ARMS.items()
    ]
    counts = [Column(f"{n} row{'s' * (n > 1)}", partial(_cell, str(n))) for n in ROWS]
    return Table.of(
        [Column("mixture", "model"), Column("engine", "engine"), Column("rows choose", "what"), *counts],
        lines,
    )


def _cell(name: str, row: Mapping[str, Any]) -> str:
    return number(row[name])


def _time(arm: str, row: Mapping[str, Any]) -> str:
    return spread(row[arm])


def _flat(arm: str, row: Mapping[str, Any]) -> str:
    return number(row["times_first"][arm])


def _experts(row: Mapping[str, Any]) -> str:
    counts = row["experts"]
    return f"{counts['unlike']:.0f} / {counts['alike']:.0f}" if counts else ""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench experts", description=__doc__)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help="write bench/results")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    # Packed weights go to the same folder.
    with TemporaryDirectory() as folder, patch.dict(os.environ, PACELINE_HOME=folder):
        for mixture in MIXTURES:
            for engine in options.engines.split(","):
                rows += rows_of(mixture, engine, Path(folder), options.repeats)
    Console(width=None if Console().is_terminal else 200).print(table(rows).terminal())
    result = {
        "machine": {"model": "random mixtures", **machine.facts()},
        "command": " ".join(["python -m bench experts", *(arguments or [])]),
        "repeats": options.repeats,
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.write:
        results_folder.write(result, "experts-random")
        pages.write()
