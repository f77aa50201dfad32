"""paceline train --kind model"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paceline.errors import UsageError
from paceline.heads.local_heads import DRAFT_CARD
from paceline.loading import draft_model_path
from paceline.train.data.conversations import Source
from paceline.train.data.held_out import nothing_measured
from paceline.train.data.plan import AnswersConfig
from paceline.train.draft_model.card import DraftCard
from paceline.train.draft_model.finetune import TuneConfig
from paceline.train.draft_model.pipeline import DraftJob, run
from paceline.train.head_pipeline import Report

Bars = Callable[[], AbstractContextManager[Report]]


def train_model(
    target: str,
    draft: str,
    sources: tuple[Source, ...],
    folder: Path,
    answers: AnswersConfig,
    tuned: TuneConfig,
    bars: Bars,
    as_json: bool,
) -> None:
    if not draft:
        raise UsageError("kind model needs --draft: the small model to begin from, by name or folder")
    draft_model_path(draft)  # says so if there is no such model
    job = DraftJob(target, draft, sources, folder, answers, tuned)
    with bars() as report:
        card = run(job, report)
    if as_json:
        print((folder / DRAFT_CARD).read_text())
    else:
        _show(card, folder)


def _show(card: DraftCard, folder: Path) -> None:
    out = Console(highlight=False)
    if card.after.anchors:
        table = Table("guesses in a draft", "tokens per pass before", "after")
        rates = zip(card.before.tokens_per_pass, card.after.tokens_per_pass, strict=True)
        for guesses, (before, after) in enumerate(rates, 1):
            table.add_row(str(guesses), f"{before:.2f}", f"{after:.2f}")
        out.print(table)
    else:
        out.print(nothing_measured(card.data["prompts"]), soft_wrap=True)
    out.print(str(folder), markup=False)
