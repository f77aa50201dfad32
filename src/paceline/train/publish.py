"""Writes a trained network as a drafter's folder, and measures it as it is stored."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from paceline.drafters.heads import drafter_of
from paceline.heads.head_checkpoint import Card, Storage, load, save, save_card
from paceline.train.calibrate import calibrate
from paceline.train.evaluate import (
    DraftOutcome,
    RecordedText,
    TextKindAt,
    acceptance,
    by_text_kind,
    replay,
)
from paceline.train.recipe import Recipe, pieces_of
from paceline.train.train_decoder import TrainDecoder

EVAL_DRAFT: Final = 5  # tokens in a draft, in figures by kind of text and in comparisons
ACCEPTED: Final = f"accepted of {EVAL_DRAFT}"  # share of the drafted tokens that are reached
REPLAY_BATCH: Final = 48  # texts


def publish(
    folder: Path,
    recipe: Recipe,
    model: TrainDecoder,
    target: str,
    texts: Sequence[RecordedText],
    data: Mapping[str, Any],
    weights: Storage = "int8",
    kind_at: TextKindAt | None = None,
    on_drafts: Callable[[Sequence[DraftOutcome]], None] = lambda _: None,
) -> Card:
    """texts: held out from training. data: what it was trained on, for the card. target: its name.

    kind_at: the kinds of text that the card tells apart. on_drafts: gets every draft that was measured.
    """
    card = Card(recipe.kind, recipe.net.shape, target, model.fingerprint, weights, data=dict(data))
    save(folder, card, recipe.net)
    net, block = load(folder, pieces_of(model)).net, card.shape.block
    drafts = replay(drafter_of(net), model, texts, block, batch=REPLAY_BATCH)
    on_drafts(drafts)
    if drafts:
        measured = acceptance(drafts, texts, block)
        accepted = acceptance(drafts, texts, min(EVAL_DRAFT, block)).accepted
        card = replace(
            card,
            acceptance=measured.by_position,
            tokens_per_pass=measured.tokens_per_pass,
            data={**card.data, ACCEPTED: accepted},
            counts=measured.counts,
        )
    if kind_at is not None:
        kinds = by_text_kind(drafts, texts, min(EVAL_DRAFT, block), kind_at)
        by_kind = {kind: asdict(figures) for kind, figures in kinds.items()}
        card = replace(card, data={**card.data, "by_kind_of_text": by_kind})
    if recipe.kind == "block":  # the only one with a confidence head
        fit = calibrate(drafts, block, recipe.calibration)
        error = {"calibration gap": [round(fit.before, 4), round(fit.after, 4)]} if drafts else {}
        card = replace(card, calibration=fit.calibration, data={**card.data, **error})
    save_card(folder, card)
    return card
