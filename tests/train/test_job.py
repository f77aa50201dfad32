"""The whole job on the real model: answers, a training that is killed and goes on, a drafter in service."""

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
from paceline.drafters.heads.choose import drafter_of
from paceline.errors import SettingError
from paceline.heads.folder import Card, load, read_card
from paceline.target.load import load as load_weights
from paceline.target.pieces import load_pieces
from paceline.text import Tokenizer
from paceline.train import job as the_job
from paceline.train.asks import AnswersConfig
from paceline.train.dataset import Answers, Batch
from paceline.train.dense import DenseModel
from paceline.train.evaluate import acceptance, recorded, replay
from paceline.train.held_out import is_held_out
from paceline.train.job import ANSWERS, Told, TrainJob, run
from paceline.train.loop import train
from paceline.train.recipe import TrainConfig, recipe
from paceline.train.rollout import Rollout
from paceline.train.steps import CHECKPOINT, Batches

pytestmark = pytest.mark.model

TOWNS = ("Oslo", "Rome", "Lima", "Bonn", "Cairo", "Delhi", "Paris", "Tokyo", "Quito", "Riga", "Kyiv", "Bern")
SHARE = 0.25
HELD_OUT = [town for town in TOWNS if is_held_out(town, SHARE)]
MEASURED = 2  # answers
STEPS, KILLED_AT = 20, 2
TRAIN = TrainConfig(
    steps=STEPS,
    tokens_per_batch=256,
    max_len=512,
    lr=4e-3,
    checkpoint_seconds=1e-9,
    look_steps=1000,
    draft_vocab=512,
    layers=1,
    block=4,
    markov_rank=16,
    anchors=16,
)


class Killed(Exception):
    pass


@dataclass(slots=True)
class Done:
    """A job that was killed once, and what it was seen to do."""

    job: TrainJob
    card: Card
    told: list[list[Told]]  # of each run
    taught: list[str]  # every text in a training batch


def ask(town: str) -> str:
    return f"What is the weather in {town}?"


def steps_of(told: Iterable[Told]) -> list[int]:
    return [int(t.note.split()[1].rstrip(",")) for t in told if t.what == "training"]


def watched(taught: list[str], tokenizer: Tokenizer) -> Any:
    """The trainer, which notes the texts it is given."""

    def training(recipe: Any, model: Any, batches: Batches, *others: Any) -> Any:
        def seen(seed: int) -> Iterator[Batch]:
            for batch in batches(seed):
                taught.extend(tokenizer.decode(row.tolist()) for row in batch.tokens)
                yield batch

        return train(recipe, model, seen, *others)

    return training


@pytest.fixture(scope="module")
def done(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    home = tmp_path_factory.mktemp("job")
    source = write(home / "talks.jsonl", [record(user(ask(t)), called(t), group=t) for t in TOWNS])
    answers = AnswersConfig(
        required=1.0,
        greedy=1.0,
        held_out=SHARE,
        rollout=Rollout(max_new=24),
        engine=EngineConfig("cpu"),
    )
    job = TrainJob("smollm2-135m", (source,), home / "mine", answers=answers, train=TRAIN, measured=MEASURED)
    told: list[list[Told]] = [[], []]
    taught: list[str] = []

    def kill(t: Told) -> None:
        told[0].append(t)
        if steps_of([t]) == [KILLED_AT]:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(the_job, "train", watched(taught, Tokenizer.load(smollm2_path)))
        with pytest.raises(Killed):
            run(job, kill)
        card = run(job, told[1].append)
    return Done(job, card, told, taught)


def test_it_goes_on_where_it_was_killed(done: Done) -> None:
    first, second = done.told
    assert steps_of(first) == list(range(1, KILLED_AT + 1))
    assert steps_of(second) == list(range(KILLED_AT, STEPS + 1))  # the last step was not saved yet
    assert "answers" in {t.what for t in first}
    assert "answers" not in {t.what for t in second}
    assert (done.job.folder / CHECKPOINT).exists()


def test_held_out_conversations_are_never_taught(done: Done) -> None:
    answers = Answers.load(done.job.folder / ANSWERS)
    assert 2 <= len(HELD_OUT) <= 6
    assert len(answers.which("held out")) == len(HELD_OUT)
    assert len(done.taught) >= STEPS
    assert {town for town in TOWNS if any(ask(town) in text for text in done.taught)} == set(TOWNS) - set(
        HELD_OUT
    )
    assert not any(town in text for town in HELD_OUT for text in done.taught)


def test_it_learned_what_it_was_never_taught(done: Done, smollm2_path: Path) -> None:
    answers = Answers.load(done.job.folder / ANSWERS)
    weights = load_weights(smollm2_path)
    model = DenseModel(weights, "cpu", torch.float32)
    ids = torch.from_numpy(answers.draft_ids(TRAIN.draft_vocab).ids)
    untrained = recipe(TRAIN, model, ids, weights.tensors)
    texts = recorded(answers, TRAIN.max_len, MEASURED)
    before = acceptance(replay(drafter_of(untrained.net), model, texts, TRAIN.block), texts, TRAIN.block)
    assert before.by_place[0] < 0.15
    assert done.card.acceptance[0] > before.by_place[0] + 0.25
    assert done.card.tokens_per_pass[-1] > before.tokens_per_pass[-1] + 0.25


def test_the_card_tells_what_was_done(done: Done) -> None:
    card = read_card(done.job.folder)
    assert (card.acceptance, card.tokens_per_pass) == (done.card.acceptance, done.card.tokens_per_pass)
    assert (card.kind, card.target) == ("block", "smollm2-135m")
    assert len(card.acceptance) == len(card.tokens_per_pass) == card.shape.block == TRAIN.block
    assert card.calibration is not None
    assert card.data["sources"] == ["talks.jsonl"]
    assert card.data["answers"] == card.data["prompts"] == len(TOWNS)
    assert card.data["held_out_answers"] == len(HELD_OUT)
    assert card.data["training"]["steps"] == STEPS
    assert sum(kind["anchors"] for kind in card.data["by_kind_of_text"].values()) > 20


def test_it_is_served_and_changes_no_word(done: Done) -> None:
    llm = LLM("smollm2-135m", trained=[done.job.folder], config=EngineConfig("cpu", cache_mb=64))
    assert llm.spec.drafters == ("grammar", "suffix", "ngram", "block")
    block, plain = SpecConfig(("block",), 4, adaptive=False), SpecConfig(("none",))
    said = [
        llm.generate(
            [user(ask(town))], tools=[WEATHER], tool_choice="required", max_tokens=24, seed=0, spec=spec
        )
        for town in HELD_OUT[:2]
        for spec in (block, plain)
    ]
    for fast, slow in zip(said[::2], said[1::2], strict=True):
        assert fast.token_ids == slow.token_ids
        assert fast.accepted["block"] > 3
        assert fast.passes < slow.passes


def test_a_trained_drafter_is_where_another_begins(done: Done, smollm2_path: Path, tmp_path: Path) -> None:
    for name in (ANSWERS, "answers.json"):
        shutil.copy(done.job.folder / name, tmp_path / name)
    first = done.job.folder
    other = replace(TRAIN, steps=1, lr=1e-6, layers=2, block=8)  # a drafter keeps its shape
    again = replace(done.job, folder=tmp_path, start=first, train=other)
    card = run(again)
    most = len(card.acceptance)
    assert tuple(card.data["before"]["by_place"][:most]) == done.card.acceptance
    assert card.acceptance[0] == pytest.approx(done.card.acceptance[0], abs=0.1)
    pieces = load_pieces(smollm2_path)
    assert torch.equal(load(tmp_path, pieces).net.draft_ids, load(first, pieces).net.draft_ids)
    with pytest.raises(
        SettingError, match=r"asked for otherwise \(per_prompt\): give the same again, or another"
    ):
        run(replace(again, answers=replace(again.answers, per_prompt=2)))
    with pytest.raises(SettingError, match="is a block drafter: give kind=block"):
        run(replace(again, train=replace(again.train, kind="eagle")))
