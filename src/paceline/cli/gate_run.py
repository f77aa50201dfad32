"""paceline gate run"""

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from paceline.cli.render import bar
from paceline.errors import SettingError, UsageError

if TYPE_CHECKING:  # other commands start without statistics
    from paceline.gate.cases import Case
    from paceline.gate.pair import Pair
    from paceline.gate.policy import Policy
    from paceline.gate.replay import GateRun
    from paceline.gate.verdict import Verdict

out = Console(highlight=False, soft_wrap=True)

UpstreamUrl = Annotated[str, typer.Option(help="An OpenAI-compatible server: http://host:port.")]


def run(
    baseline: UpstreamUrl,
    candidate: UpstreamUrl,
    traces: Annotated[
        Path | None,
        typer.Option(help="Requests to replay: .jsonl or .jsonl.gz of `paceline trace export`, of pairs, or of conversations."),
    ] = None,
    suite: Annotated[
        str | None, typer.Option(help="A set with known answers: schemas, bfcl, ragtruth, halueval, code.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="The folder of the suites' files; else that of PACELINE_DATA.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="A YAML file: margins and error rates; else the defaults.")
    ] = None,
    max_pairs: Annotated[int, typer.Option(min=1, help="Most pairs.")] = 1000,
    stop_early: Annotated[
        bool, typer.Option(help="Stop as soon as the verdict is promote or roll back.")
    ] = True,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer, where the request has no limit.")] = 256,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="For all requests; else as recorded, and 0 where nothing was.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Answers to each request, under other seeds.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the requests that have none.")] = 0,
    cohort: Annotated[
        str, typer.Option(help="A field of the records, or of their metadata, that divides them into cohorts.")
    ] = "",
    baseline_body: Annotated[
        str, typer.Option(help='JSON added to the baseline\'s requests: {"speculative_config": {"disabled": true}}.')
    ] = "{}",
    candidate_body: Annotated[str, typer.Option(help="JSON added to the candidate's requests.")] = "{}",
    baseline_model: Annotated[str | None, typer.Option(help="Else the first that it serves.")] = None,
    candidate_model: Annotated[str | None, typer.Option(help="Else the first that it serves.")] = None,
    baseline_key: Annotated[str, typer.Option(envvar="PACELINE_BASELINE_KEY", help="Its API key.")] = "",
    candidate_key: Annotated[str, typer.Option(envvar="PACELINE_CANDIDATE_KEY", help="Its API key.")] = "",
    judge: Annotated[
        str | None, typer.Option(help="A URL that gets {request, answer} and gives {score}: a judge model.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that an answer gets.")] = 300.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report as JSON.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write the report as one HTML file.")] = None,
    pairs_file: Annotated[Path | None, typer.Option("--pairs", help="Write the pairs, one JSON object a line.")] = None,
    texts: Annotated[bool, typer.Option(help="Prompts and answers into --pairs and --html too.")] = False,
) -> None:
    """Replay requests on a baseline and a candidate, and decide: promote (exit code 0), hold (3), roll back (4).

    Tools are never executed. Code that answers the suite `code` runs in a child process with limits.
    """
    from paceline.gate.replay import Judge, Replay, run_gate
    from paceline.gate.upstream import Upstream

    replay = Replay(
        baseline=Upstream(
            name="baseline",
            url=baseline,
            api_key=baseline_key,
            model=baseline_model,
            extra_body=_object("--baseline-body", baseline_body),
        ),
        candidate=Upstream(
            name="candidate",
            url=candidate,
            api_key=candidate_key,
            model=candidate_model,
            extra_body=_object("--candidate-body", candidate_body),
        ),
        policy=_policy(policy),
        judge=None if judge is None else Judge(judge),
        timeout_s=timeout,
        stop_early=stop_early,
    )
    cases = _cases(traces, suite, data, cohort)
    from paceline.gate.cases import with_defaults

    limited = with_defaults(
        cases,
        max_pairs + replay.warmup,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        repeats=repeats,
    )
    with bar() as progress:

        def step(pair: "Pair", verdict: "Verdict | None") -> None:
            progress("pairs", max_pairs)
        done = asyncio.run(run_gate(replay, limited))
    about = {
        "baseline": baseline,
        "candidate": candidate,
        "requests": str(traces or f"suite {suite}"),
        "models": ", ".join(_models(done.pairs)),
    }
    _write(done, about, json_file, html_file, pairs_file, texts)
    _show(done.verdict)
    raise typer.Exit(done.verdict.exit_code)
