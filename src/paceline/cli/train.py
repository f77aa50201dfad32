"""paceline train"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from paceline.cli import completion
from paceline.cli.options import AsJson, grouped
from paceline.config import EngineConfig
from paceline.errors import SettingError, UsageError
from paceline.hub import DEFAULT_MODEL

log = logging.getLogger("paceline")

if TYPE_CHECKING:
    from paceline.heads.head_checkpoint import Card
    from paceline.train.data.answer_plan import AnswersConfig
    from paceline.train.draft_model.card import DraftCard
    from paceline.train.evaluate import Acceptance
    from paceline.train.head_pipeline import Report, TrainJob
    from paceline.train.recipe import Kind

CPU_HEAD: Final[dict[str, Any]] = {"tokens_per_batch": 2048, "anchors": 32, "eval_steps": 20}
CPU_MODEL: Final[dict[str, Any]] = {"tokens_per_batch": 1024}
LORA_RANK: Final = 16
DRAFT_VOCAB: Final = 8192


@dataclass(frozen=True, slots=True)
class DrafterChoice:
    """The drafter to train, and where it goes."""

    target: Annotated[str, typer.Option(help="The model to draft for.", autocompletion=completion.models)] = (
        DEFAULT_MODEL
    )
    kind: Annotated[str, typer.Option(help="block, medusa, eagle, or model: a whole draft model.")] = "block"
    out: Annotated[
        str,
        typer.Option(
            help="A name or a folder; default TARGET-KIND-local. The same again resumes a training."
        ),
    ] = ""
    start: Annotated[str, typer.Option(help="A trained drafter to continue: needs far less data.")] = ""
    replace: Annotated[
        bool, typer.Option("--replace", help="Use the new drafter even if it measures worse than the old.")
    ] = False
    draft_vocab: Annotated[
        int, typer.Option(help="Tokens that can be drafted; 0: 8192, or as many as before with --start.")
    ] = 0

    def folder(self) -> Path:
        """By default a name that no drafter in the package has: those are found by their names."""
        from paceline.heads.local_heads import output_path

        return output_path(self.out or f"{Path(self.target).name}-{self.kind}-local")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """For kind model."""

    draft: Annotated[str, typer.Option(help="For kind model: the model to start from.")] = ""
    lora: Annotated[int, typer.Option(help="For kind model: rank of the LoRA adapters; 0: all weights.")] = (
        LORA_RANK
    )
    distill: Annotated[
        float,
        typer.Option(
            help="For kind model: share of the loss that is the distance to the target's distribution."
        ),
    ] = 0.0


def _renamed(new: str, value: int, old: str, old_value: int | None) -> int:
    if old_value is None:
        return value
    log.warning("%s is now called %s; the old name will be removed", old, new)
    return old_value


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """The target's answers that a drafter is trained on."""

    traces: Annotated[
        list[str], typer.Option(help="Conversations: a .jsonl or .jsonl.gz file, or a trace store.")
    ]
    prompts: Annotated[int, typer.Option(help="Recorded prompts to answer, at most; 0: all.")] = 0
    synthetic: Annotated[
        int,
        typer.Option("--synthetic", help="Synthetic requests for each one recorded with tools."),
    ] = 0
    synthetic_chats: Annotated[
        int,
        typer.Option("--synthetic-chats", help="The same for each one without tools."),
    ] = 0
    made_up: Annotated[int | None, typer.Option("--made-up", hidden=True)] = None  # names before 0.2
    made_up_chats: Annotated[int | None, typer.Option("--made-up-chats", hidden=True)] = None
    per_prompt: Annotated[int, typer.Option(help="Answers to each; all but the first are sampled.")] = 1
    required: Annotated[
        float, typer.Option(help="Share of the recorded tool calls that must be calls again, by grammar.")
    ] = 0.8
    only_calls: Annotated[bool, typer.Option(help="Train on recorded tool calls alone.")] = False
    answers_from: Annotated[
        str, typer.Option(help="A vLLM server's URL that writes the answers, with the same model.")
    ] = ""
    hidden_states_from: Annotated[
        str,
        typer.Option(
            help="A vLLM server's URL whose hidden states a head learns from, with the same model: "
            "`paceline vllm command --hidden-states` starts it."
        ),
    ] = ""
    max_new: Annotated[int, typer.Option(help="Tokens of an answer, at most.")] = 384
    max_prompt: Annotated[int, typer.Option(help="Tokens of a prompt, at most.")] = 1536

    def config(self, schedule: "ScheduleOptions") -> "AnswersConfig":
        from paceline.train.data.answer_plan import AnswersConfig
        from paceline.train.data.rollout import Rollout

        return AnswersConfig(
            max_prompt=self.max_prompt,
            max_prompts=self.prompts,
            synthetic=_renamed("--synthetic", self.synthetic, "--made-up", self.made_up),
            synthetic_chats=_renamed(
                "--synthetic-chats", self.synthetic_chats, "--made-up-chats", self.made_up_chats
            ),
            per_prompt=self.per_prompt,
            required=self.required,
            only_calls=self.only_calls,
            answers_from=self.answers_from,
            seed=schedule.seed,
            rollout=Rollout(max_new=self.max_new),
            engine=EngineConfig(device=schedule.device),
        )


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """How long training takes, and where it runs."""

    minutes: Annotated[float, typer.Option(help="Of training, after the answers are made.")] = 10.0
    steps: Annotated[int, typer.Option(help="Of training, instead of minutes: repeatable by seed.")] = 0
    batch_tokens: Annotated[
        int, typer.Option(help="Of one step, prompts included; 0: what suits the device.")
    ] = 0
    seed: Annotated[int, typer.Option()] = 0
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"

    def settings(self, on_cpu: dict[str, Any]) -> dict[str, Any]:
        """on_cpu: defaults for a CPU, where batches must be small."""
        from paceline.target.eager.target import placement

        cpu = placement(EngineConfig(device=self.device))[0].type == "cpu"
        batch = {"tokens_per_batch": self.batch_tokens} if self.batch_tokens else {}
        common = {"minutes": self.minutes, "steps": self.steps, "seed": self.seed}
        return {**common, **(on_cpu if cpu else {}), **batch}


@grouped
def train(
    drafter: DrafterChoice,
    answers: AnswerOptions,
    schedule: ScheduleOptions,
    model: ModelOptions,
    as_json: AsJson = False,
) -> None:
    """Train a drafter on the target's own answers to recorded conversations."""
    if drafter.kind == "model":
        _train_model(drafter, answers, schedule, model, as_json)
        return
    if model != ModelOptions():
        raise UsageError(
            f"--draft, --lora and --distill are for kind model: leave them out for {drafter.kind}"
        )
    _train_head(_head_job(drafter, answers, schedule), as_json)


def _head_job(drafter: DrafterChoice, answers: AnswerOptions, schedule: ScheduleOptions) -> "TrainJob":
    from paceline.heads.local_heads import drafter_path
    from paceline.heads.versions import current
    from paceline.train.head_pipeline import TrainJob
    from paceline.train.recipe import TrainConfig

    if drafter.start and drafter.draft_vocab:
        raise UsageError("with --start a drafter keeps the size of its vocabulary: leave --draft-vocab out")
    config = TrainConfig(
        kind=_known_kind(drafter.kind),
        max_len=answers.max_prompt + answers.max_new,
        draft_vocab=drafter.draft_vocab or DRAFT_VOCAB,
        **schedule.settings(CPU_HEAD),
    )
    return TrainJob(
        drafter.target,
        tuple(answers.traces),
        drafter.folder(),
        current(drafter_path(drafter.start)).folder if drafter.start else None,
        answers.config(schedule),
        config,
        replace=drafter.replace,
        hidden_states_from=answers.hidden_states_from,
    )


def _known_kind(kind: str) -> "Kind":
    from paceline.train.recipe import KINDS

    for known in KINDS:
        if kind == known:
            return known
    raise SettingError("kind", kind, f"one of {', '.join((*KINDS, 'model'))}")


def _train_head(job: "TrainJob", as_json: bool) -> None:
    from paceline.heads.head_checkpoint import CARD
    from paceline.train.head_pipeline import CANDIDATE, run

    with _progress_bars() as report:
        card = run(job, report)
    candidate = job.folder / CANDIDATE
    folder = candidate if candidate.exists() else job.folder
    if as_json:
        print((folder / CARD).read_text())
    else:
        _show_head(card, job, folder)


def _train_model(
    drafter: DrafterChoice,
    answers: AnswerOptions,
    schedule: ScheduleOptions,
    model: ModelOptions,
    as_json: bool,
) -> None:
    from paceline.heads.local_heads import DRAFT_CARD
    from paceline.loading import draft_model_path
    from paceline.train.draft_model.finetune import FinetuneConfig
    from paceline.train.draft_model.pipeline import DraftJob, run
    from paceline.train.head_pipeline import CANDIDATE

    if drafter.start:
        raise UsageError("kind model starts from --draft: leave --start out")
    if answers.hidden_states_from:
        raise UsageError("kind model reads no hidden states: leave --hidden-states-from out")
    config = FinetuneConfig(
        lora=model.lora,
        distill=model.distill,
        max_len=2 * (answers.max_prompt + answers.max_new),
        **schedule.settings(CPU_MODEL),
    )
    if not model.draft:
        raise UsageError("kind model needs --draft: the small model to start from, by name or folder")
    draft_model_path(model.draft)  # an error if there is no such model
    sources, folder = tuple(answers.traces), drafter.folder()
    job = DraftJob(
        drafter.target,
        model.draft,
        sources,
        folder,
        answers.config(schedule),
        config,
        replace=drafter.replace,
    )
    with _progress_bars() as report:
        card = run(job, report)
    candidate = folder / CANDIDATE
    held = candidate.exists()
    if as_json:
        print(((candidate if held else folder) / DRAFT_CARD).read_text())
    else:
        _show_model(card, folder, held)


@contextmanager
def _progress_bars() -> Iterator["Report"]:
    """One bar for each stage of the pipeline, with the time left."""
    from paceline.train.head_pipeline import PipelineProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    bars: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def report(now: PipelineProgress) -> None:
            if now.stage not in bars:
                bars[now.stage] = progress.add_task(now.stage, note="")
            progress.update(bars[now.stage], completed=now.done, total=now.total, note=now.note)

        yield report


def _show_head(card: "Card", job: "TrainJob", folder: Path) -> None:
    from paceline.train.data.held_out import nothing_measured
    from paceline.train.head_pipeline import reason_to_hold

    out = Console(highlight=False)
    if card.acceptance:
        _show_figures(card, out)
        _show_few(card.counts[0], out)
    else:
        out.print(nothing_measured(card.data["prompts"]), soft_wrap=True)
    if folder != job.folder:
        _show_held(job.folder.name, reason_to_hold(card), "--trained", out)
    out.print(str(folder), markup=False, soft_wrap=True)


def _show_few(positions: int, out: Console) -> None:
    from paceline.train.head_pipeline import FEW_POSITIONS

    if positions < FEW_POSITIONS:
        message = f"These figures rest on {positions} positions only: give more conversations to trust them."
        out.print(message, soft_wrap=True)


def _show_figures(card: "Card", out: Console) -> None:
    from paceline.train.publish import ACCEPTED, EVAL_DRAFT

    table = Table("position", "accepted", "95 % interval", "n", "tokens per pass so far")
    rows = zip(card.acceptance, card.intervals(), card.counts, card.tokens_per_pass, strict=True)
    for position, (share, (low, high), n, rate) in enumerate(rows, 1):
        table.add_row(str(position), f"{share:.1%}", f"{low:.1%} to {high:.1%}", str(n), f"{rate:.2f}")
    out.print(table)
    for kind, figures in card.data["by_kind_of_text"].items():
        rate, anchors = figures["tokens_per_pass"][-1], figures["anchors"]
        out.print(f"{kind}: {rate:.2f} tokens per pass (n {anchors})", markup=False)
    length = min(EVAL_DRAFT, card.shape.block)
    accepted = f"{card.data[ACCEPTED]:.1%} of the tokens reached are accepted, {length} in a draft"
    if "before" in card.data:
        accepted += f"; {card.data['before']['accepted']:.1%} before"
    out.print(accepted, markup=False)


def _show_model(card: "DraftCard", folder: Path, held: bool) -> None:
    from paceline.train.data.held_out import nothing_measured
    from paceline.train.draft_model.pipeline import reason_to_hold
    from paceline.train.head_pipeline import CANDIDATE

    out = Console(highlight=False)
    if card.after.anchors:
        out.print(_model_table(card.before, card.after))
        _show_few(card.after.anchors, out)
    else:
        out.print(nothing_measured(card.data["prompts"]), soft_wrap=True)
    if held:
        _show_held(folder.name, reason_to_hold(card), "--draft-model", out)
    out.print(str(folder / CANDIDATE if held else folder), markup=False, soft_wrap=True)


def _show_held(name: str, reason: str, option: str, out: Console) -> None:
    """option: the one that loads the new drafter from its folder."""
    out.print(f"{name} stays as it was: {reason}.", markup=False, soft_wrap=True)
    ways = f"run the same command with --replace added, or name its folder with {option}"
    out.print(f"To use the new drafter anyway, {ways}:", markup=False, soft_wrap=True)


def _model_table(before: "Acceptance", after: "Acceptance") -> Table:
    from paceline.heads.calibration import wilson_interval

    table = Table("position", "accepted", "95 % interval", "n", "tokens per pass before", "after")
    rates = zip(before.tokens_per_pass, after.tokens_per_pass, strict=True)
    shares = zip(after.by_position, after.counts, strict=True)
    for position, ((share, n), (old, new)) in enumerate(zip(shares, rates, strict=True), 1):
        low, high = wilson_interval(share, n)
        interval = f"{low:.1%} to {high:.1%}"
        table.add_row(str(position), f"{share:.1%}", interval, str(n), f"{old:.2f}", f"{new:.2f}")
    return table
