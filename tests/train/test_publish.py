"""A folder tells of the network as it is stored in it, not as it was trained."""

from pathlib import Path

import pytest
import torch

from paceline.drafters.heads import drafter_of
from paceline.heads.calibration import Calibration
from paceline.heads.head_checkpoint import load
from paceline.train.evaluate import acceptance, replay
from paceline.train.publish import calibrate, publish
from paceline.train.recipe import Recipe, new_recipe, pieces_of
from support.heads import recorded, target_text, tiny_config, tiny_model, trained_net

MODEL = tiny_model()
TEXTS = recorded(target_text())


@pytest.mark.slow
def test_what_is_stored_is_what_was_measured(tmp_path: Path) -> None:
    net = trained_net()
    made = Recipe("block", net, new_recipe(tiny_config(1), MODEL, torch.arange(131)).loss)
    card = publish(tmp_path, made, MODEL, "tiny", TEXTS, {"texts": 16})
    back = load(tmp_path, pieces_of(MODEL))
    assert back.card == card
    assert not torch.equal(back.net.state_dict()["fc.weight"], net.state_dict()["fc.weight"])
    guesses = replay(drafter_of(back.net, card.calibration), MODEL, TEXTS, net.shape.block)
    found = acceptance(guesses, TEXTS, net.shape.block)
    assert found.by_position == card.acceptance
    assert found.tokens_per_pass == card.tokens_per_pass
    assert card.tokens_per_pass[-1] > 2
    before, after = card.data["calibration gap"]
    assert after < before
    assert calibrate(guesses, net.shape.block).before == pytest.approx(after, abs=1e-4)


def test_a_kind_without_confidences_is_not_calibrated(tmp_path: Path) -> None:
    made = new_recipe(tiny_config(1, kind="medusa"), MODEL, torch.arange(131))
    card = publish(tmp_path, made, MODEL, "tiny", TEXTS[:3], {}, "float32")
    assert card.calibration is None
    assert len(card.acceptance) == len(card.tokens_per_pass) == 4
    assert load(tmp_path, pieces_of(MODEL)).card == card


@pytest.mark.slow
def test_where_nothing_was_measured_the_calibration_of_before_stays_and_no_figure_is_made_up(
    tmp_path: Path,
) -> None:
    net = trained_net()
    before = Calibration((0.5,) * net.shape.block, (0.25,) * net.shape.block)
    loss = new_recipe(tiny_config(1), MODEL, torch.arange(131)).loss
    card = publish(tmp_path, Recipe("block", net, loss, before), MODEL, "tiny", [], {})
    assert card.calibration == before
    assert card.data == {}
