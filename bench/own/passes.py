"""python -m bench passes: what a pass costs by its rows, a prompt by its length, a token by its context.

paceline and llama.cpp on the same file in the same run, taking turns.
"""

import argparse
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console

from bench import machine, pages, results_folder
from bench.own import bandwidth
from bench.peers import amx
from bench.peers.child import Child, PeerFailed
from bench.peers.systems import BUILDS, Build
from bench.spread import Spread, ratio
from bench.table import Column, Table, number, spread
from paceline import hub, limits

ROWS: Final = (1, 2, 4, 8, 12, 16)
PROMPTS: Final = (512, 3200)  # tokens
CONTEXTS: Final = (300, 3000, 8000)
PATIENCE: Final = 600.0  # seconds
PROBED: Final = ("paceline", "llama_python")  # drivers whose passes can be reached one by one

Cell = tuple[int, int]  # context, rows; with no context: a prompt


def cells(contexts: Sequence[int], prompts: Sequence[int]) -> Iterator[list[Cell]]:
    """Groups to take in this order: a context only ever grows within a system, or it is filled anew."""
    yield [(0, tokens) for tokens in prompts]
    first, *others = contexts
    yield [(first, rows) for rows in ROWS]
    yield from ([(context, 1)] for context in others)


def measure(
    children: Mapping[str, Child], groups: Sequence[list[Cell]], repeats: int, seed: int = 0
) -> dict[str, dict[Cell, list[float]]]:
    """Milliseconds by system and cell; the first of each is for warming. Prompts are taken fewer times."""
    rng = random.Random(seed)
    found: dict[str, dict[Cell, list[float]]] = {name: {} for name in children}
    for group in groups:
        prompt = group[0][0] == 0
        for turn in range((1 + repeats // 3 if prompt else repeats) + (not prompt)):
            order = [(cell, name) for cell in group for name in children]
            for cell, name in rng.sample(order, len(order)):
                request = {"do": "pass", "context": cell[0], "rows": cell[1]}
                seconds = children[name].ask(request, PATIENCE)["seconds"]
                if turn or prompt:
                    found[name].setdefault(cell, []).append(1000 * seconds)
    return found


def summary(found: Mapping[str, Mapping[Cell, list[float]]]) -> list[dict[str, Any]]:
    """One row for each cell; a prompt's milliseconds are per token."""
    ours = found["paceline"]
    rows = []
    for cell in sorted(ours):
        context, count = cell
        per = count if context == 0 else 1
        row: dict[str, Any] = {"context": context, "rows": count, "what": _what(cell)}
        for name, values in found.items():
            row[name] = asdict(Spread.of([v / per for v in values[cell]]))
            if context:
                row[name]["times_one_row"] = median(values[cell]) / median(values[context, 1])
        others = [name for name in found if name != "paceline"]
        if others:
            row["ratio"] = asdict(ratio(found[others[0]][cell], ours[cell]))
        rows.append(row)
    return rows


def _what(cell: Cell) -> str:
    context, count = cell
    return f"prompt of {count}, ms per token" if context == 0 else f"{count} rows after {context}, ms"


def table(rows: Sequence[dict[str, Any]], title: str = "") -> Table:
    """Milliseconds of each pass; the ratio is the peer's time over paceline's."""
    names = [key for key in rows[0] if key not in ("context", "rows", "what", "ratio")]
    columns = [
        Column("pass", "what"),
        *(Column(name, partial(_time, name)) for name in names),
        *(Column(f"{name}, x one row", partial(_flat, name)) for name in names),
        Column("ratio", lambda row: spread(row.get("ratio"))),
    ]
    return Table.of(columns, rows, title)


def _time(name: str, row: Mapping[str, Any]) -> str:
    return spread(row[name])


def _flat(name: str, row: Mapping[str, Any]) -> str:
    return number(row[name].get("times_one_row"))


def probed() -> list[Build]:
    return [build for build in BUILDS if build.driver in PROBED and build.installed]


def start(build: Build, model: Path, threads: int, context: int, **settings: Any) -> Child:
    """Loaded and ready; where there is a choice to be made about AMX, the first that starts."""
    problem = PeerFailed("no way to start it")
    for choice in amx.choices(build.driver):
        child = Child(build.command, choice.environment)
        try:
            known = {**build.settings, **choice.settings, **settings}
            child.load(PATIENCE, model=str(model), threads=threads, context=context, settings=known)
        except PeerFailed as failed:
            problem = failed
            child.close()
        else:
            return child
    raise problem


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench passes", description=__doc__)
    parser.add_argument("--model", default=hub.DEFAULT_MODEL)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=limits.cores())
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)))
    parser.add_argument("--prompts", default=",".join(map(str, PROMPTS)))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help="write bench/results")
    options = parser.parse_args(arguments)
    contexts = [int(c) for c in options.contexts.split(",")]
    prompts = [int(p) for p in options.prompts.split(",")]
    path, console = hub.resolve(options.model), Console(width=None if Console().is_terminal else 160)
    with ExitStack() as ended:
        children: dict[str, Child] = {}
        for build in probed():
            try:
                children[build.system] = start(build, path, options.threads, max(*contexts, *prompts) + 64)
                ended.callback(children[build.system].close)
            except PeerFailed as problem:
                console.print(f"left out: {build.system}: {problem}", markup=False)
        rows = summary(measure(children, list(cells(contexts, prompts)), options.repeats))
    floor = bandwidth.floor(path, options.threads)
    result = {
        "machine": {"model": options.model, **machine.facts()},
        "command": " ".join(["python -m bench passes", *(arguments or [])]),
        "floor": floor,
        "rows": rows,
    }
    console.print(table(rows, f"{options.model}, floor {floor['floor_ms']} ms").terminal())
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.write:
        results_folder.write(result, f"passes-{options.model}")
        pages.write()
