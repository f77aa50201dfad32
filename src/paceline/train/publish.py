"""From a trained network to a drafter's folder: stored first, then measured as it is stored."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.drafters.heads.choose import drafter_of
from paceline.heads.folder import Card, Storage, load, save, save_card
from paceline.train.calibrate import calibrate
from paceline.train.dense import DenseModel
from paceline.train.evaluate import Recorded, acceptance, replay
from paceline.train.recipe import Recipe, pieces_of


def publish(
    folder: Path,
    recipe: Recipe,
    model: DenseModel,
    target: str,
    texts: Sequence[Recorded],
    data: Mapping[str, Any],
    weights: Storage = "int8",
) -> Card:
    """texts: held out from training. data: what it was trained on, for the card. target: its name."""
    card = Card(recipe.kind, recipe.net.shape, target, model.fingerprint, weights, data=dict(data))
    save(folder, card, recipe.net)
    net, most = load(folder, pieces_of(model)).net, card.shape.block
    guesses = replay(drafter_of(net), model, texts, most)
    found = acceptance(guesses, texts, most)
    card = replace(card, acceptance=found.by_place, tokens_per_pass=found.tokens_per_pass)
    if recipe.kind == "block":  # the one that says how sure it is
        fit = calibrate(guesses, most)
        measured = {"calibration gap": [round(fit.before, 4), round(fit.after, 4)]}
        card = replace(card, calibration=fit.calibration, data={**card.data, **measured})
    save_card(folder, card)
    return card
