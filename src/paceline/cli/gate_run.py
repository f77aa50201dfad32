"""paceline gate run"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline.cli.options import grouped, require_writable
from paceline.errors import SettingError, UsageError

if TYPE_CHECKING:  # other commands start without statistics
    from paceline.gate.cases import Case
    from paceline.gate.pair import Pair
    from paceline.gate.policy import Policy
    from paceline.gate.replay import GateRun
    from paceline.gate.upstream import Upstream
    from paceline.gate.verdict import Verdict

MAX_REASONS = 6  # printed
INTERRUPTED = 130  # exit code after Ctrl-C, as of shells
URL_HELP = "An OpenAI-compatible server: http://host:port."

out = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class ArmOptions:
    """The two servers that are compared."""

    baseline: Annotated[str, typer.Option(help=URL_HELP)]
    candidate: Annotated[str, typer.Option(help=URL_HELP)]
    baseline_model: Annotated[str | None, typer.Option(help="Else the first that it serves.")] = None
    candidate_model: Annotated[str | None, typer.Option(help="Else the first that it serves.")] = None
    baseline_body: Annotated[str, typer.Option(help="A JSON object, added to its requests.")] = "{}"
    candidate_body: Annotated[str, typer.Option(help="A JSON object, added to its requests.")] = "{}"
    baseline_key: Annotated[str, typer.Option(envvar="PACELINE_BASELINE_KEY", help="API key.")] = ""
    candidate_key: Annotated[str, typer.Option(envvar="PACELINE_CANDIDATE_KEY", help="API key.")] = ""

    def upstream(self, arm: str) -> "Upstream":
        from paceline.gate.upstream import Upstream

        given = {name: getattr(self, f"{arm}_{name}") for name in ("model", "body", "key")}
        return Upstream(
            name=arm,
            url=getattr(self, arm),
            api_key=given["key"],
            model=given["model"],
            extra_body=_object(f"--{arm}-body", given["body"]),
        )

    def about(self) -> dict[str, str]:
        """For the report: one server with two bodies is an experiment too."""
        facts = {"baseline": self.baseline, "candidate": self.candidate}
        bodies = {"baseline body": self.baseline_body, "candidate body": self.candidate_body}
        return facts | {name: body for name, body in bodies.items() if body != "{}"}


@dataclass(frozen=True, slots=True)
class CaseOptions:
    """The requests that are replayed."""

    traces: Annotated[
        Path | None,
        typer.Option(help="A .jsonl or .jsonl.gz file: exported traces, pairs, requests or conversations."),
    ] = None
    suite: Annotated[
        str | None, typer.Option(help="A set with known answers: schemas, bfcl, ragtruth, halueval or code.")
    ] = None
    data: Annotated[
        Path | None, typer.Option(help="The folder of the suites' files; else that of PACELINE_DATA.")
    ] = None
    max_pairs: Annotated[int, typer.Option(min=1, help="Most pairs.")] = 1000
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer whose request has no limit.")] = 256
    temperature: Annotated[
        float | None, typer.Option(min=0, help="For all requests; else as recorded, or 0.")
    ] = None
    repeats: Annotated[int, typer.Option(min=1, help="Answers to each request, under other seeds.")] = 1
    seed: Annotated[int, typer.Option(help="Of requests that have none.")] = 0
    cohort: Annotated[str, typer.Option(help="A field of the records that divides them into cohorts.")] = ""

    @property
    def source(self) -> str:
        return self.traces.name if self.traces is not None else f"suite {self.suite}"

    def cases(self, warmup: int) -> "Iterator[Case]":
        from paceline.gate.cases import read_cases, with_defaults
        from paceline.gate.suites import suite_cases

        if self.traces is not None and self.suite is None:
            read = read_cases(self.traces, self.cohort)
        elif self.suite is not None and self.traces is None:
            read = suite_cases(self.suite, self.data)
        else:
            raise UsageError("give either --traces or --suite")
        return with_defaults(
            read,
            self.max_pairs + warmup,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            repeats=self.repeats,
        )


@dataclass(frozen=True, slots=True)
class ReportOptions:
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report as JSON.")] = None
    html_file: Annotated[Path | None, typer.Option("--html", help="Write the report as HTML.")] = None
    pairs_file: Annotated[Path | None, typer.Option("--pairs", help="Write the pairs as JSON lines.")] = None
    texts: Annotated[
        bool, typer.Option(help="Prompts and answers into --pairs, answers into --html and --json.")
    ] = False

    def check(self) -> None:
        require_writable(self.json_file, self.html_file, self.pairs_file)

    def write(self, done: "GateRun", about: dict[str, Any]) -> None:
        from paceline.gate.report import html_report, json_report

        pairs = done.pairs if self.texts else tuple(pair.without_text() for pair in done.pairs)
        if self.json_file is not None:
            self.json_file.write_text(json_report(done.verdict, about, pairs), encoding="utf-8")
        if self.html_file is not None:
            self.html_file.write_text(html_report(done.verdict, pairs, about), encoding="utf-8")
        if self.pairs_file is not None:
            lines = "".join(f"{pair.to_json()}\n" for pair in pairs)
            self.pairs_file.write_text(lines, encoding="utf-8")


@grouped
def run(
    arms: ArmOptions,
    cases: CaseOptions,
    report: ReportOptions,
    policy: Annotated[
        Path | None, typer.Option(help="A YAML file of margins and error rates; else the defaults.")
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible server whose model scores the answers.")
    ] = None,
    judge_model: Annotated[str | None, typer.Option(help="Its model, where it serves several.")] = None,
    judge_key: Annotated[str, typer.Option(envvar="PACELINE_JUDGE_KEY", help="API key.")] = "",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that an answer gets.")] = 300.0,
    stop_early: Annotated[bool, typer.Option(help="End at the first promote or roll back.")] = True,
    resume: Annotated[
        Path | None, typer.Option(help="Pairs of a run that was cut: they count and are not asked again.")
    ] = None,
) -> None:
    """Replay requests on two servers and decide: promote (exit code 0), hold (3) or roll back (4).

    No tool is ever executed. The code that answers the suite `code` runs in a child process with limits.
    """
    import asyncio

    from paceline.gate.judge import Judge
    from paceline.gate.replay import GateRun, Replay, run_gate
    from paceline.gate.upstream import Upstream
    from paceline.gate.verdict import decide

    report.check()
    replay = Replay(
        baseline=arms.upstream("baseline"),
        candidate=arms.upstream("candidate"),
        policy=_policy(policy),
        judge=None
        if judge is None
        else Judge(Upstream(name="judge", url=judge, model=judge_model, api_key=judge_key)),
        timeout_s=timeout,
        stop_early=stop_early,
    )
    wanted, earlier = _begun(cases.cases(replay.warmup)), _earlier(resume)
    columns = (MofNCompleteColumn(), TextColumn("pairs, {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task("no verdict yet", total=cases.max_pairs)
        pairs = list(earlier)
        shown.advance(task, len(earlier))

        def step(pair: "Pair", verdict: "Verdict | None") -> None:
            pairs.append(pair)
            shown.advance(task)
            if verdict is not None:
                shown.update(task, description=verdict.decision)

        interrupted = False
        try:
            done = asyncio.run(run_gate(replay, wanted, step, earlier))
        except KeyboardInterrupt:
            if not pairs:
                raise
            done, interrupted = GateRun(decide(pairs, replay.policy), tuple(pairs)), True
    report.write(done, arms.about() | {"requests": cases.source} | _models(done.pairs))
    show(done.verdict)
    raise typer.Exit(INTERRUPTED if interrupted else done.verdict.exit_code)


def _begun(cases: "Iterator[Case]") -> "Iterator[Case]":
    """With the first one read: a file that cannot be used shows before any progress does."""
    first = [*islice(cases, 1)]
    return chain(first, cases)


def show(verdict: "Verdict") -> None:
    from paceline.gate.report import shown

    table = Table(box=None, pad_edge=False, collapse_padding=True)  # 80 columns are enough
    for name in ("check", "state", "estimate", "interval", "margin", "pairs", "missing"):
        table.add_column(name, no_wrap=name != "interval", overflow="fold")
    for f in verdict.findings:
        if f.status == "skipped" or (f.segment != "all" and f.status == "pass"):
            continue
        where = "" if f.segment == "all" else f" in {f.segment}"
        bounds = f"{shown(f.interval.lower, f.unit)} to {shown(f.interval.upper, f.unit)}"
        table.add_row(
            f"{f.check}{' *' if f.required else ''}{where}",
            f.status,
            shown(f.estimate, f.unit),
            bounds,
            shown(f.margin, f.unit),
            f"{f.pairs:,}",
            f"{f.missing_pairs:,}" if f.missing_pairs else "",
        )
    out.print(table)
    out.print("* must pass for a promotion\n")
    show_reasons(verdict)


def show_reasons(verdict: "Verdict", indent: str = "") -> None:
    out.print(f"{indent}{verdict.headline}", markup=False)
    for reason in verdict.reasons[:MAX_REASONS]:
        out.print(f"{indent}  {reason}", markup=False)
    if (rest := len(verdict.reasons) - MAX_REASONS) > 0:
        out.print(f"{indent}  and {rest} more", markup=False)


def _policy(path: Path | None) -> "Policy":
    from paceline.gate.policy import Policy
    from paceline.web.config_file import ConfigFileError, checked, read

    return Policy() if path is None else checked(Policy, read(path, ConfigFileError), ConfigFileError)


def _earlier(path: Path | None) -> "list[Pair]":
    from paceline.gate.cases import json_lines
    from paceline.gate.pair import pair_from_dict

    return [] if path is None else [pair_from_dict(record) for record in json_lines(path)]


def _object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise SettingError(option, text, "a JSON object")
    return value


def _models(pairs: "Sequence[Pair]") -> dict[str, Any]:
    return {
        f"{arm} model": ", ".join(sorted({getattr(pair, arm).model for pair in pairs} - {""}))
        for arm in ("baseline", "candidate")
    }
