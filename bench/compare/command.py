"""The command line of the comparison."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from bench import machine, pages, results_folder, workload
from bench.compare.rounds import Comparison, Outcome, Plan
from bench.compare.rows import Row, rows
from bench.compare.table import table
from bench.own import bandwidth
from bench.peers.install import prepare
from bench.peers.systems import SYSTEMS, Entry, entries, left_out
from bench.workload import Prompt
from paceline import hub, limits
from paceline.text import Tokenizer

MODELS: Final = {"smollm2-135m": 7.0, "qwen2.5-coder-1.5b": 21.0}  # minutes of a short run
SHORT: Final = {"limit": 2, "repeats": 3, "max_prompt": 1500, "max_tokens": 96}
FULL: Final = {"limit": 8, "repeats": 3, "max_prompt": 4000, "max_tokens": 128}
OTHERS: Final = 4  # conversations of each workload that a system which learns is shown
WARM_UP: Final = "Name three rivers of Europe, and say in one sentence where each of them ends. " * 3


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(arguments) if arguments is not None else None
    options = settled(parser().parse_args(given))
    console = Console(width=None if Console().is_terminal else 220)
    found: list[Row] = []
    for model in options.model:
        result = measure(model, options, console)
        result["command"] = shlex.join(["python", "-m", "bench", *(given or [])])
        console.print(table(result["rows"], f"{model}, {machine.facts()['cpu']}").terminal(sections=2))
        found += [{"model": model, **row} for row in result["rows"]]
        if options.write:
            results_folder.write(result, f"peers-{model}")
    if options.json:
        results_folder.write_rows(found, options.json)
    if options.write:
        pages.write()


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    found.add_argument("--model", type=_names, help="one or several, with commas; those pulled by default")
    found.add_argument("--workload", type=Path, action="append", help="a trace file; all by default")
    found.add_argument("--limit", type=int, help="prompts of each workload")
    found.add_argument("--systems", type=_names, default=list(SYSTEMS), help=",".join(SYSTEMS))
    found.add_argument("--drafters", type=_names, default=[], help="paceline's modes: suffix+ngram,ngram")
    found.add_argument("--repeats", type=int)
    found.add_argument("--temperature", type=_numbers, default=[0.0, 0.7])
    found.add_argument("--max-tokens", type=int)
    found.add_argument("--max-prompt", type=int, help="tokens; longer prompts are shortened to fit")
    found.add_argument("--ignore-eos", action="store_true", help="exactly max-tokens from every system")
    found.add_argument("--threads", type=int, default=limits.cores())
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--budget-minutes", type=float, help="for each model; unlimited with --full")
    found.add_argument("--full", action="store_true", help="more prompts and modes, longer prompts")
    found.add_argument("--json", type=Path, metavar="OUT", help="one row for each system, mode and workload")
    found.add_argument("--write", action="store_true", help="write bench/results, docs/numbers.md and README")
    return found


def settled(options: argparse.Namespace) -> argparse.Namespace:
    """Fills in what depends on --full and on what is here."""
    for name, value in (FULL if options.full else SHORT).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    unknown = [name for name in options.systems if name not in SYSTEMS]
    if unknown:
        raise SystemExit(f"no system is called {unknown[0]!r}; there are {', '.join(SYSTEMS)}")
    if not options.model:
        pulled = {m.name for m in hub.installed() if m.pulled}
        options.model = [name for name in MODELS if name in pulled]
        if not options.model:
            raise SystemExit("no model is here: run `paceline pull smollm2-135m`")
    return options


def measure(model: str, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    path = hub.resolve(model)
    tokenizer = Tokenizer.load(path)
    prompts, others = gather(tokenizer, options, console)
    chosen = list(entries(options.systems, model, options.full, options.drafters))
    absent = list(left_out(options.systems, model, options.full))
    for reason in absent:
        console.print(f"left out: {reason}", markup=False)
    minutes = options.budget_minutes or (None if options.full else MODELS.get(model, 15.0))
    plan = Plan(
        model=path,
        entries=chosen,
        prompts=prompts,
        temperatures=options.temperature,
        repeats=options.repeats,
        max_tokens=options.max_tokens,
        threads=options.threads,
        seed=options.seed,
        ignore_eos=options.ignore_eos,
        budget=60 * minutes if minutes else float("inf"),
        warm_up=tokenizer.encode(WARM_UP),
        ends=sorted(tokenizer.eos_ids),
        others=others,
    )
    for build in {entry.build for entry in chosen if entry.build.dense}:
        prepare(build, path)
    console.print(_opening(model, plan, minutes), markup=False)
    floor = bandwidth.floor(path, options.threads)
    outcome = Comparison(plan, lambda text: console.print(text, markup=False)).run()
    return _result(model, plan, outcome, floor, absent, options.max_prompt)


def gather(
    tokenizer: Tokenizer, options: argparse.Namespace, console: Console
) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts to measure, and some of other conversations."""
    files = {_stem(path): path for path in options.workload} if options.workload else workload.known()
    if not options.workload and workload.data_folder() is None:
        console.print("no trace data here (PACELINE_DATA names its folder): using the project's own prompts")
    prompts: list[Prompt] = []
    others: list[Prompt] = []
    for name, path in files.items():
        if not path.is_file():
            raise SystemExit(f"there is no workload {path}")
        limit = options.limit + OTHERS
        found = workload.choose(name, path, tokenizer, limit, options.max_prompt, options.seed)
        if not found:
            console.print(f"left out: {name}: no prompt fits into {options.max_prompt} tokens", markup=False)
        prompts += found[: options.limit]
        others += found[options.limit :]
    if not prompts:
        raise SystemExit("no prompt is left: raise --max-prompt")
    return prompts, others


def _opening(model: str, plan: Plan, minutes: float | None) -> str:
    shares = ", ".join(f"{plan.share(i):.0f} s" for i in range(len(plan.temperatures)))
    limit = f"{minutes:g} minutes, of which a mode has at most {shares} a round" if minutes else "no limit"
    return (
        f"{model}: {len(plan.entries)} modes, {len(plan.prompts)} prompts, up to {plan.repeats} repeats at "
        f"temperature {', '.join(f'{t:g}' for t in plan.temperatures)}; time: {limit}"
    )


def _result(
    model: str, plan: Plan, outcome: Outcome, floor: dict[str, Any], absent: list[str], max_prompt: int
) -> dict[str, Any]:
    names = list(dict.fromkeys(p.workload for p in plan.prompts))
    return {
        "machine": {"model": model, **machine.facts()},
        "settings": {
            "prompts": len(plan.prompts),
            "others": len(plan.others),
            "shortened": sum(p.shortened for p in plan.prompts),
            "prompt_tokens": [len(p.tokens) for p in plan.prompts],
            "max_prompt": max_prompt,
            "max_tokens": plan.max_tokens,
            "repeats": outcome.repeats,
            "threads": plan.threads,
            "seed": plan.seed,
            "ignore_eos": plan.ignore_eos,
            "seconds": round(outcome.seconds),
        },
        "floor": floor,
        "left_out": absent,
        "sat_out": {_name(entry): count for entry, count in outcome.sat_out.items()},
        "precision": {entry.system: entry.build.runs for entry in plan.entries},
        "versions": {_name(entry): version for entry, version in outcome.versions.items()},
        "rows": rows(outcome.samples, plan.entries, outcome.peaks, outcome.errors, plan.temperatures, names),
    }


def _name(entry: Entry) -> str:
    return f"{entry.system} {entry.label}"


def _stem(path: Path) -> str:
    return path.name.partition(".")[0]


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _numbers(text: str) -> list[float]:
    return [float(number) for number in _names(text)]
