"""python -m bench own: paceline's own figures: decoding, the agent example, overhead, memory."""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import machine, pages, results_folder
from bench.own import agent, decode, memory, overhead
from bench.table import Table
from paceline import LLM, hub

ROOT = Path(__file__).parent.parent.parent
HIDDEN = ("what", "runs", "precision")


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
        "suffix drafting": apart("bench.own.suffix"),
        "memory": memory.measure(hub.DEFAULT_MODEL),
    }
    facts = {"model": llm.name, **machine.facts()}
    show(measured)
    print(json.dumps({"machine": facts, "results": measured}))
    if options.write:
        results_folder.write({"machine": facts, "results": measured}, "cpu")
        pages.write()


def apart(module: str) -> dict[str, Any]:
    """Runs a measurement in a process of its own, whose memory is then its alone."""
    done = subprocess.run(
        [sys.executable, "-m", module], capture_output=True, text=True, check=True, cwd=ROOT
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def show(measured: dict[str, dict[str, Any]]) -> None:
    rows = [
        [name, key, str(value)]
        for name, values in measured.items()
        for key, value in values.items()
        if key not in HIDDEN
    ]
    Console().print(Table(["measurement", "figure", "value"], rows).terminal(sections=1))


if __name__ == "__main__":
    main()
