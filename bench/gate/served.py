"""python -m bench gate-served: `paceline gate run` on a real model, on recorded conversations.

Two servers: plain decoding, and paceline's defaults. The candidate is the second one as it is, or behind a
proxy that spoils it (bench/gate/sabotage.py). The conversations are of MINT, which no drafter and no constant
was chosen on.

--candidate speculative   the defaults: to be promoted
--candidate plain         plain decoding again, in another process: A/A, to be held
--candidate slower        60 ms more for every chunk: to be rolled back by `end_to_end`
--candidate biased        temperature 0.3 instead of 1: to be rolled back by `distribution`
--candidate schemas       one answer in ten loses its last character; texts may differ (lossless: false), so
                          that schemas alone decide: to be rolled back by `schema_validity`
--candidate changed       one answer in ten has another word: to be rolled back by `text_agreement`

Ends with 0 where the verdict is the expected one. After --seconds the command is interrupted, and its verdict
is that on the pairs so far. With --pairs the next one goes on from there: the verdict is over all pieces.
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

from bench import machine, results_folder
from bench.gate.sabotage import sabotaged
from bench.serve.servers import RunningServer, end_with_this_process, paceline
from bench.table import Column, number
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
KEPT: Final = (
    "ttft",
    "tpot",
    "end_to_end",
    "text_agreement",
    "distribution",
    "schema_validity",
    "cost_passes",
    "acceptance",
)
COLUMNS: Final = (
    Column("candidate", "candidate"),
    Column("expected", "expected"),
    Column("verdict", "verdict"),
    Column("pairs", "pairs"),
    Column("end to end, x plain", lambda row: _estimate(row, "end_to_end")),
    Column("identical texts", lambda row: _texts(row)),
    Column("because of", lambda row: ", ".join(reason.partition(":")[0] for reason in row["reasons"])),
    Column("measured", lambda row: f"{row['date']}, {row['commit']}"),
)
SPOILED: Final = ("slower", "biased", "schemas", "changed")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench gate-served",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=hub.DEFAULT_MODEL)
    parser.add_argument("--candidate", choices=tuple(EXPECTED), default="speculative")
    parser.add_argument("--traces", default="traces/mint_code_actions.jsonl.gz")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--max-characters", type=int, default=4500, help="of the messages before an answer")
    parser.add_argument("--max-pairs", type=int, default=600)
    parser.add_argument("--seconds", type=float, default=120.0, help="then the verdict is that so far")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--html", type=Path)
    parser.add_argument("--pairs", type=Path, help="of all pieces: what is in it counts")
    parser.add_argument("--write", action="store_true", help="keep the verdict in bench/results")
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
        if given.candidate == "schemas":
            (Path(folder) / "policy.yaml").write_text("lossless: false\n")
            command += ["--policy", str(Path(folder) / "policy.yaml")]
        if given.html is not None:
            command += ["--html", str(given.html)]
        if given.pairs is not None:
            command += ["--pairs", str(given.pairs), "--texts"]  # later pieces compare distributions
            command += ["--resume", str(given.pairs)] if given.pairs.exists() else []
        run(command, given.seconds)
        verdict = json.loads(report.read_text())
    if given.write:
        keep(given, verdict)
    sys.exit(conclusion(given.candidate, verdict))


def keep(given: argparse.Namespace, report: Mapping[str, Any]) -> None:
    """Beside the verdicts on other candidates."""
    name = f"gate-{given.model}"
    results = [r for r in results_folder.read("gate") if r["machine"]["model"] == given.model]
    kept: list[dict[str, Any]] = results[0]["rows"] if results else []
    facts = {**machine.facts(), "model": given.model}
    row = {
        "candidate": given.candidate,
        "expected": EXPECTED[given.candidate][0],
        **{key: facts[key] for key in ("date", "commit")},
        **{key: report[key] for key in ("verdict", "pairs", "reasons")},
        "findings": [f for f in report["findings"] if f["check"] in KEPT and f["segment"] == "all"],
    }
    others = [other for other in kept if other["candidate"] != given.candidate]
    rows = sorted([*others, row], key=lambda one: list(EXPECTED).index(one["candidate"]))
    settings = {key: getattr(given, key) for key in ("traces", "max_tokens", "max_characters")}
    command = f"python -m bench gate-served --candidate {given.candidate} --pairs FILE --write"
    result = {"machine": facts, "command": command, "settings": settings, "rows": rows}
    results_folder.write(result, name)


def _estimate(row: Mapping[str, Any], check: str) -> str:
    """Of a ratio; a margin in milliseconds has another unit."""
    found = [f["estimate"] for f in row["findings"] if f["check"] == check and f["unit"] == "ratio"]
    return number(found[0]) if found else "-"


def _texts(row: Mapping[str, Any]) -> str:
    found = [f for f in row["findings"] if f["check"] == "text_agreement" and f["status"] != "skipped"]
    return found[0]["message"].partition(" identical")[0] if found else "-"


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
    cut = (shortened(record, given.max_characters) for record in json_lines(folder / given.traces))
    chosen = islice(filter(None, cut), given.max_pairs + 2)  # two warm up
    return map(constrained, chosen) if given.candidate == "schemas" else chosen


def shortened(record: Mapping[str, Any], characters: int) -> dict[str, Any] | None:
    """A conversation as far as the messages before its last answer are short enough; None: no answer."""
    messages = record["messages"]
    spoken = [i for i, message in enumerate(messages) if i and message["role"] == "assistant"]
    fits = [i for i in spoken if len(json.dumps(messages[:i])) <= characters]
    return {**record, "messages": messages[: fits[-1] + 1]} if fits else None


def constrained(record: Mapping[str, Any]) -> dict[str, Any]:
    """The opening of a conversation with a schema for its answer: what to do first, and why."""
    actions = {"enum": ["think", "execute", "answer"]}
    properties = {"action": actions, "reason": {"type": "string", "maxLength": 60}}
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    roles = [message["role"] for message in record["messages"]]
    messages = record["messages"][: roles.index("assistant")]
    format_ = {"type": "json_schema", "json_schema": {"name": "choice", "schema": schema}}
    return {"messages": messages, "response_format": format_, "max_tokens": 48}


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
