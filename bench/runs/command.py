"""python -m bench runs: recorded agent conversations replayed turn by turn over HTTP, whole runs timed.

paceline's server and llama.cpp's, on the same GGUF file, each in turn on the same machine; if named, vLLM's
and Transformers' on the same weights in float32.

In pieces, where a quiet machine is to be had for some minutes only: each with `--skip` and its own
conversations, with the same `--rounds` and one setting of `--llama`; from the second on with `--add`.
"""

import argparse
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from bench import machine, pages, results_folder
from bench.runs import conversations, rounds
from bench.runs.arms import (
    LLAMA,
    LLAMA_SETTINGS,
    NO_TRANSFORMERS,
    OURS,
    TRANSFORMERS,
    VLLM,
    Arm,
    FloatServer,
    LlamaServer,
    PacelineServer,
    float_arm,
    llama_arm,
    paceline_arms,
    transformers_python,
)
from bench.runs.conversations import FILES, Conversation
from bench.runs.replay import HISTORIES, Run, Turn
from bench.runs.rounds import STATES, Outcome, Plan, Rounds
from bench.runs.rows import ratios, rows, tables, texts
from bench.serve import servers
from bench.vllm.server import MISSING, vllm_python
from paceline import hub, limits
from paceline.convert import export_model
from paceline.text import Tokenizer

MODEL: Final = "smollm2-135m"
DEFAULT: Final = (OURS, "plain", LLAMA)
FLOAT: Final = (VLLM, TRANSFORMERS)  # these take gigabytes, and minutes to start
SYSTEMS: Final = (*DEFAULT, *FLOAT)
TRIED: Final = ("plain", "no-flash-attn", "ngram-short")
ROOM: Final = 256  # tokens of llama.cpp's slot beyond the prompt and the answer


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench runs", description=__doc__)
    made.add_argument("--model", default=MODEL)
    made.add_argument("--systems", type=_names, default=list(DEFAULT), help=",".join(SYSTEMS))
    made.add_argument("--sources", type=_names, default=list(FILES), help=",".join(FILES))
    made.add_argument("--conversations", type=int, default=8)
    made.add_argument("--skip", type=int, default=0, help="conversations that come before those")
    made.add_argument("--add", action="store_true", help="to the stored runs of other conversations")
    made.add_argument("--turns", type=int, default=8, help="of a conversation, at most")
    made.add_argument("--max-prompt", type=int, default=4096, help="tokens: a conversation ends before that")
    made.add_argument("--max-tokens", type=int, default=64, help="of an answer")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--minutes", type=float, help="fewer conversations and rounds where time is short")
    made.add_argument("--states", type=_names, default=list(STATES), help=",".join(STATES))
    made.add_argument("--history", choices=HISTORIES, default=HISTORIES[0], help="the assistant's messages")
    made.add_argument(
        "--llama", type=_names, default=list(TRIED), help="settings to try; the fastest is used"
    )
    made.add_argument("--threads", type=int, default=limits.cores())
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--write", action="store_true", help="write bench/results and the pages made from it")
    return made


def measure(options: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Any]:
    path = hub.resolve(options.model)
    chosen = conversations.choose(
        Tokenizer.load(path),
        options.sources,
        options.skip + options.conversations,
        options.turns,
        options.max_prompt,
        options.seed,
    )[options.skip :]
    if not chosen:
        raise SystemExit(f"--skip: there are no more than {options.skip} conversations")
    report(opening(facts_of(chosen)))
    server = PacelineServer(options.model, options.threads)
    arms = paceline_arms(server, "plain" in options.systems) if OURS in options.systems else []
    limit_s = 60 * options.minutes if options.minutes else float("inf")
    plan = Plan(
        arms,
        chosen,
        options.rounds,
        options.states,
        options.max_tokens,
        limit_s,
        options.history,
        options.seed,
    )
    tried: dict[str, float] = {}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if LLAMA in options.systems:
            peers, tried = llama(plan, path, options, report)
            arms = [*arms, *peers]
        arms = [*arms, *in_float32(plan, path, Path(folder), options, report)]
        if not arms:
            raise SystemExit("no server is left to measure")
        plan = replace(plan, arms=arms, limit_s=limit_s - (time.monotonic() - begun))
        return result_of(plan, Rounds(plan, report).run(), tried)


def llama(
    plan: Plan, model: Path, options: argparse.Namespace, report: Callable[[str], None]
) -> tuple[list[Arm], dict[str, float]]:
    """llama.cpp's server in the setting that is fastest here; none where it is not installed."""
    if not servers.llama_installed():
        report("left out: llama.cpp: not installed; run `make bench-peers`")
        return [], {}
    context = longest_context(plan, options)
    candidates = [llama_arm(LlamaServer(model, name, options.threads, context)) for name in options.llama]
    if len(candidates) == 1:
        return candidates, {}
    best, tried = rounds.fastest(plan, candidates, report)
    return [best], tried


def in_float32(
    plan: Plan, model: Path, folder: Path, options: argparse.Namespace, report: Callable[[str], None]
) -> list[Arm]:
    """vLLM's server and Transformers', if they are named and answer here. folder: for the weights."""
    missing = {VLLM: (vllm_python, MISSING), TRANSFORMERS: (transformers_python, NO_TRANSFORMERS)}
    arms = []
    for name in (name for name in FLOAT if name in options.systems):
        python, reason = missing[name]
        if python() is None:
            report(f"left out: {name}: {reason}")
            continue
        weights = folder / "model"
        if not weights.exists():
            export_model(model, weights)
        arm = float_arm(FloatServer(weights, name, options.threads, longest_context(plan, options)))
        try:
            arms.append(rounds.fastest(plan, [arm], report)[0])
        except RuntimeError as problem:
            report(f"left out: {name}: {problem}")
    return arms


def longest_context(plan: Plan, options: argparse.Namespace) -> int:
    longest = max(max(one.prompt_tokens) for one in plan.conversations)
    return int(longest + options.max_tokens + ROOM)


def facts_of(chosen: Sequence[Conversation]) -> list[dict[str, Any]]:
    return [{"name": one.name, "prompt_tokens": list(one.prompt_tokens)} for one in chosen]


def opening(chosen: Sequence[Mapping[str, Any]]) -> str:
    """chosen: facts of conversations."""
    sources = Counter(one["name"].split(" ")[0] for one in chosen)
    counts = ", ".join(f"{count} of {source}" for source, count in sources.items())
    turns = sum(len(one["prompt_tokens"]) for one in chosen)
    longest = max(max(one["prompt_tokens"]) for one in chosen)
    return f"{len(chosen)} conversations ({counts}), {turns} turns, prompts of up to {longest} tokens"


def result_of(plan: Plan, outcome: Outcome, tried: dict[str, float]) -> dict[str, Any]:
    if not outcome.runs:
        raise SystemExit(f"no conversation was answered by all servers: {outcome.failed}")
    return {
        "conversations": facts_of(outcome.conversations),
        "rounds": outcome.rounds,
        "seconds": round(outcome.seconds),
        "tried": {name: round(seconds, 2) for name, seconds in tried.items()},
        "commands": outcome.commands,
        "failed": outcome.failed,
        **summary(facts_of(outcome.conversations), outcome.runs),
    }


def summary(chosen: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> dict[str, Any]:
    return {
        "opening": opening(chosen),
        "rows": rows(runs),
        "ratios": ratios(runs),
        "texts": texts(runs),
        "runs": [asdict(run) for run in runs],
    }


def joined(stored: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """The stored runs of other conversations and those measured: pieces of one measurement.

    A round of the whole has the runs of that round in every piece, so only rounds count that all have.
    """
    names = {one["name"] for one in measured["conversations"]}
    chosen = [one for one in stored["conversations"] if one["name"] not in names]
    chosen += measured["conversations"]
    number = min(stored["rounds"], measured["rounds"])
    raw = [run for run in stored["runs"] if run["conversation"] not in names] + measured["runs"]
    runs = [
        Run(**{**run, "turns": tuple(Turn(**turn) for turn in run["turns"])})
        for run in raw
        if run["round"] < number
    ]
    return {
        **measured,
        "conversations": chosen,
        "rounds": number,
        "seconds": stored["seconds"] + measured["seconds"],
        "tried": stored["tried"] | measured["tried"],
        "failed": stored["failed"] | measured["failed"],
        **summary(chosen, runs),
    }


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def check(options: argparse.Namespace) -> None:
    known = {"systems": SYSTEMS, "states": STATES, "llama": tuple(LLAMA_SETTINGS), "sources": tuple(FILES)}
    for name, values in known.items():
        given = getattr(options, name)
        if unknown := [value for value in given if value not in values]:
            raise SystemExit(f"--{name}: {unknown[0]!r} is none of {', '.join(values)}")
        if not given:
            raise SystemExit(f"--{name}: expected some of {', '.join(values)}")


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(arguments) if arguments is not None else []
    options = parser().parse_args(given)
    check(options)
    servers.end_with_this_process()
    console = Console(width=None if Console().is_terminal else 180)
    measured = measure(options, lambda text: console.print(text, markup=False, highlight=False))
    if options.add:
        measured = joined(results_folder.read_one(f"runs-{options.model}"), measured)
    settings = {name: value for name, value in vars(options).items() if name not in ("model", "write")}
    result = {
        "machine": {"model": options.model, **machine.facts()},
        "command": shlex.join(["python", "-m", "bench", "runs", *given]),
        "settings": settings,
        **measured,
    }
    for table in tables(result):
        console.print(table.terminal(1))
    equal = result["texts"]
    console.print(f"text equal to plain: {equal['equal']} of {equal['compared']} turns", highlight=False)
    if options.write:
        results_folder.write(result, f"runs-{options.model}")
        pages.write()
    if equal["differing"]:
        raise SystemExit(f"text differs from plain: {'; '.join(equal['differing'])}")
