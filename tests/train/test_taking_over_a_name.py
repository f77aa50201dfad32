"""A new drafter takes over a name only if it measures no worse than the drafter that has it."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from paceline.heads import local_heads
from paceline.heads.head_checkpoint import Card, read_card, save
from paceline.train.draft_model.card import DraftCard
from paceline.train.draft_model.pipeline import reason_to_hold as reason_to_hold_model
from paceline.train.evaluate import Acceptance
from paceline.train.head_pipeline import (
    LITTLE_DATA,
    TrainJob,
    drafter_in_use,
    reason_to_hold,
    start_advice,
)
from paceline.train.recipe import TrainConfig
from support.heads import random_net, tiny_model

NET = random_net()
CARD = Card("block", NET.shape, "tiny", tiny_model().fingerprint, tokens_per_pass=(1.5, 1.8, 2.0))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local store with nothing in it, and one drafter in the package."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(local_heads, "SHIPPED", tmp_path / "package")
    save(tmp_path / "package" / "tiny-block", CARD, NET)
    return tmp_path / "home"


def in_use(**figures: Any) -> Card:
    return replace(CARD, data={"in_use": {"name": "mine", **figures}})


def test_a_name_stands_for_the_drafter_in_the_store_then_for_that_in_the_package(home: Path) -> None:
    folder = home / "drafters" / "tiny-block"
    assert drafter_in_use(folder) == home.parent / "package" / "tiny-block"
    assert drafter_in_use(home / "drafters" / "other") is None
    save(folder, CARD, NET)
    assert drafter_in_use(folder) == folder
    (folder / "drafter.json").write_text("{")  # it could not be used
    assert drafter_in_use(folder) is None


@pytest.mark.parametrize(
    ("old", "held"),
    [((1.5, 1.8, 2.0), False), ((1.4, 1.7, 1.9), False), ((1.4, 1.7, 2.01), True), ((1.6, 1.9), True)],
)
def test_a_worse_drafter_is_held(old: tuple[float, ...], held: bool) -> None:
    reason = reason_to_hold(in_use(tokens_per_pass=old))
    assert bool(reason) == held
    if held:
        assert reason.startswith("it measures worse than the one in use")
        assert f"against {old[-1]:.2f}" in reason


def test_without_a_drafter_in_use_nothing_is_held() -> None:
    assert reason_to_hold(CARD) == ""


def test_a_drafter_that_could_not_be_compared_is_held() -> None:
    assert "nothing was measured" in reason_to_hold(in_use())
    assert "nothing was measured" in reason_to_hold(
        replace(in_use(tokens_per_pass=(1.5,)), tokens_per_pass=())
    )


@pytest.mark.parametrize(
    ("before", "in_use", "against"),
    [
        (1.9, None, ""),
        (2.0, 2.0, ""),
        (2.01, None, "small, which it started from: 2.00 tokens per pass against 2.01"),
        (1.5, 2.1, "the one in use: 2.00 tokens per pass against 2.10"),
    ],
)
def test_a_worse_draft_model_is_held(before: float, in_use: float | None, against: str) -> None:
    def measured(rate: float, anchors: int = 50) -> Acceptance:
        return Acceptance(anchors, (0.5,), (rate,))

    data = {} if in_use is None else {"in_use": asdict(measured(in_use))}
    card = DraftCard("small", "tiny", "f", 16, measured(before), measured(2.0), data)
    reason = reason_to_hold_model(card)
    assert reason == (against and f"it measures worse than {against} on the same held-out answers")
    unknown = reason_to_hold_model(replace(card, after=measured(0.0, anchors=0)))
    assert bool(unknown) == (in_use is not None)


def test_starting_from_a_trained_drafter_is_advised_where_data_is_scarce(home: Path) -> None:
    job = TrainJob("tiny", (), home / "drafters" / "mine", train=TrainConfig(kind="block"))
    advice = start_advice(job, 1000, CARD.fingerprint)
    assert "1,000 tokens of answers" in advice
    assert "--start tiny-block" in advice
    assert start_advice(job, LITTLE_DATA, CARD.fingerprint) == ""
    assert start_advice(replace(job, start=home), 1000, CARD.fingerprint) == ""
    assert start_advice(job, 1000, "another target") == ""
    assert start_advice(replace(job, train=TrainConfig(kind="eagle")), 1000, CARD.fingerprint) == ""


def test_counts_and_intervals_are_in_the_card(tmp_path: Path) -> None:
    card = replace(CARD, acceptance=(0.5, 0.25), counts=(10, 4))
    save(tmp_path / "mine", card, NET)
    assert read_card(tmp_path / "mine") == card
    assert [round(low, 3) for low, _ in card.intervals()] == [0.237, 0.046]
    assert '"acceptance_95"' in (tmp_path / "mine" / "drafter.json").read_text()
    older = replace(card, counts=())
    save(tmp_path / "older", older, NET)
    assert read_card(tmp_path / "older").intervals() == ()
