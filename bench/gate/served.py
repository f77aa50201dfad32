"""python -m bench gate-served: verdicts on a real model, on recorded conversations.

Two servers: plain decoding, and paceline's defaults. The candidate is the second one as it is, or behind a
proxy that spoils it (bench/gate/sabotage.py).

--candidate speculative   the defaults; promotion is expected
--candidate plain         plain decoding again, in another process: A/A, to be held
--candidate slower        30 ms more for every chunk: to be rolled back
--candidate biased        another temperature, at --temperature 1: to be rolled back by `distribution`
--candidate schemas       --suite schemas; one answer in a hundred loses its last character

--pairs FILE is continued where it exists, so that a long run can be made in parts.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from pathlib import Path

from bench.gate.sabotage import sabotaged
from bench.serve.servers import RunningServer, end_with_this_process, paceline
from bench.workload import data_folder
from paceline import hub
from paceline.gate.cases import Case, read_cases, with_defaults
from paceline.gate.pair import Pair
from paceline.gate.policy import Policy
from paceline.gate.replay import Replay, run_pairs
from paceline.gate.report import html_report, json_report
from paceline.gate.suites import suite_cases
from paceline.gate.upstream import Upstream
from paceline.gate.verdict import Verdict, decide

PLAIN = ("--drafters", "none")
SPOILED = ("slower", "biased", "schemas", "changed")
LOOK_EVERY = 10


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=hub.DEFAULT_MODEL)
    parser.add_argument("--candidate", choices=("speculative", "plain", *SPOILED), default="speculative")
    parser.add_argument("--traces", default="traces/bfcl_single_turn.jsonl.gz")
    parser.add_argument("--suite")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-characters", type=int, default=2000, help="of a request that is taken")
    parser.add_argument("--max-pairs", type=int, default=1000)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="end after this time, whatever the verdict"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--html", type=Path)
    parser.add_argument("--json", type=Path)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    given = parser().parse_args(arguments)
    end_with_this_process()
    known = (
        [Pair.from_json(line) for line in given.pairs.open()] if given.pairs and given.pairs.exists() else []
    )
    cases = islice(chosen(given), len(known), None)
    with arms(given) as (baseline, candidate):
        replay = Replay(
            baseline=Upstream(name="baseline", url=baseline),
            candidate=Upstream(name="candidate", url=candidate),
        )
        verdict, pairs = asyncio.run(measure(replay, cases, known, given))
    about = {"baseline": f"{given.model}, plain", "candidate": f"{given.model}, {given.candidate}"}
    about["requests"] = given.suite or given.traces
    if given.html:
        given.html.write_text(html_report(verdict, pairs, about))
    if given.json:
        given.json.write_text(json_report(verdict, about))
    print(verdict.summary)
    for finding in verdict.findings:
        if finding.status != "skipped":
            print(f"{finding.check:<18} {finding.segment:<18} {finding.status:<10} {finding.message}")
    sys.exit(verdict.exit_code)


async def measure(
    replay: Replay, cases: Iterator[Case], known: list[Pair], given: argparse.Namespace
) -> tuple[Verdict, list[Pair]]:
    pairs, until = list(known), time.monotonic() + given.seconds
    policy = Policy()
    output = given.pairs.open("a") if given.pairs else None
    async for pair in run_pairs(replay, cases):
        pairs.append(pair)
        if output is not None:
            output.write(pair.to_json() + "\n")
            output.flush()
        if len(pairs) % LOOK_EVERY == 0:
            verdict = decide(pairs, policy)
            print(verdict.summary[:200], flush=True)
            if verdict.decision != "hold":
                return verdict, pairs
        if time.monotonic() > until:
            break
    return decide(pairs, policy), pairs


def chosen(given: argparse.Namespace) -> Iterator[Case]:
    folder = data_folder()
    if folder is None:
        raise SystemExit("no recorded conversations here: PACELINE_DATA names their folder")
    read = suite_cases(given.suite, folder) if given.suite else read_cases(folder / given.traces)
    short = (case for case in read if len(str(case.request)) <= given.max_characters)
    first, rest = list(islice(short, 1)), short
    return with_defaults(
        chain(first, first, first, rest),  # the first ones warm up
        given.max_pairs,
        max_tokens=given.max_tokens,
        temperature=given.temperature,
        seed=0,
    )


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
