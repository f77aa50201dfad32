"""python -m bench control: the controller against plain decoding and fixed draft lengths, as load rises.

So many agents are answered at once, turn after turn, each to its natural end. Prompts are read before; only
decoding is timed. All ways answer the same turns, take turns in an order drawn anew for each repeat, and
begin a repeat with an empty memory of texts. What a controller has learned stays from repeat to repeat;
its first is not counted. Hindsight is the best of plain decoding and the fixed lengths of that case.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final, TypeVar

from rich.console import Console

from bench import machine, results_folder, workload
from bench.drafters.turns import AGENTS, CHAT, Turn, files, gather
from bench.spread import Spread
from bench.table import Column, Table
from paceline import LLM, EngineConfig, SamplingParams, SpecConfig, hub
from paceline.drafters import model_free
from paceline.engine.control import Rate
from paceline.engine.engine import Engine
from paceline.types import Seq

T = TypeVar("T")
LOADS: Final = (1, 4, 16, 32)
FIXED: Final = (3, 5, 8)
PLAIN, ADAPTIVE, HINDSIGHT = "plain", "adaptive", "hindsight best"
SHORT: Final = [
    "--loads",
    "1,4,16",
    "--turns",
    "16",
    "--tokens",
    "64",
    "--repeats",
    "3",
    "--temperature",
    "0,0.7",
]


@dataclass(frozen=True)
class Case:
    workload: str
    temperature: float
    load: int


class Runs:
    """One controller for each way, on the one target."""

    def __init__(self, llm: LLM, ways: dict[str, SpecConfig], tokens: int) -> None:
        self._target, self._eos, self._tokens, self._ids, self._ways = (
            llm.target,
            llm.tokenizer.eos_ids,
            tokens,
            count(),
            ways,
        )
        self._config = EngineConfig(max_batch=max(LOADS), cache_mb=llm.engine.config.cache_mb)
        self._heads = {name: d for name, d in llm.drafters.items() if d.taps}
        self._controllers = {way: Rate(llm.cost or None) for way in ways}

    def read(self, turns: Sequence[Turn]) -> None:
        """Prompts into all caches. Drafters that read hidden states must see a prompt's only pass."""
        for turn in turns:
            engine, spec = self._engine(), SpecConfig(tuple(self._heads) or ("none",), 1, adaptive=False)
            engine.submit(self._seq(turn, SamplingParams(max_tokens=2), spec))
            while engine.busy:
                engine.step()

    def rate(self, way: str, case: Case, turns: Sequence[Turn], seed: int) -> tuple[float, float]:
        """Tokens per second of decoding, all agents together, and tokens per pass of one."""
        engine = self._engine(self._controllers[way])
        params = SamplingParams(temperature=case.temperature, seed=seed, max_tokens=self._tokens)
        tokens, passes, seconds = 0, 0, 0.0
        for group in groups(turns, case.load):
            seqs = [self._seq(turn, params, self._ways[way]) for turn in group]
            for seq in seqs:
                engine.submit(seq)
            while any(not seq.output for seq in seqs):
                engine.step()
            started = perf_counter()
            while engine.busy:
                for r in engine.step():
                    tokens, passes = tokens + len(r.tokens), passes + 1
            seconds += perf_counter() - started
        return tokens / seconds, tokens / passes

    def _engine(self, controller: Rate | None = None) -> Engine:
        drafters = {**model_free(), **self._heads}
        return Engine(self._target, drafters, controller or Rate(), config=self._config, eos=self._eos)

    def _seq(self, turn: Turn, params: SamplingParams, spec: SpecConfig) -> Seq:
        prompt, tenant = list(turn.prompt.tokens), turn.prompt.workload
        return Seq(f"{next(self._ids)}", prompt, len(prompt), params, spec, tenant, cursor=turn.cursor())


def groups(turns: Sequence[T], load: int) -> list[list[T]]:
    """All turns, so many at once; the last group is filled from the first turns."""
    filled = [turns[i % len(turns)] for i in range(-(-len(turns) // load) * load)]
    return [filled[i : i + load] for i in range(0, len(filled), load)]


def ways(drafters: tuple[str, ...]) -> dict[str, SpecConfig]:
    fixed = {f"fixed {k}": SpecConfig(drafters, k, adaptive=False) for k in FIXED}
    return {PLAIN: SpecConfig(("none",), max_draft=0), **fixed, ADAPTIVE: SpecConfig(drafters)}


def measure(
    llm: LLM,
    by_workload: dict[str, list[Turn]],
    cases: Sequence[Case],
    specs: dict[str, SpecConfig],
    tokens: int,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """One row for each case; the first repeat warms up."""
    runs, rng = Runs(llm, specs, tokens), random.Random(0)
    for turns in by_workload.values():
        runs.read(turns)
    for case in cases:
        rates: dict[str, list[tuple[float, float]]] = {way: [] for way in specs}
        for repeat in range(repeats + 1):
            for way in rng.sample(list(specs), len(specs)):
                found = runs.rate(way, case, by_workload[case.workload], 100 * repeat)
                if repeat:
                    rates[way].append(found)
        yield row(case, rates)


def row(case: Case, rates: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    speeds = {way: [speed for speed, _ in found] for way, found in rates.items()}
    best = max((way for way in speeds if way != ADAPTIVE), key=lambda way: median(speeds[way]))
    against = {
        way: asdict(Spread.of([a / b for a, b in zip(found, speeds[PLAIN], strict=True)]))
        for way, found in speeds.items()
    }
    hindsight = [a / b for a, b in zip(speeds[ADAPTIVE], speeds[best], strict=True)]
    return {
        **asdict(case),
        "tokens_per_s": {way: asdict(Spread.of(found)) for way, found in speeds.items()},
        "against_plain": against,
        "best": best,
        "against_best": asdict(Spread.of(hindsight)),
        "tokens_per_pass": {way: median([t for _, t in found]) for way, found in rates.items()},
    }


def _against(way: str) -> Column:
    return Column(way, lambda r: f"{r['against_plain'][way]['median']:.2f}")


COLUMNS: Final = (
    Column("workload", "workload"),
    Column("T", lambda r: f"{r['temperature']:g}"),
    Column("agents", "load"),
    Column("plain, tokens/s", lambda r: f"{r['tokens_per_s'][PLAIN]['median']:.0f}"),
    *(_against(f"fixed {k}") for k in FIXED),
    Column("adaptive", lambda r: Spread(**r["against_plain"][ADAPTIVE]).text(2)),
    Column(HINDSIGHT, lambda r: f"{r['best']}: {r['against_plain'][r['best']]['median']:.2f}"),
    Column("adaptive / best", lambda r: f"{r['against_best']['median']:.2f}"),
    Column("tokens per pass", lambda r: f"{r['tokens_per_pass'][ADAPTIVE]:.2f}"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m bench control", description=__doc__)
    parser.add_argument("--model", default=hub.DEFAULT_MODEL)
    parser.add_argument("--trained", action="append", default=[], help="adds this drafter to the list")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--loads", type=_whole_numbers, default=list(LOADS), help="agents at once")
    parser.add_argument("--temperature", type=_numbers, default=[0.0, 0.7, 1.5])
    parser.add_argument("--data", type=Path, default=workload.data_folder(), help="recorded traffic")
    parser.add_argument("--turns", type=int, default=32, help="of each workload")
    parser.add_argument("--max-prompt", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="SmolLM2 in about 10 minutes on two quiet cores")
    parser.add_argument("--write", action="store_true", help="write bench/results and its page")
    options = parser.parse_args([*SHORT, *given] if "--short" in given else given)
    config = EngineConfig(device=options.device, threads=options.threads, max_batch=max(LOADS))
    llm = LLM(options.model, trained=options.trained, config=config)
    chosen = files(options.data)
    every, _ = gather(chosen, llm.tokenizer, llm.constraints, options.turns, options.max_prompt)
    turns = {kind: [turn for turn in every if turn.kind == kind][: options.turns] for kind in (AGENTS, CHAT)}
    drafters = (*SpecConfig().drafters, *llm.trained.values())
    kinds = [kind for kind, found in turns.items() if found]
    cases = [Case(k, t, n) for k in kinds for t in options.temperature for n in options.loads]
    console, rows = Console(width=160, highlight=False), []
    for one in measure(llm, turns, cases, ways(drafters), options.tokens, options.repeats):
        console.print("  ".join(f"{c.title} {c.cell(one)}" for c in COLUMNS))
        rows.append(one)
    console.print(Table.of(COLUMNS, rows).terminal(1))
    if options.write:
        from bench import pages

        name = machine.called(llm.name)
        about = {"model": name, "where": llm.target.describe(), "drafters": drafters, **machine.facts()}
        result = {"machine": about, "command": machine.command("control", given), "rows": rows}
        results_folder.write(result, f"control-{name}" + ("-trained" if llm.trained else ""))
        pages.write()


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",") if number]


def _whole_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


if __name__ == "__main__":
    main()
