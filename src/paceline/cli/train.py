"""paceline train"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from paceline.config import EngineConfig
from paceline.errors import SettingError, UsageError
from paceline.hub import DEFAULT_MODEL

if TYPE_CHECKING:
    from paceline.heads.head_checkpoint import Card
    from paceline.train.head_pipeline import Report, TrainJob
    from paceline.train.recipe import Kind

SMALL: Final[dict[str, Any]] = {"tokens_per_batch": 2048, "anchors": 32, "look_steps": 20}  # for a CPU
LORA: Final = 16
VOCABULARY: Final = 8192
SMALL_MODEL: Final[dict[str, Any]] = {"tokens_per_batch": 1024}  # likewise


def train(
    traces: Annotated[
        list[str], typer.Option(help="Conversations: a .jsonl or .jsonl.gz file, or a trace store.")
    ],
    target: Annotated[str, typer.Option(help="The model that the drafter is to guess.")] = DEFAULT_MODEL,
    kind: Annotated[str, typer.Option(help="block, medusa, eagle, or model: a whole draft model.")] = "block",
    draft: Annotated[str, typer.Option(help="For kind model: the model to begin from.")] = "",
    lora: Annotated[
        int, typer.Option(help="For kind model: rank of what is trained; 0: all weights.")
    ] = LORA,
    distill: Annotated[
        float,
        typer.Option(help="For kind model: share of the loss that is the distance from the target's law."),
    ] = 0.0,
    minutes: Annotated[float, typer.Option(help="Of training, after the answers are written.")] = 10.0,
    steps: Annotated[int, typer.Option(help="Of training, instead of minutes: repeatable by seed.")] = 0,
    out: Annotated[
        str, typer.Option(help="A name or a folder; the same again goes on where it stopped.")
    ] = "",
    start: Annotated[str, typer.Option(help="A trained drafter to go on from.")] = "",
    prompts: Annotated[int, typer.Option(help="Most recorded prompts to answer; 0: all.")] = 0,
    made_up: Annotated[
        int, typer.Option(help="Further requests that the target makes up for each one recorded with tools.")
    ] = 0,
    made_up_chats: Annotated[int, typer.Option(help="The same for each one recorded without tools.")] = 0,
    per_prompt: Annotated[int, typer.Option(help="Answers to each; all but the first are sampled.")] = 1,
    required: Annotated[
        float, typer.Option(help="Share of the recorded tool calls that must be calls again, by grammar.")
    ] = 0.8,
    only_calls: Annotated[bool, typer.Option(help="Learn from recorded tool calls alone.")] = False,
    max_new: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 384,
    max_prompt: Annotated[int, typer.Option(help="Most tokens of a prompt.")] = 1536,
    batch_tokens: Annotated[
        int, typer.Option(help="Of one step, prompts included; 0: what suits the device.")
    ] = 0,
    draft_vocab: Annotated[
        int, typer.Option(help="Tokens that can be guessed; 0: 8192, or as many as before with --start.")
    ] = 0,
    seed: Annotated[int, typer.Option()] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="The drafter's card as JSON.")] = False,
) -> None:
    """Train a drafter on what the target answers in recorded conversations."""
    from paceline.cli.train_model import train_model
    from paceline.heads.head_checkpoint import CARD
    from paceline.heads.local_heads import drafter_path, output_path
    from paceline.heads.versions import current
    from paceline.train.data.plan import AnswersConfig
    from paceline.train.data.rollout import Rollout
    from paceline.train.draft_model.finetune import TuneConfig
    from paceline.train.head_pipeline import TrainJob, run
    from paceline.train.recipe import TrainConfig

    folder = output_path(out or f"{Path(target).name}-{kind}")
    answers = AnswersConfig(
        max_prompt=max_prompt,
        max_prompts=prompts,
        made_up=made_up,
        made_up_chats=made_up_chats,
        per_prompt=per_prompt,
        required=required,
        only_calls=only_calls,
        seed=seed,
        rollout=Rollout(max_new=max_new),
        engine=EngineConfig(device=device),
    )
    if kind == "model":
        if start:
            raise UsageError("kind model begins from --draft: leave --start out")
        tuned = TuneConfig(
            lora=lora,
            distill=distill,
            minutes=minutes,
            steps=steps,
            seed=seed,
            max_len=2 * (max_prompt + max_new),
            **_size(device, batch_tokens, SMALL_MODEL),
        )
        train_model(target, draft, tuple(traces), folder, answers, tuned, _bars, as_json)
        return
    if draft or distill or lora != LORA:
        raise UsageError(f"--draft, --lora and --distill are for kind model: leave them out for {kind}")
    if start and draft_vocab:
        raise UsageError("a drafter that goes on keeps the size of its vocabulary: leave --draft-vocab out")
    job = TrainJob(
        target,
        tuple(traces),
        folder,
        current(drafter_path(start)).folder if start else None,
        answers,
        TrainConfig(
            kind=_known(kind),
            minutes=minutes,
            steps=steps,
            seed=seed,
            max_len=max_prompt + max_new,
            draft_vocab=draft_vocab or VOCABULARY,
            **_size(device, batch_tokens, SMALL),
        ),
    )
    with _bars() as report:
        card = run(job, report)
    if as_json:
        print((job.folder / CARD).read_text())
    else:
        _show(card, job)


def _size(device: str, batch_tokens: int, on_a_cpu: dict[str, Any]) -> dict[str, Any]:
    from paceline.target.eager.target import placement

    small = on_a_cpu if placement(EngineConfig(device=device))[0].type == "cpu" else {}
    return {**small, **({"tokens_per_batch": batch_tokens} if batch_tokens else {})}


def _known(kind: str) -> "Kind":
    from paceline.train.recipe import KINDS

    for known in KINDS:
        if kind == known:
            return known
    raise SettingError("kind", kind, f"one of {', '.join((*KINDS, 'model'))}")


@contextmanager
def _bars() -> Iterator["Report"]:
    """One bar for each part of the job, with the time left."""
    from paceline.train.head_pipeline import Told

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    bars: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def report(told: Told) -> None:
            if told.what not in bars:
                bars[told.what] = progress.add_task(told.what, note="")
            progress.update(bars[told.what], completed=told.done, total=told.of, note=told.note)

        yield report


def _show(card: "Card", job: "TrainJob") -> None:
    from paceline.train.data.held_out import nothing_measured

    out = Console(highlight=False)
    if card.acceptance:
        _show_figures(card, out)
    else:
        out.print(nothing_measured(card.data["prompts"]), soft_wrap=True)
    out.print(str(job.folder), markup=False)


def _show_figures(card: "Card", out: Console) -> None:
    from paceline.train.publish import ACCEPTED, MEASURED

    table = Table("guess", "right if those before are", "tokens per pass so far")
    for place, (right, rate) in enumerate(zip(card.acceptance, card.tokens_per_pass, strict=True), 1):
        table.add_row(str(place), f"{right:.1%}", f"{rate:.2f}")
    out.print(table)
    for kind, found in card.data["by_kind_of_text"].items():
        out.print(f"{kind}: {found['tokens_per_pass'][-1]:.2f} tokens per pass", markup=False)
    guesses = min(MEASURED, card.shape.block)
    accepted = f"{card.data[ACCEPTED]:.1%} of the guesses reached are accepted, {guesses} in a draft"
    if "before" in card.data:
        accepted += f"; {card.data['before']['accepted']:.1%} before"
    out.print(accepted, markup=False)
