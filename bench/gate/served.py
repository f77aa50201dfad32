"""python -m bench gate-served: `paceline gate run` on a real model, on recorded conversations.

Two servers: plain decoding, and paceline's defaults. The candidate is the second one as it is, or behind a
proxy that spoils it (bench/gate/sabotage.py).

--candidate speculative   the defaults: to be promoted
--candidate plain         plain decoding again, in another process: A/A, to be held
--candidate slower        60 ms more for every chunk: to be rolled back by `end_to_end`
--candidate biased        temperature 0.3 instead of 1: to be rolled back by `distribution`
--candidate schemas       one answer in ten loses its last character; texts may differ (lossless: false), so
                          that schemas alone decide: to be rolled back by `schema_validity`
--candidate changed       one answer in ten has another word: to be rolled back by `text_agreement`

Ends with 0 where the verdict is the expected one. After --seconds the command is interrupted, and its verdict
is that on the pairs so far.
"""

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from bench.gate.sabotage import sabotaged
from bench.serve.servers import RunningServer, end_with_this_process, paceline
from bench.workload import data_folder
from paceline import hub
from paceline.gate.cases import json_lines

PLAIN: Final = ("--drafters", "none")
# The verdict, and a check that must be among its reasons.
EXPECTED: Final[Mapping[str, tuple[str, str]]] = {
    "speculative": ("promote", "gain"),
    "plain": ("hold", "no gain in speed"),
    "slower": ("roll back", "end_to_end"),
    "biased": ("roll back", "distribution"),
    "schemas": ("roll back", "schema_validity"),
    "changed": ("roll back", "text_agreement"),
}
SPOILED: Final = ("slower", "biased", "schemas", "changed")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench gate-served",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=hub.DEFAULT_MODEL)
    parser.add_argument("--candidate", choices=tuple(EXPECTED), default="speculative")
    parser.add_argument("--traces", default="traces/bfcl_single_turn.jsonl.gz")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--max-characters", type=int, default=1600, help="of a record that is taken")
    parser.add_argument("--max-pairs", type=int, default=600)
    parser.add_argument("--seconds", type=float, default=600.0, help="then the verdict is that so far")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--html", type=Path)
    parser.add_argument("--pairs", type=Path)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    given = parser().parse_args(arguments)
    end_with_this_process()
    with TemporaryDirectory() as folder, arms(given) as (baseline, candidate):
        traces, report = Path(folder) / "requests.jsonl", Path(folder) / "report.json"
        traces.write_text("".join(f"{json.dumps(record)}\n" for record in records(given)))
        command = [sys.executable, "-m", "paceline", "gate", "run", "--baseline", baseline]
        command += ["--candidate", candidate, "--traces", str(traces), "--json", str(report)]
        command += ["--max-pairs", str(given.max_pairs), "--max-tokens", str(given.max_tokens)]
        command += ["--temperature", "1" if given.candidate == "biased" else "0"]
        if given.candidate in SPOILED:
            (Path(folder) / "policy.yaml").write_text(policy(given.candidate))
            command += ["--policy", str(Path(folder) / "policy.yaml")]
        for option in ("html", "pairs"):
            if (file := getattr(given, option)) is not None:
                command += [f"--{option}", str(file)]
        run(command, given.seconds)
        verdict = json.loads(report.read_text())
    sys.exit(conclusion(given.candidate, verdict))


def policy(candidate: str) -> str:
    """The proxy itself delays first tokens, which is not what it is caught for."""
    return "max_ttft_ratio: 10.0\n" + ("lossless: false\n" if candidate == "schemas" else "")


def run(command: Sequence[str], seconds: float) -> None:
    process = subprocess.Popen(command)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait()


def conclusion(candidate: str, verdict: Mapping[str, Any]) -> int:
    """Prints whether the verdict is the expected one; 0: it is."""
    decision, check = EXPECTED[candidate]
    named = any(check in reason for reason in verdict["reasons"])
    right = verdict["verdict"] == decision and named
    what = f"{verdict['verdict']} after {verdict['pairs']} pairs: {'; '.join(verdict['reasons'])}"
    print(f"{'as expected' if right else f'expected {decision} by {check}, got'}: {what}")
    return 0 if right else 1


def records(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Recorded conversations that are short enough, once each."""
    folder = data_folder()
    if folder is None:
        raise SystemExit("no recorded conversations here: PACELINE_DATA names their folder")
    short = (r for r in json_lines(folder / given.traces) if len(json.dumps(r)) <= given.max_characters)
    chosen = islice(short, given.max_pairs + 2)  # two warm up
    return map(constrained, chosen) if given.candidate == "schemas" else chosen


def constrained(record: Mapping[str, Any]) -> dict[str, Any]:
    """The question of a record with a schema for its answer: which tool, and why."""
    tools = [tool["function"]["name"] for tool in record.get("tools") or ()]
    properties = {"tool": {"enum": [*tools, "none"]}, "reason": {"type": "string", "maxLength": 60}}
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    messages = [message for message in record["messages"] if message["role"] in ("system", "user")]
    format_ = {"type": "json_schema", "json_schema": {"name": "choice", "schema": schema}}
    return {"messages": messages, "response_format": format_}


@contextmanager
def arms(given: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The URLs of baseline and candidate."""
    with ExitStack() as stack:
        baseline = started(stack, given, PLAIN)
        candidate = started(stack, given, PLAIN if given.candidate == "plain" else ())
        if given.candidate in SPOILED:
            yield baseline, stack.enter_context(sabotaged(candidate, given.candidate))
        else:
            yield baseline, candidate


def started(stack: ExitStack, given: argparse.Namespace, options: Sequence[str]) -> str:
    server: RunningServer = paceline(given.model, given.threads, 4, cache_mb=256, options=options)
    stack.callback(server.close)
    return f"http://127.0.0.1:{server.port}"


if __name__ == "__main__":
    main()
