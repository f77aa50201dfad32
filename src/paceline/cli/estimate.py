"""paceline estimate: the speed-up of speculation from acceptance and costs, before anything is run."""

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import AsJson, grouped
from paceline.errors import UsageError

if TYPE_CHECKING:  # other commands start without them
    from paceline.advise.speedup import Cost, Costs, Estimate


@dataclass(frozen=True, slots=True)
class CostOptions:
    """What a draft and a pass cost."""

    target_ms: Annotated[float | None, typer.Option(help="A pass of the target for one row.")] = None
    target: Annotated[
        str | None, typer.Option(help="A model whose passes are measured here, instead of --target-ms.")
    ] = None
    context: Annotated[int, typer.Option(min=1, help="Tokens before the rows of a measured pass.")] = 512
    row_ms: Annotated[float, typer.Option(help="Each further row of a pass.")] = 0.0
    compute_ms: Annotated[
        float, typer.Option(help="Arithmetic of one row: a pass takes at least this for each of its rows.")
    ] = 0.0
    draft_ms: Annotated[float, typer.Option(help="Each drafted token.")] = 0.0
    draft_start_ms: Annotated[float, typer.Option(help="Each draft, whatever its length.")] = 0.0
    batch: Annotated[int, typer.Option(help="Sequences that share a pass.")] = 1

    def costs(self) -> "Costs":
        from paceline.advise.speedup import Costs, DraftCost

        return Costs(self._target(), DraftCost(self.draft_ms, self.draft_start_ms), self.batch)

    def _target(self) -> "Cost":
        from paceline.advise.speedup import Roofline

        if (self.target is None) == (self.target_ms is None):
            raise UsageError("give either --target-ms, or --target with a model to measure")
        if self.target_ms is not None:
            return Roofline(self.target_ms, self.row_ms, self.compute_ms)
        if self.row_ms or self.compute_ms:
            raise UsageError("--row-ms and --compute-ms belong to --target-ms: a measured model has its own")
        return _measured(str(self.target), self.context)


def _measured(model: str, context: int) -> "Cost":
    from paceline import hub
    from paceline.config import EngineConfig
    from paceline.target.cost import cost_table
    from paceline.target.load import load_target

    table = cost_table(load_target(hub.resolve(model), EngineConfig()))
    if not table:
        raise UsageError(f"no pass of {model} could be measured: its context is too short")
    if not table.quiet:
        print(f"{model} was measured while the machine was busy: repeat it when it is not", file=sys.stderr)
    return partial(table, context=context)


@grouped
def estimate(
    acceptance: Annotated[
        float, typer.Option(help="P(a drafted token is accepted), if all before it were: 0 to 1.")
    ],
    costs: CostOptions,
    draft_length: Annotated[int, typer.Option(help="Tokens of a draft.")] = 5,
    max_draft: Annotated[int, typer.Option(help="Longest draft that is considered as the best.")] = 16,
    plot: Annotated[Path | None, typer.Option(help="Save the speed-up by length: .svg or .png.")] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate the speed-up of speculation from acceptance and costs."""
    from paceline.advise import speedup

    made = speedup.estimate(acceptance, draft_length, costs.costs(), max_draft)
    if plot is not None:
        _save_plot(made, plot)
    if as_json:
        print(json.dumps(made.as_dict()))
        return
    print("\n".join([*_summary(made), "", *_lengths(made), "", *_load(made)]))


def _summary(made: "Estimate") -> list[str]:
    chosen, best, naive = made.chosen, made.best, made.textbook
    length, a = chosen.draft_length, made.acceptance
    enough = made.break_even_acceptance
    needs = "no acceptance is enough" if enough is None else f"acceptance {enough:.2f}, for this length"
    drafted, verified = f"{chosen.draft_ms:.1f} drafting", f"{chosen.verify_ms:.1f} verifying"
    return [
        f"tokens per pass   {chosen.tokens_per_pass:.2f}: {made.accepted:.2f} accepted, 1 of the model's own",
        f"time of a round   {chosen.draft_ms + chosen.verify_ms:.1f} ms: {drafted}, {verified}",
        f"speed-up          {chosen.speedup:.2f} x",
        f"best length       {best.draft_length}: {best.speedup:.2f} x",
        f"break-even        {needs}",
        f"textbook          {naive.speedup:.2f} x: {a:g} x {length} = {naive.accepted:.2f} accepted tokens",
        "",
        "The textbook counts every drafted token by itself. But a token is accepted only if all before it",
        f"are: {_powers(a, length)} = {made.accepted:.2f}. With the token that the pass adds,",
        f"E(K) = (1 - a^(K+1)) / (1 - a) = {chosen.tokens_per_pass:.2f}.",
    ]


def _powers(a: float, length: int) -> str:
    if length <= 3:
        return " + ".join(f"{a:g}^{k}" if k > 1 else f"{a:g}" for k in range(1, length + 1))
    return f"{a:g} + {a:g}^2 + ... + {a:g}^{length}"


def _lengths(made: "Estimate") -> list[str]:
    from paceline.advise.chart import terminal_bars

    shown = made.lengths[: max(made.best.draft_length, made.chosen.draft_length, 7) + 2]
    labels = [f"{at.draft_length}" for at in shown]
    bars = terminal_bars(labels, [at.speedup for at in shown], made.best.draft_length)
    return ["Speed-up by draft length; < is the best:", *bars]


def _load(made: "Estimate") -> list[str]:
    if made.crossover_rows is None:
        return [
            "One more row costs nothing with these figures, so load changes nothing. Give --compute-ms or",
            "--row-ms, or measure a model with --target, to see where speculation fades out.",
        ]
    rows = f"{made.crossover_rows:.1f}"
    lines = [
        f"Passes of fewer than about {rows} rows are bound by memory: another row is cheap. Larger ones are",
        "bound by arithmetic. Best length by sequences in a pass:",
    ]
    for at in made.batches:
        best = f"{at.draft_length}: {at.speedup:.2f} x" if at.draft_length else "none: plain decoding"
        lines.append(f"{at.batch:>3}  {best}")
    return lines


def _save_plot(made: "Estimate", path: Path) -> None:
    from paceline.advise.chart import Chart, Series, save

    speedup = Series("speed-up", [at.speedup for at in made.lengths])
    tokens = Series("tokens per pass", [at.tokens_per_pass for at in made.lengths])
    title, xs = f"Acceptance {made.acceptance:g}", [at.draft_length for at in made.lengths]
    save(Chart(title, "draft length", "times plain decoding", xs, (speedup, tokens), level=1.0), path)
