"""The output of `paceline train`: its name, and when a new drafter takes over from the one in use."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli.train import DrafterChoice
from paceline.heads.head_checkpoint import CARD, read_card
from paceline.heads.local_heads import drafter_path, in_package, shipped
from paceline.paths import home
from paceline.train.data.held_out import is_held_out
from support.clients import run

SHIPPED = "smollm2-135m-block"


@pytest.fixture
def own_home(tmp_path: Path, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for drafters; models are those of the machine."""
    for kept in home().iterdir():
        if kept.name in ("models", "packed", "native", "cost.json"):
            (tmp_path / kept.name).symlink_to(kept)
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    return tmp_path


def some_talks(folder: Path) -> str:
    """Two conversations to train on, two that are held out."""
    openings = [f"Name {n} colours, please." for n in range(200)]
    held_out = [text for text in openings if is_held_out(text)][:2]
    talks = [text for text in openings if not is_held_out(text)][:2] + held_out
    lines = [{"messages": [{"role": "user", "content": text}]} for text in talks]
    (folder / "talks.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(folder / "talks.jsonl")


def test_the_default_name_is_not_that_of_a_drafter_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    names = {folder.name for folder in shipped()}
    assert SHIPPED in names
    for kind in ("block", "eagle", "medusa", "model"):
        folder = DrafterChoice(kind=kind).folder()
        assert folder == DrafterChoice(kind=kind).folder()  # the same again resumes
        assert folder == tmp_path / "drafters" / f"smollm2-135m-{kind}-local"
        assert folder.name not in names
    assert DrafterChoice(out="mine").folder().name == "mine"


@pytest.mark.model
def test_a_drafter_that_measures_worse_is_not_used_unasked(
    capsys: pytest.CaptureFixture[str], own_home: Path, tmp_path: Path
) -> None:
    command = [
        "train",
        "--traces",
        some_talks(tmp_path),
        "--steps",
        "1",
        "--max-new",
        "24",
        "--device",
        "cpu",
    ]
    code, out, _ = run(capsys, *command, "--out", SHIPPED)
    assert code == 0
    assert f"{SHIPPED} stays as it was: it measures worse than the one in use" in out
    assert "same command with --replace added" in out
    assert "positions only: give more conversations" in out
    assert "95 % interval" in out
    root = own_home / "drafters" / SHIPPED
    assert in_package(drafter_path(SHIPPED))  # what is served by that name has not changed
    assert not (root / CARD).exists()
    card = read_card(root / "candidate")
    assert len(card.counts) == len(card.acceptance) == card.shape.block
    assert all(
        low <= share <= high for share, (low, high) in zip(card.acceptance, card.intervals(), strict=True)
    )
    table = json.loads((root / "candidate" / CARD).read_text())
    assert table["counts"] == list(card.counts)
    assert [tuple(pair) for pair in table["acceptance_95"]] == list(card.intervals())
    code, out, _ = run(capsys, *command, "--out", SHIPPED, "--replace")
    assert code == 0
    assert "stays as it was" not in out
    assert drafter_path(SHIPPED) == root
    assert not (root / "candidate").exists()
    assert read_card(root) == replace(card, data=read_card(root).data)
    (row,) = [r for r in json.loads(run(capsys, "drafters", "--json")[1])["trained"] if r["name"] == SHIPPED]
    assert row["counts"] == list(card.counts)
    assert f"n {card.counts[0]}" in " ".join(run(capsys, "drafters")[1].split())


@pytest.mark.model
def test_little_data_from_scratch_is_advised_to_start_from_the_drafter_in_the_package(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, own_home: Path, tmp_path: Path
) -> None:
    command = ["train", "--traces", some_talks(tmp_path), "--steps", "1", "--max-new", "8", "--device", "cpu"]
    code, out, _ = run(capsys, *command)
    assert code == 0
    assert (own_home / "drafters" / f"{SHIPPED}-local" / CARD).exists()
    assert in_package(drafter_path(SHIPPED))
    advice = f"--start {SHIPPED} continues a trained one"
    assert "\n".join((out, *caplog.messages)).count(advice) == 1
    caplog.clear()
    code, out, _ = run(capsys, *command, "--out", "continued", "--start", SHIPPED)
    assert code == 0
    assert "--start" not in "\n".join((out, *caplog.messages))
