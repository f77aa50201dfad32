"""paceline split plan: does a drafter on the user's device pay? paceline split pull."""

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import AsJson, grouped
from paceline.config import require
from paceline.errors import UsageError

if TYPE_CHECKING:  # other commands start without them
    from paceline.split.measured_costs import Measured
    from paceline.split.planner import ModePlan, SplitPlan

split_app = typer.Typer(no_args_is_help=True, help="Drafts on the user's device, verified in the cloud.")


@split_app.command("pull")
def pull_package(
    name: Annotated[str, typer.Argument(help="wllama or onnxruntime.")] = "wllama",
) -> None:
    """Download what runs a model in the browser, by npm."""
    from paceline.split.npm_packages import PACKAGES, pull

    require(lambda x: x in PACKAGES, "name", name, " or ".join(PACKAGES))
    folder = pull(PACKAGES[name])
    print(f"{PACKAGES[name].id} is at {folder}: servers with --split offer it at /edge")


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """The link, the target and the drafter. Without a server to measure, the first four are needed."""

    rtt: Annotated[float | None, typer.Option(help="Round trip in ms, with queues: its 95th percentile.")] = (
        None
    )
    target_ms: Annotated[float | None, typer.Option(help="A pass of the target for one token.")] = None
    draft_ms: Annotated[float | None, typer.Option(help="Each token drafted on the device.")] = None
    acceptance: Annotated[
        float | None,
        typer.Option(help="P(a drafted token is accepted), if all before it were: 0 to less than 1."),
    ] = None
    verify_ms: Annotated[
        float, typer.Option(help="A pass of the target over a draft; 0: 1.1 x --target-ms.")
    ] = 0.0
    max_draft: Annotated[int, typer.Option(help="Most drafted tokens in a pass.")] = 8
    message: Annotated[
        int,
        typer.Option(help="Tokens that the device drafts before it sends them, if the server never waits."),
    ] = 1

    def given(self) -> dict[str, float]:
        """As the planner names them, without those to be measured."""
        settings = {
            "rtt_ms": self.rtt,
            "target_ms": self.target_ms,
            "draft_ms": self.draft_ms,
            "acceptance": self.acceptance,
            "verify_ms": self.verify_ms,
            "max_draft": self.max_draft,
            "message": self.message,
        }
        return {name: value for name, value in settings.items() if value is not None}


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """The request that a server is measured with."""

    prompt: Annotated[str, typer.Option(help="With URL: the message of the request.")] = (
        "List the months of the year, then list them again."
    )
    max_tokens: Annotated[int, typer.Option(min=2, help="With URL: tokens of its answer at most.")] = 128
    api_key: Annotated[
        str | None, typer.Option(envvar="PACELINE_API_KEY", help="With URL: key of the server.")
    ] = None


@split_app.command("plan")
@grouped
def plan_split(
    options: SplitOptions,
    request: MeasureOptions,
    url: Annotated[
        str | None,
        typer.Argument(help="A server of `paceline serve --split`: what is not given is measured."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time per token, passes saved and the longest round trip that pays, for each mode."""
    from paceline.split.planner import SplitCosts, plan

    given = options.given()
    if url is None:
        needed = {"rtt_ms": "--rtt", "target_ms": "--target-ms", "draft_ms": "--draft-ms"}
        missing = [
            option for name, option in {**needed, "acceptance": "--acceptance"}.items() if name not in given
        ]
        if missing:
            raise UsageError(f"give {', '.join(missing)}, or the address of a server to measure")
        measured, made = None, plan(SplitCosts(**given))  # type: ignore[arg-type]
    else:
        measured = _measured(url, request)
        made = plan(measured.costs(**given))
    if as_json:
        print(json.dumps({**made.as_dict(), "measured": None if measured is None else asdict(measured)}))
        return
    lines = [*_table(made), "", *_reading(made)]
    print("\n".join(lines if measured is None else [*_measurement(measured), "", *lines]))


def _measured(url: str, request: MeasureOptions) -> "Measured":
    import asyncio

    from paceline.split.measured_costs import measure

    messages = [{"role": "user", "content": request.prompt}]
    body = {"messages": messages, "max_tokens": request.max_tokens, "temperature": 0}
    return asyncio.run(measure(url, body, request.api_key))


def _measurement(found: "Measured") -> list[str]:
    shown = "unknown" if found.acceptance is None else f"{found.acceptance:.2f}"
    return [
        f"round trip        {found.rtt_ms:.1f} ms, 95th percentile",
        f"a token           {found.target_ms:.1f} ms, of {found.tokens} without drafts",
        f"a drafted token   {found.draft_ms:.3f} ms, of the drafter ngram",
        f"acceptance        {shown}, of {found.verified} drafted tokens that were verified",
    ]


def _table(made: "SplitPlan") -> list[str]:
    head = f"{'mode':<15}{'ms/token':>9}{'x streaming':>13}{'passes saved':>14}{'break-even':>12}"
    head += f"{'bytes up':>10}{'down':>6}"
    return [head, *map(_row, made.modes)]


def _row(one: "ModePlan") -> str:
    row = f"{one.mode:<15}{one.ms_per_token:>9.1f}{one.speedup:>11.2f} x{100 * one.passes_saved:>12.0f} %"
    return f"{row}{_break_even(one):>12}{one.bytes_up:>10.0f}{one.bytes_down:>6.0f}"


def _break_even(one: "ModePlan") -> str:
    if one.mode == "streaming":
        return "-"
    if one.break_even_rtt_ms is None:
        return "any RTT"
    return f"{one.break_even_rtt_ms:.0f} ms" if one.break_even_rtt_ms else "never"


def _reading(made: "SplitPlan") -> list[str]:
    costs, after = made.costs, made.overtakes_after
    if after is None and costs.draft_ms < costs.target_ms:
        drafts = "No draft is worth a pass of a server that does not wait, at this acceptance."
    elif after is None:
        drafts = "Drafts never overtake a server that does not wait: the drafter is too slow for this target."
    else:
        share = 100 * costs.acceptance**after
        begin = f"A server that does not wait first uses a draft {after} tokens after a rejection"
        drafts = f"{begin}: {share:.0f} % of the runs get there."
    return [
        "break-even: the longest round trip at which a mode is not slower than plain streaming.",
        drafts,
        "Synchronous is no mode of the server, but the textbook's split: a round trip for every draft.",
    ]
