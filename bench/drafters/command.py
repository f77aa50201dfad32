"""python -m bench drafters: every drafter in one table, against plain decoding in the same run.

Tokens per pass with a fixed draft length, the cost of a draft, the speed with the controller's number,
memory, and whether the text is that of plain decoding; on agents' turns and in chats. `python -m
bench.drafters` needs no more than torch, numpy, tokenizers and safetensors; --merge then puts what it wrote
on another machine (--out) beside what was measured here.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from bench import machine
from bench.drafters import arms as arm_lists
from bench.drafters import rows as drafter_rows
from bench.drafters.arms import Arm, Stock
from bench.drafters.runs import Outcome, Runs, Settings
from bench.drafters.turns import Turn, gather
from bench.drafters.turns import files as trace_files
from paceline import LLM, EngineConfig, SpecConfig, hub
from paceline.target.eager.target import placement

TREES: Final = {
    "cpu": (),
    "cuda": (16, 31),
}  # tokens: with the last one, a half and a whole tile of rows
DRAFT_MODELS: Final = {"qwen2.5-coder-1.5b": "smollm2-135m"}


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser().parse_args(given)
    if options.merge:
        results = [json.loads(path.read_text()) for path in options.merge]
    else:
        results = [measure(options, given)]
    print(drafter_rows.text(results))
    if options.write:
        _write(results)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m bench drafters", description=__doc__)
    found.add_argument("--model", default=hub.DEFAULT_MODEL, help="a name, or a path to a GGUF file")
    found.add_argument("--trained", action="append", default=[], help="a name or folder; may be repeated")
    found.add_argument("--draft-model", help="a name or path; smollm2-135m for qwen2.5-coder-1.5b")
    found.add_argument("--device", default="auto")
    found.add_argument("--threads", type=int, default=0)
    found.add_argument("--data", type=Path, help="a folder with recorded traces and Spec-Bench")
    found.add_argument("--workload", type=_names, help="only these, with commas: spec-bench,tau-bench")
    found.add_argument("--limit", type=int, default=3, help="turns of each workload; 0: all")
    found.add_argument("--max-prompt", type=int, default=1000, help="tokens; longer prompts are shortened")
    found.add_argument("--max-tokens", type=int, default=64)
    found.add_argument("--temperature", type=_numbers, default=[0.0, 0.7])
    found.add_argument("--length", type=int, default=5, help="drafted tokens of a pass, where fixed")
    found.add_argument(
        "--max-draft",
        "--most",
        type=int,
        default=SpecConfig().max_draft,
        help="drafted tokens of a pass at most, where the controller plans them; --most is the old name",
    )
    found.add_argument("--trees", type=_numbers, help="tokens of trees: 16,31 on a GPU, none on a CPU")
    found.add_argument("--width", type=int, default=4, help="of trees")
    found.add_argument(
        "--drafters", type=_names, help="only these lists, their trees, and none; model: however it is used"
    )
    found.add_argument("--repeats", type=int, default=3)
    found.add_argument("--minutes", type=float, help="in all; turns are left out rather than repeats")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--out", type=Path, help="a JSON file, written after each repeat")
    found.add_argument("--merge", type=Path, action="append", help="no measuring: a file that --out wrote")
    found.add_argument("--write", action="store_true", help="write bench/results and docs/numbers.md")
    return found


def measure(options: argparse.Namespace, given: Sequence[str]) -> dict[str, Any]:
    started = perf_counter()
    files = trace_files(options.data, options.workload)
    config = EngineConfig(device=options.device, threads=options.threads)
    llm = LLM(options.model, config=config, spec=SpecConfig((), max_draft=0))
    gpu = placement(config)[0].type == "cuda"
    turns, free = gather(
        files, llm.tokenizer, llm.constraints, options.limit, options.max_prompt, options.seed
    )
    settings = _settings(options)
    stock = Stock(left_out=[NO_PREDICTION])
    runs = Runs(llm.target, stock, settings, llm.tokenizer.eos_ids, llm.cost or None)
    arms = _stocked(llm, stock, runs, turns, options, gpu)
    about = {
        "machine": {
            "model": machine.called(llm.name),
            "fingerprint": llm.target.fingerprint,
            "device": "cuda" if gpu else "cpu",
            "where": llm.target.describe(),
            **machine.facts(),
        },
        "command": machine.command("drafters", given),
        "left_out": [*stock.left_out, *free],
    }

    def result(outcome: Outcome) -> dict[str, Any]:
        counted = {"repeats": outcome.repeats, "turns": len(outcome.turns), "took": round(outcome.seconds)}
        rows = drafter_rows.rows(outcome, arms, stock, settings.temperatures)
        return {**about, "settings": {**asdict(settings), **counted}, "rows": rows}

    def keep(outcome: Outcome) -> None:
        if options.out:
            options.out.write_text(json.dumps(result(outcome), indent=1) + "\n")

    limit = 60 * options.minutes - (perf_counter() - started) if options.minutes else float("inf")
    return result(runs.run(arms, turns, keep, limit, partial(print, file=sys.stderr, flush=True)))


NO_PREDICTION: Final = "prediction: what a caller expects is not recorded in these turns"


def _settings(options: argparse.Namespace) -> Settings:
    return Settings(
        temperatures=options.temperature,
        length=options.length,
        most=options.max_draft,
        width=options.width,
        max_tokens=options.max_tokens,
        repeats=options.repeats,
        seed=options.seed,
    )


def _stocked(
    llm: LLM, stock: Stock, runs: Runs, turns: Sequence[Turn], options: argparse.Namespace, gpu: bool
) -> list[Arm]:
    """Makes the drafters; the lines of the table that were requested."""
    trained = arm_lists.heads(options.trained)
    config = EngineConfig(device=options.device, threads=options.threads)
    draft_model = options.draft_model or DRAFT_MODELS.get(options.model)
    path = hub.resolve(options.model)
    trees = [int(n) for n in (TREES["cuda" if gpu else "cpu"] if options.trees is None else options.trees)]
    makers = arm_lists.makers(llm, path, config, trained, draft_model)
    requested = arm_lists.select(arm_lists.arms(makers, list(trained), trees), options.drafters)
    needed = {name for arm in requested for name in arm.drafters}
    use = runs.try_out(turns[0].prompt.tokens)
    for name, make in makers.items():
        if name in needed:
            stock.add(name, make, use, gpu)
    return measurable(requested, stock, any(turn.bound for turn in turns))


def measurable(requested: Sequence[Arm], stock: Stock, bound: bool) -> list[Arm]:
    """The requested lines whose drafters exist. bound: some turn has a grammar."""
    every = stock.every()
    found = [arm for arm in requested if set(arm.drafters) <= set(every) and (bound or not arm.bound)]
    if len(requested) > len(found) and all(arm.name == arm_lists.PLAIN for arm in found):
        reasons = [reason for reason in stock.left_out if reason != NO_PREDICTION]
        raise SystemExit(f"nothing to measure: {'; '.join(reasons) or 'no turn has a grammar'}")
    return found


def _write(results: Sequence[dict[str, Any]]) -> None:
    from bench import pages, results_folder

    by_place: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        facts = result["machine"]
        name = f"drafters-{facts['model'].replace('/', '_')}-{facts['device']}"
        by_place.setdefault(name, []).append(result)
    for name, runs in by_place.items():
        for number, result in enumerate(runs, 1):
            results_folder.write(result, name if number == 1 else f"{name}_{number}")
    pages.write()


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _numbers(text: str) -> list[float]:
    return [float(number) for number in _names(text)]


if __name__ == "__main__":
    main()
