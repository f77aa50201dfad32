"""python -m bench own: paceline's own figures; prints a table, writes bench/results/ and docs/numbers.md."""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import agent, decode, machine, memory, overhead, readme, report, sections
from paceline import LLM, hub

ROOT = Path(__file__).parent.parent
HIDDEN = ("what", "runs")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write bench/results and docs/numbers.md")
    options = parser.parse_args(arguments)
    llm = LLM(hub.DEFAULT_MODEL)
    measured: dict[str, dict[str, Any]] = {
        "plain decoding": decode.measure(llm, options.repeats),
        "agent workflow": agent.measure(llm, options.repeats),
        "engine overhead": overhead.measure(llm),
        "suffix drafting": apart("bench.suffix"),
        "memory": memory.measure(hub.DEFAULT_MODEL),
    }
    facts = {"model": llm.name, **machine.facts()}
    show(measured)
    print(json.dumps({"machine": facts, "results": measured}))
    if options.write:
        write(facts, measured)


def apart(module: str) -> dict[str, Any]:
    """Runs a measurement in a process of its own, whose memory is then its alone."""
    done = subprocess.run(
        [sys.executable, "-m", module], capture_output=True, text=True, check=True, cwd=ROOT
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def show(measured: dict[str, dict[str, Any]]) -> None:
    table = Table("measurement", "figure", "value")
    for name, values in measured.items():
        for key, value in values.items():
            if key not in HIDDEN:
                table.add_row(name, key, str(value))
    Console().print(table)


def write(facts: dict[str, Any], measured: dict[str, dict[str, Any]]) -> None:
    report.write({"machine": facts, "results": measured}, "cpu")
    write_pages()


def write_pages() -> None:
    """docs/numbers.md and the README's tables, from the kept results."""
    kept = json.loads((ROOT / "bench" / "results" / "cpu.json").read_text())
    (ROOT / "docs" / "numbers.md").write_text(page(kept["machine"], kept["results"]))
    front = ROOT / "README.md"
    readme.update(front, readme.section(kept["machine"], kept["results"]))
    if peers := report.results():
        readme.update(front, report.readme(peers), report.BEGIN, report.END)


def page(facts: dict[str, Any], measured: dict[str, dict[str, Any]]) -> str:
    """docs/numbers.md, all of it; comparisons are read from bench/results."""
    lines = ["# Numbers", "", "Written by `python -m bench.run --write`; a spread is lowest to highest.", ""]
    lines += ["| machine | |", "|---|---|", *(f"| {k} | {v} |" for k, v in facts.items()), ""]
    for name, values in measured.items():
        lines += [f"## {name}", "", f"{values['what']}", "", "| figure | value |", "|---|---|"]
        lines += [f"| {k} | {v} |" for k, v in values.items() if k not in HIDDEN]
        lines.append("")
    lines += sections.every()
    return "\n".join(lines)


if __name__ == "__main__":
    main()
