"""From a trained network to a drafter's folder: stored first, then measured as it is stored."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from paceline.drafters.heads.choose import drafter_of
from paceline.heads.head_checkpoint import Card, Storage, load, save, save_card
from paceline.train.calibrate import calibrate
from paceline.train.evaluate import BucketAt, Guess, Recorded, acceptance, by_bucket, replay
from paceline.train.recipe import Recipe, pieces_of
from paceline.train.train_decoder import TrainDecoder

MEASURED: Final = 5  # guesses in a draft, in the figures by kind of text
ACCEPTED: Final = f"accepted of {MEASURED}"  # share of the guesses that are reached
TOGETHER: Final = 48  # texts that are played back beside one another


def publish(
    folder: Path,
    recipe: Recipe,
    model: TrainDecoder,
    target: str,
    texts: Sequence[Recorded],
    data: Mapping[str, Any],
    weights: Storage = "int8",
    bucket: BucketAt | None = None,
    on_drafts: Callable[[Sequence[Guess]], None] = lambda _: None,
) -> Card:
    """texts: held out from training. data: what it was trained on, for the card. target: its name.

    bucket: by which the card tells kinds of text apart. on_drafts: hears of every guess that was measured.
    """
    card = Card(recipe.kind, recipe.net.shape, target, model.fingerprint, weights, data=dict(data))
    save(folder, card, recipe.net)
    net, most = load(folder, pieces_of(model)).net, card.shape.block
    guesses = replay(drafter_of(net), model, texts, most, batch=TOGETHER)
    on_drafts(guesses)
    if guesses:
        found = acceptance(guesses, texts, most)
        accepted = acceptance(guesses, texts, min(MEASURED, most)).accepted
        card = replace(
            card,
            acceptance=found.by_place,
            tokens_per_pass=found.tokens_per_pass,
            data={**card.data, ACCEPTED: accepted},
        )
    if bucket is not None:
        kinds = by_bucket(guesses, texts, min(MEASURED, most), bucket)
        told = {kind: asdict(figures) for kind, figures in kinds.items()}
        card = replace(card, data={**card.data, "by_kind_of_text": told})
    if recipe.kind == "block":  # the one that says how sure it is
        fit = calibrate(guesses, most, recipe.calibration)
        gap = {"calibration gap": [round(fit.before, 4), round(fit.after, 4)]} if guesses else {}
        card = replace(card, calibration=fit.calibration, data={**card.data, **gap})
    save_card(folder, card)
    return card
