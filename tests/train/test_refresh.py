"""A drafter goes on learning: what is better serves, what is not is refused, and nothing is lost."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import EngineConfig
from paceline.drafters.heads import drafter_of
from paceline.heads import versions
from paceline.heads.base import DenseTargetEmbeddings
from paceline.heads.head_checkpoint import WEIGHTS, Card, LoadedHead, load, read_card, save
from paceline.trace.online import OnlineTrainingConfig, RefreshJob, TrainingSample
from paceline.train.evaluate import acceptance, replay
from paceline.train.online import refresh as the_refresh
from paceline.train.online.online_batches import split
from paceline.train.online.refresh import refresh, run, saves
from paceline.train.publish import EVAL_DRAFT, publish
from paceline.train.recipe import new_recipe, pieces_of
from paceline.train.train_decoder import TrainDecoder
from support.heads import PROMPT, target_text, tiny_config, tiny_model
from support.models import VOCAB

pytestmark = pytest.mark.slow

MODEL = tiny_model()
CONFIG = OnlineTrainingConfig(steps=40, lr=8e-3, held_out=0.3, min_positions=1, batch_tokens=320)

SHORT = replace(CONFIG, steps=16)  # better, at least


def served() -> list[TrainingSample]:
    """Texts of a narrow domain: a few that come again and again, in many conversations."""
    rows = [tuple(row) for row in target_text()[:3].tolist()]
    places = tuple(range(PROMPT, 39))
    return [TrainingSample(rows[i % 3], PROMPT, {"block": places}, f"talk {i}") for i in range(12)]


PARTS = split(served(), CONFIG)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return untrained(tmp_path / "mine")


def untrained(root: Path) -> Path:
    made = new_recipe(tiny_config(1), MODEL, torch.arange(VOCAB))
    save(root, Card("block", made.net.shape, "tiny", MODEL.fingerprint), made.net)
    return root


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A drafter that learned, and what was told of it; nothing of it serves yet."""
    root = untrained(tmp_path_factory.mktemp("learned") / "mine")
    return root, refresh(root, MODEL, PARTS, CONFIG)


@pytest.fixture
def learned(once: tuple[Path, dict[str, Any]], tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    root, told = once
    return Path(shutil.copytree(root, tmp_path / "learned")), told


def take(root: Path, told: dict[str, Any]) -> None:
    """As the server does."""
    assert versions.take_over(root, told["made"], told["learned_from"])


def rate(folder: Path) -> float:
    """Measured anew, from what is stored."""
    net, texts = load(folder, pieces_of(MODEL)).net, PARTS.recorded()
    most = net.shape.block
    found = acceptance(replay(drafter_of(net), MODEL, texts, most), texts, most)
    return found.tokens_per_pass[min(EVAL_DRAFT, most) - 1]


def test_what_it_learned_serves_and_the_first_stays(learned: tuple[Path, dict[str, Any]]) -> None:
    root, told = learned
    first = (root / WEIGHTS).read_bytes()
    assert versions.current(root).number == 0  # until the server says so
    take(root, told)
    assert told["made"] == 1
    assert told["after"] > told["before"] + 0.5
    now = versions.current(root)
    assert (now.number, (root / WEIGHTS).read_bytes()) == (1, first)
    assert (told["before"], told["after"]) == (rate(root), rate(now.folder))
    assert read_card(now.folder).data["learned"] == {
        "from": 0,
        "steps": CONFIG.steps,
        "texts": len(PARTS.training),
        "held_out_texts": len(PARTS.held_out),
        "tokens_per_pass": {"before": told["before"], "after": told["after"]},
    }
    again = refresh(root, MODEL, PARTS, CONFIG)
    assert again["before"] == told["after"]  # it goes on from what serves
    assert versions.numbers(root)[:2] == [0, 1]


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_every_kind_learns(tmp_path: Path, kind: str) -> None:
    made = new_recipe(tiny_config(1, kind=kind), MODEL, torch.arange(VOCAB))
    save(tmp_path, Card(kind, made.net.shape, "tiny", MODEL.fingerprint), made.net)
    texts = [replace(text, rejected={kind: text.rejected["block"]}) for text in served()]
    only = replace(CONFIG, accepted_share=0.0)  # what another was wrong about teaches it nothing
    assert "refused" in refresh(tmp_path, MODEL, PARTS, only)
    told = refresh(tmp_path, MODEL, split(texts, only), only)
    assert told["made"] == 1
    assert told["after"] > told["before"] + 0.3


def test_a_worse_one_is_refused(learned: tuple[Path, dict[str, Any]]) -> None:
    root, first = learned
    take(root, first)
    serving = versions.current(root)
    weights = (serving.folder / WEIGHTS).read_bytes()
    broken = OnlineTrainingConfig(steps=5, lr=10.0, held_out=0.3)
    told = refresh(root, MODEL, PARTS, broken)
    assert told["before"] == first["after"]  # it goes on from what serves
    assert told["after"] < told["before"]
    assert "not clearly better" in told["refused"]
    assert versions.current(root) == serving
    assert (serving.folder / WEIGHTS).read_bytes() == weights
    assert [path.name for path in (root / "versions").glob("*/")] == ["0001"]


def test_no_version_replaces_one_it_did_not_begin_from(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with versions.making(root) as folder:
        save(folder, read_card(root), load(root, pieces_of(MODEL)).net)
        versions.use(root, versions.add(root, folder))

    def gone_back(*given: Any, **more: Any) -> Card:
        versions.use(root, 0)  # while the new one is measured
        return publish(*given, **more)

    monkeypatch.setattr(the_refresh, "publish", gone_back)
    told = refresh(root, MODEL, PARTS, SHORT)
    assert told["after"] > told["before"]
    assert told["refused"] == "another version serves by now"
    assert versions.current(root).number == 0


def test_what_serves_is_loaded_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[Path] = []

    def counted(folder: Path, pieces: DenseTargetEmbeddings) -> LoadedHead:
        loads.append(folder)
        return load(folder, pieces)

    monkeypatch.setattr(the_refresh, "load", counted)
    refresh(root, MODEL, PARTS, replace(CONFIG, steps=1))
    assert loads == [root]


def test_a_crash_loses_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(versions, "add", dies)
    with pytest.raises(KeyboardInterrupt):
        refresh(root, MODEL, PARTS, SHORT)
    assert versions.current(root).number == 0
    assert list((root / "versions").iterdir()) == []
    assert rate(root) >= 1


@pytest.mark.parametrize(
    ("old", "new", "better"),
    [
        ((9, 9, 9), (8, 8, 8), True),
        ((9, 9, 9), (9, 9, 8), False),  # as well chance
        ((9, 9, 9), (5, 12, 9), False),
        ((9, 9, 9), (9, 9, 9), False),
        ((9,), (8,), False),  # nothing to compare it with
    ],
)
def test_better_is_more_than_chance(old: tuple[int, ...], new: tuple[int, ...], better: bool) -> None:
    assert saves(old, new) == better


def test_with_too_little_to_measure_on_nothing_is_tried() -> None:
    told: list[dict[str, Any]] = []
    few = OnlineTrainingConfig(held_out=0.3, min_positions=10_000)
    run(RefreshJob("/no/such/model", ("/nowhere",), EngineConfig("cpu"), tuple(served()), few), told.append)
    (only,) = told
    assert "held-out positions" in only["waits"]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_it_computes_on_the_cpu_wherever_the_server_does(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """A process that is stopped still holds what it has on a GPU."""
    placed: list[tuple[torch.device, torch.dtype]] = []

    def place(_: Any, device: torch.device, dtype: torch.dtype) -> TrainDecoder:
        placed.append((device, dtype))
        return MODEL

    monkeypatch.setattr(the_refresh, "load_weights", lambda *_: None)
    monkeypatch.setattr(the_refresh, "TrainDecoder", place)
    run(RefreshJob("tiny", (), EngineConfig(device, "bfloat16"), tuple(served()), CONFIG), lambda _: None)
    assert placed == [(torch.device("cpu"), torch.float32)]
