"""paceline estimate: the speed-up of speculation from acceptance and costs, before anything is run."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from paceline.cli.options import AsJson, grouped, require_writable
from paceline.errors import SettingError, UsageError

if TYPE_CHECKING:  # other commands start without them
    from paceline.advise.chart import Chart
    from paceline.advise.speedup import Cost, Costs, DraftCost, Estimate

CONTEXT: Final = 512


@dataclass(frozen=True, slots=True)
class CostOptions:
    """What a draft and a pass cost."""

    target_ms: Annotated[float | None, typer.Option(help="A pass of the target for one row.")] = None
    target: Annotated[
        str | None, typer.Option(help="A model whose passes are measured here, instead of --target-ms.")
    ] = None
    context: Annotated[
        int | None,
        typer.Option(
            min=1, max=10_000_000, help=f"Tokens before the rows of a measured pass; without it {CONTEXT}."
        ),
    ] = None
    row_ms: Annotated[float, typer.Option(help="Each further row of a pass.")] = 0.0
    compute_ms: Annotated[
        float, typer.Option(help="Arithmetic of one row: a pass takes at least this for each of its rows.")
    ] = 0.0
    draft_ms: Annotated[
        str,
        typer.Option(
            help="Each drafted token; or drafts by their length, TOKENS:MS,TOKENS:MS, linear in between."
        ),
    ] = "0"
    draft_start_ms: Annotated[float, typer.Option(help="Each draft, whatever its length.")] = 0.0
    draft_row_ms: Annotated[
        float, typer.Option(help="Each drafted token of each sequence after the first.")
    ] = 0.0
    batch: Annotated[int, typer.Option(help="Sequences that share a pass.")] = 1

    def costs(self) -> "Costs":
        from paceline.advise.speedup import Costs

        draft = self._draft()  # before a model is measured
        return Costs(self._target(), draft, self.batch)

    def _draft(self) -> "DraftCost":
        from paceline.advise.speedup import DraftCost

        try:
            if ":" not in self.draft_ms:
                return DraftCost(float(self.draft_ms), self.draft_start_ms, self.draft_row_ms)
            curve = tuple(_point(text) for text in self.draft_ms.split(","))
        except ValueError:
            expected = "milliseconds of a drafted token, or TOKENS:MS,TOKENS:MS"
            raise SettingError("draft_ms", self.draft_ms, expected) from None
        if self.draft_start_ms:
            raise UsageError("--draft-start-ms belongs to a single --draft-ms: a list of drafts contains it")
        return DraftCost(draft_row_ms=self.draft_row_ms, curve=curve)

    def _target(self) -> "Cost":
        from paceline.advise.speedup import Roofline

        if (self.target is None) == (self.target_ms is None):
            raise UsageError("give either --target-ms, or --target with a model to measure")
        if self.target_ms is None:
            if self.row_ms or self.compute_ms:
                raise UsageError(
                    "--row-ms and --compute-ms belong to --target-ms: a measured model has its own"
                )
            return _measured(str(self.target), self.context or CONTEXT)
        if self.context is not None:
            raise UsageError("--context belongs to --target: the passes of --target-ms have no context")
        return Roofline(self.target_ms, self.row_ms, self.compute_ms)


def _point(text: str) -> tuple[int, float]:
    length, _, ms = text.partition(":")
    return int(length), float(ms)


def _measured(model: str, context: int) -> "Cost":
    from paceline import hub
    from paceline.config import EngineConfig
    from paceline.target.cost import batch_ms, cost_table
    from paceline.target.load import load_target

    table = cost_table(load_target(hub.resolve(model), EngineConfig()))
    if not table:
        raise UsageError(f"no pass of {model} could be measured: its context is too short")
    if not table.quiet:
        print(f"{model} was measured while the machine was busy: repeat it when it is not", file=sys.stderr)
    return lambda rows, sequences: batch_ms(table, [(rows // sequences, context, sequences)])


@grouped
def estimate(
    acceptance: Annotated[
        float, typer.Option(help="P(a drafted token is accepted), if all before it were: 0 to 1.")
    ],
    costs: CostOptions,
    draft_length: Annotated[int, typer.Option(help="Tokens of a draft.")] = 5,
    max_draft: Annotated[
        int | None,
        typer.Option(
            help="Longest draft considered as the best; without it 16, or --draft-length if that is more."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Save the speed-up by length and by sequences: .svg or .png.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate the speed-up of speculation from acceptance and costs."""
    from paceline.advise import chart, speedup

    require_writable(plot)
    if plot is not None:
        chart.require_format(plot)
    speedup.require_lengths(acceptance, draft_length, max_draft)  # before a model is measured
    made = speedup.estimate(acceptance, draft_length, costs.costs(), max_draft)
    if plot is not None:
        chart.save(_charts(made), plot)
    if as_json:
        print(json.dumps(made.as_dict(), allow_nan=False))
        return
    print("\n".join([*_summary(made), "", *_lengths(made), "", *_batches(made)]))


def _summary(made: "Estimate") -> list[str]:
    chosen, best, naive = made.chosen, made.best, made.textbook
    length, a = chosen.draft_length, made.acceptance
    enough = made.break_even_acceptance
    needs = "no acceptance is enough" if enough is None else f"acceptance {enough:.2f}, for this length"
    draft_ms, plain_ms = chosen.draft_ms, made.lengths[0].verify_ms
    times = (draft_ms, chosen.verify_ms, draft_ms + chosen.verify_ms, plain_ms, draft_ms + plain_ms)
    drafting, verifying, round_ms, plain, ideal = (_ms(made, time) for time in times)
    return [
        f"tokens per pass   {chosen.tokens_per_pass:.2f}: {made.accepted:.2f} accepted, 1 of the model's own",
        f"time of a round   {round_ms} ms: {drafting} drafting, {verifying} verifying",
        f"speed-up          {chosen.speedup:.2f} x: {chosen.tokens_per_pass:.2f} tokens x "
        f"{plain} / {round_ms} ms",
        f"best length       {best.draft_length}: {best.speedup:.2f} x",
        f"break-even        {needs}",
        f"textbook          {naive.speedup:.2f} x: {a:g} x {length} = {naive.accepted:.2f} accepted tokens x "
        f"{plain} / {ideal} ms",
        "",
        "The textbook counts every drafted token by itself. But a token is accepted only if all before it",
        f"are: {_powers(a, length)} = {made.accepted:.2f}. With the token that the pass adds,",
        f"E(K) = {'K + 1' if a == 1 else '(1 - a^(K+1)) / (1 - a)'} = {chosen.tokens_per_pass:.2f}.",
    ]


def _ms(made: "Estimate", time: float) -> str:
    """With as many decimals as the pass of the model needs: on a GPU one may take less than a millisecond."""
    return f"{time:.1f}" if made.lengths[0].verify_ms >= 10 else f"{time:.3f}"


def _powers(a: float, length: int) -> str:
    if length <= 3:
        return " + ".join(f"{a:g}^{k}" if k > 1 else f"{a:g}" for k in range(1, length + 1))
    return f"{a:g} + {a:g}^2 + ... + {a:g}^{length}"


def _lengths(made: "Estimate") -> list[str]:
    from paceline.advise.chart import terminal_bars

    shown = made.lengths[: max(made.best.draft_length, made.chosen.draft_length, 7) + 2]
    labels = [
        f"{at.draft_length:>2} {_ms(made, at.draft_ms):>8} {_ms(made, at.verify_ms):>9} " for at in shown
    ]
    bars = terminal_bars(labels, [at.speedup for at in shown], made.best.draft_length)
    return ["Draft length, ms of drafting and of verifying, speed-up; < is the best:", *bars]


def _batches(made: "Estimate") -> list[str]:
    from paceline.advise.chart import terminal_bars

    loads = {(at.draft_length, at.speedup, at.chosen_speedup) for at in made.batches}
    if len(loads) == 1 and made.crossover_rows is None:
        return [
            "One more row costs nothing with these figures, so load changes nothing. Give --compute-ms,",
            "--row-ms or --draft-row-ms, or measure a model with --target, to see where drafts fade out.",
        ]
    best = [f"{at.draft_length}: {at.speedup:.2f} x" if at.draft_length else "plain" for at in made.batches]
    labels = [f"{at.batch:>4}  {what:<12}" for at, what in zip(made.batches, best, strict=True)]
    bars = terminal_bars(labels, [at.chosen_speedup for at in made.batches])
    head = f"Sequences in a pass, their best length, speed-up of drafts of {made.chosen.draft_length}:"
    return [*_crossover(made), "", head, *bars]


def _crossover(made: "Estimate") -> list[str]:
    rows, batch = made.crossover_rows, made.crossover_batch
    if rows is None or batch is None:
        return ["No pass is bound by arithmetic with these figures."]
    if rows <= 1:
        return ["Every pass is bound by arithmetic with these figures: each row takes its share."]
    length = made.chosen.draft_length
    return [
        f"Passes of fewer than about {rows:.1f} rows are bound by memory: another row is cheap. Larger ones",
        f"are bound by arithmetic, with drafts of {length} those of {batch:.1f} sequences and more.",
    ]


def _charts(made: "Estimate") -> list["Chart"]:
    """Over draft lengths, and over sequences in a pass."""
    from paceline.advise.chart import Chart, Series

    speedup = Series("speed-up", [at.speedup for at in made.lengths])
    tokens = Series("tokens per pass", [at.tokens_per_pass for at in made.lengths])
    lengths = [at.draft_length for at in made.lengths]
    best = Series("best length", [at.speedup for at in made.batches])
    length = made.chosen.draft_length
    chosen = Series(f"length {length}", [at.chosen_speedup for at in made.batches])
    mark = None if made.crossover_batch is None else (made.crossover_batch, "bound by arithmetic from here")
    batches = [at.batch for at in made.batches]
    title, y = f"Acceptance {made.acceptance:g}", "times plain decoding"
    return [
        Chart(title, "draft length", y, lengths, (speedup, tokens), level=1.0),
        Chart(
            f"{title}, by load",
            "sequences in a pass",
            y,
            batches,
            (best, chosen),
            level=1.0,
            mark=mark,
            log=True,
        ),
    ]
