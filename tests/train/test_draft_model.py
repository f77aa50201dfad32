"""The whole job on real weights: a few layers of the model learn to guess for all of it."""

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from talk import WEATHER, called, record, user, write

from paceline import LLM, SpecConfig
from paceline.config import EngineConfig
from paceline.errors import CorruptModel, SettingError, UnknownModel
from paceline.exchange.model import write_model
from paceline.heads.shelf import DRAFT_CARD
from paceline.target.load import load
from paceline.text import Tokenizer
from paceline.train import draft_model as the_job
from paceline.train.asks import AnswersConfig
from paceline.train.dataset import Answers, Batch
from paceline.train.draft_card import DraftCard, read_draft_card
from paceline.train.draft_model import DraftJob, run
from paceline.train.held_out import is_held_out
from paceline.train.job import ANSWERS, Told
from paceline.train.rollout import Rollout
from paceline.train.steps import Batches
from paceline.train.tune import TuneConfig, tune

pytestmark = pytest.mark.model

TOWNS = ("Oslo", "Rome", "Lima", "Bonn", "Cairo", "Delhi", "Paris", "Tokyo", "Quito", "Riga", "Kyiv", "Bern")
SHARE = 0.25
HELD_OUT = [town for town in TOWNS if is_held_out(town, SHARE)]
LAYERS = (0, 1, 2, 3, 27, 28, 29)  # of 30: without the others it says nothing of sense
STEPS, KILLED_AT = 12, 2
RATES = {16: 5e-3, 0: 5e-4}  # by rank
TUNE = TuneConfig(
    lora=16, lr=RATES[16], steps=STEPS, tokens_per_batch=512, max_len=512, checkpoint_seconds=1e-9
)


class Killed(Exception):
    pass


@dataclass(slots=True)
class Done:
    """A job that was killed once, and what it was seen to do."""

    job: DraftJob
    card: DraftCard
    told: list[list[Told]]  # of each run
    taught: list[str]  # every text in a training batch


def ask(town: str) -> str:
    return f"What is the weather in {town}?"


def steps_of(told: Iterable[Told]) -> list[int]:
    return [int(t.note.split()[1].rstrip(",")) for t in told if t.what == "training"]


def cut_down(path: Path, folder: Path) -> Path:
    """A few layers of the model, as a model of its own."""
    whole = load(path)
    tensors = {name: t for name, t in whole.tensors.items() if not name.startswith("layers.")}
    for place, layer in enumerate(LAYERS):
        old = f"layers.{layer}."
        own = {n.removeprefix(old): t for n, t in whole.tensors.items() if n.startswith(old)}
        tensors |= {f"layers.{place}.{part}": t for part, t in own.items()}
    write_model(folder, path, replace(whole.shape, layers=len(LAYERS)), tensors)
    return folder


def watched(taught: list[str], tokenizer: Tokenizer) -> Any:
    """The trainer, which notes the texts it is given."""

    def training(net: Any, batches: Batches, *others: Any) -> Any:
        def seen(seed: int) -> Iterator[Batch]:
            for batch in batches(seed):
                taught.extend(tokenizer.decode(row.tolist()) for row in batch.tokens)
                yield batch

        return tune(net, seen, *others)

    return training


@pytest.fixture(scope="module")
def done(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    home = tmp_path_factory.mktemp("draft")
    source = write(home / "talks.jsonl", [record(user(ask(t)), called(t), group=t) for t in TOWNS])
    small = cut_down(smollm2_path, home / "small")
    answers = AnswersConfig(
        required=1.0,
        greedy=1.0,
        held_out=SHARE,
        rollout=Rollout(max_new=24),
        engine=EngineConfig("cpu", cache_mb=64),
    )
    job = DraftJob("smollm2-135m", str(small), (source,), home / "mine", answers, TUNE, measured=2)
    told: list[list[Told]] = [[], []]
    taught: list[str] = []

    def kill(t: Told) -> None:
        told[0].append(t)
        if steps_of([t]) == [KILLED_AT]:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(the_job, "tune", watched(taught, Tokenizer.load(smollm2_path)))
        with pytest.raises(Killed):
            run(job, kill)
        card = run(job, told[1].append)
    return Done(job, card, told, taught)


def copied(done: Done, folder: Path) -> Path:
    """A folder with the same answers."""
    for name in (ANSWERS, "answers.json"):
        shutil.copy(done.job.folder / name, folder / name)
    return folder


def test_it_goes_on_where_it_was_killed(done: Done) -> None:
    first, second = done.told
    assert steps_of(first) == list(range(1, KILLED_AT + 1))
    assert steps_of(second) == list(range(KILLED_AT, STEPS + 1))  # the last step was not saved yet
    assert "answers" in {t.what for t in first}
    assert "answers" not in {t.what for t in second}


def test_held_out_conversations_are_never_taught(done: Done) -> None:
    assert 2 <= len(HELD_OUT) <= 6
    assert len(Answers.load(done.job.folder / ANSWERS).which("held out")) == len(HELD_OUT)
    assert {town for town in TOWNS if any(town in text for text in done.taught)} == {*TOWNS} - {*HELD_OUT}


def test_it_learned_what_it_was_never_taught(done: Done) -> None:
    before, after = done.card.before, done.card.after
    assert before.anchors == after.anchors > 30
    assert before.by_place[0] < 0.2
    assert after.by_place[0] > 0.6
    assert after.tokens_per_pass[-1] > before.tokens_per_pass[-1] + 1


def test_all_weights_learn_too(done: Done, tmp_path: Path) -> None:
    config = replace(TUNE, lora=0, lr=RATES[0], checkpoint_seconds=1e9)
    card = run(replace(done.job, folder=copied(done, tmp_path), tune=config))
    assert card.before == done.card.before
    assert card.after.by_place[0] > 0.6
    assert card.after.tokens_per_pass[-1] > card.before.tokens_per_pass[-1] + 1
    assert not torch.equal(load(tmp_path).tensors["embed"], load(done.job.folder).tensors["embed"])


def test_the_card_tells_what_was_done(done: Done) -> None:
    card = read_draft_card(done.job.folder)
    assert card == replace(done.card, data=card.data)
    assert (card.draft, card.target, card.lora) == ("small", "smollm2-135m", 16)
    assert card.data["sources"] == ["talks.jsonl"]
    assert card.data["answers"] == len(TOWNS)
    assert card.data["same_tokenizer"] is True
    assert card.data["training"]["steps"] == STEPS
    assert sum(kind["anchors"] for kind in card.data["by_kind_of_text"].values()) == card.after.anchors


def test_it_is_served_and_changes_no_word(done: Done) -> None:
    config = EngineConfig("cpu", cache_mb=64)
    llm = LLM("smollm2-135m", draft_model=str(done.job.folder), config=config)
    said = [
        llm.generate(
            [user(ask(HELD_OUT[0]))],
            tools=[WEATHER],
            tool_choice="required",
            max_tokens=24,
            seed=0,
            spec=spec,
        )
        for spec in (SpecConfig(("model",), 4, adaptive=False), SpecConfig(("none",)))
    ]
    assert said[0].token_ids == said[1].token_ids
    assert said[0].accepted["model"] > 6
    assert said[0].passes < said[1].passes


def test_what_cannot_be_is_said_before_anything_is_done(done: Done, tmp_path: Path) -> None:
    job = replace(done.job, folder=tmp_path / "new", sources=())
    with pytest.raises(SettingError, match="is the draft model itself"):
        run(replace(job, folder=Path(job.draft)))
    with pytest.raises(UnknownModel, match="nobody"):
        run(replace(job, draft="nobody"))
    assert not job.folder.exists()


def test_answers_of_another_target_are_refused(done: Done, tmp_path: Path) -> None:
    copied(done, tmp_path)
    with pytest.raises(SettingError, match="answers of another target"):
        run(replace(done.job, target=done.job.draft, folder=tmp_path))


def test_a_damaged_card_is_told(done: Done, tmp_path: Path) -> None:
    card = (done.job.folder / DRAFT_CARD).read_text()
    for text in ("{", "[]", card.replace('"format": 1', '"format": 7'), card.replace('"after"', '"later"')):
        (tmp_path / DRAFT_CARD).write_text(text)
        with pytest.raises(CorruptModel, match=DRAFT_CARD):
            read_draft_card(tmp_path)


@pytest.mark.large
def test_a_draft_model_with_another_tokenizer_learns(done: Done, qwen_path: Path, tmp_path: Path) -> None:
    """Measured through the way by text; nothing is cut down here."""
    config = replace(TUNE, steps=8, lr=1e-3, checkpoint_seconds=1e9)
    card = run(
        replace(
            done.job, target="qwen2.5-coder-1.5b", draft="smollm2-135m", folder=tmp_path / "new", tune=config
        )
    )
    assert card.data["same_tokenizer"] is False
    assert card.data["unreadable"] == 0
    assert card.after.by_place[0] > card.before.by_place[0] + 0.1
    assert card.after.tokens_per_pass[-1] > card.before.tokens_per_pass[-1] + 0.5


@pytest.mark.gemma
def test_laws_over_other_tokens_cannot_be_compared(done: Done, gemma_path: Path, tmp_path: Path) -> None:
    job = replace(done.job, draft=str(gemma_path), folder=tmp_path, tune=replace(TUNE, distill=0.5))
    with pytest.raises(SettingError, match="different tokenizers"):
        run(job)
