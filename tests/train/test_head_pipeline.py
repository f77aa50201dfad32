"""The whole job on the real model: answers, a training that is killed and goes on, a drafter in service."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline import LLM, SpecConfig
from paceline.config import EngineConfig
from paceline.drafters.heads import drafter_of
from paceline.errors import DrafterMismatch, UsageError
from paceline.heads.head_checkpoint import Card, load, read_card
from paceline.target.weights.reader import load as load_weights
from paceline.target.weights.reader import load_embeddings
from paceline.text import Tokenizer
from paceline.train import trainer as the_trainer
from paceline.train.data.dataset import Answers
from paceline.train.evaluate import acceptance, held_out_texts, replay
from paceline.train.head_pipeline import ANSWERS, TrainJob, run
from paceline.train.recipe import TrainConfig, new_recipe
from paceline.train.train_decoder import TrainDecoder
from paceline.train.trainer import CHECKPOINT
from support.training import (
    ASKED,
    HELD_OUT,
    TOWNS,
    WEATHER,
    ask,
    check_held_out_is_never_taught,
    check_it_went_on,
    copied,
    killed_once,
    talks,
    user,
)
from support.training import Done as AnyDone

pytestmark = [pytest.mark.model, pytest.mark.slow]

Done = AnyDone[TrainJob, Card]

MEASURED = 2  # answers
STEPS = 20
TRAIN = TrainConfig(
    steps=STEPS,
    tokens_per_batch=256,
    max_len=512,
    lr=4e-3,
    checkpoint_seconds=1e-9,
    eval_steps=1000,
    draft_vocab=512,
    layers=1,
    block=4,
    markov_rank=16,
    anchors=16,
)


@pytest.fixture(scope="module")
def done(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    home = tmp_path_factory.mktemp("job")
    sources = (talks(home),)
    job = TrainJob("smollm2-135m", sources, home / "mine", answers=ASKED, train=TRAIN, measured=MEASURED)
    again = replace(job, train=replace(TRAIN, checkpoint_seconds=1e9))
    return killed_once(job, again, run, the_trainer, Tokenizer.load(smollm2_path))


def test_it_goes_on_where_it_was_killed(done: Done) -> None:
    check_it_went_on(done, STEPS)
    assert (done.job.folder / CHECKPOINT).exists()


def test_held_out_conversations_are_never_taught(done: Done) -> None:
    check_held_out_is_never_taught(done)
    assert len(done.taught) >= STEPS


def test_it_learned_what_it_was_never_taught(done: Done, smollm2_path: Path) -> None:
    answers = Answers.load(done.job.folder / ANSWERS)
    weights = load_weights(smollm2_path)
    model = TrainDecoder(weights, "cpu", torch.float32)
    ids = torch.from_numpy(answers.draft_ids(TRAIN.draft_vocab).ids)
    untrained = new_recipe(TRAIN, model, ids, weights.tensors)
    texts = held_out_texts(answers, TRAIN.max_len, MEASURED)
    before = acceptance(replay(drafter_of(untrained.net), model, texts, TRAIN.block), texts, TRAIN.block)
    assert before.by_position[0] < 0.15
    assert done.card.acceptance[0] > before.by_position[0] + 0.25
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
    results = [
        llm.generate(
            [user(ask(town))], tools=[WEATHER], tool_choice="required", max_tokens=24, seed=0, spec=spec
        )
        for town in HELD_OUT[:2]
        for spec in (block, plain)
    ]
    for fast, slow in zip(results[::2], results[1::2], strict=True):
        assert fast.token_ids == slow.token_ids
        assert fast.accepted["block"] > 3
        assert fast.passes < slow.passes


def test_a_trained_drafter_is_where_another_begins(done: Done, smollm2_path: Path, tmp_path: Path) -> None:
    copied(done, tmp_path)
    first = done.job.folder
    other = replace(TRAIN, steps=1, lr=1e-6, layers=2, block=8)  # a drafter keeps its shape
    again = replace(done.job, folder=tmp_path, start=first, train=other)
    card = run(again)
    most = len(card.acceptance)
    assert tuple(card.data["before"]["by_position"][:most]) == done.card.acceptance
    assert card.data["began_from"]["name"] == first.name
    assert card.data["began_from"]["answers"] == done.card.data["answers"]
    assert card.acceptance[0] == pytest.approx(done.card.acceptance[0], abs=0.1)
    pieces = load_embeddings(smollm2_path)
    assert torch.equal(load(tmp_path, pieces).net.draft_ids, load(first, pieces).net.draft_ids)
    with pytest.raises(
        UsageError, match=r"made with other settings \(per_prompt\): give the same again, or another"
    ):
        run(replace(again, answers=replace(again.answers, per_prompt=2)))
    with pytest.raises(UsageError, match="is a block drafter: give kind=block"):
        run(replace(again, train=replace(again.train, kind="eagle")))
    with pytest.raises(DrafterMismatch, match="reads layers that a server does not return"):
        run(replace(again, hidden_states_from="http://127.0.0.1:1", train=replace(again.train, taps=1)))
