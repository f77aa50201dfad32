"""The whole job on real weights: a few layers of the model learn to draft for all of it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline import LLM, SpecConfig
from paceline.config import EngineConfig
from paceline.convert.hf_model import write_model
from paceline.errors import CorruptModel, UnknownModel, UsageError
from paceline.heads.local_heads import DRAFT_CARD
from paceline.target.weights.reader import load
from paceline.text import Tokenizer
from paceline.train.draft_model import finetune as the_trainer
from paceline.train.draft_model.card import DraftCard, read_draft_card
from paceline.train.draft_model.finetune import FinetuneConfig
from paceline.train.draft_model.pipeline import DraftJob, reason_to_hold, run
from paceline.train.head_pipeline import CANDIDATE
from support.models import some_layers
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

Done = AnyDone[DraftJob, DraftCard]

LAYERS = (0, 1, 2, 3, 27, 28, 29)  # of 30: without the others it says nothing of sense
STEPS = 8
RATES = {16: 5e-3, 0: 5e-4}  # by rank
TUNE = FinetuneConfig(
    lora=16, lr=RATES[16], steps=STEPS, tokens_per_batch=512, max_len=512, checkpoint_seconds=1e-9
)


def cut_down(path: Path, folder: Path) -> Path:
    """A few layers of the model, as a model of its own."""
    whole = load(path)
    tensors = some_layers(whole.tensors, LAYERS)
    write_model(folder, path, replace(whole.shape, layers=len(LAYERS)), tensors)
    return folder


@pytest.fixture(scope="module")
def done(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    home = tmp_path_factory.mktemp("draft")
    small = cut_down(smollm2_path, home / "small")
    job = DraftJob("smollm2-135m", str(small), (talks(home),), home / "mine", ASKED, TUNE, measured=2)
    again = replace(job, finetune=replace(TUNE, checkpoint_seconds=1e9))
    return killed_once(job, again, run, the_trainer, Tokenizer.load(smollm2_path))


def test_it_goes_on_where_it_was_killed(done: Done) -> None:
    check_it_went_on(done, STEPS)


def test_held_out_conversations_are_never_taught(done: Done) -> None:
    check_held_out_is_never_taught(done)


def test_it_learned_what_it_was_never_taught(done: Done) -> None:
    before, after = done.card.before, done.card.after
    assert before.anchors == after.anchors > 30
    assert before.by_position[0] < 0.2
    assert after.by_position[0] > 0.6
    assert after.tokens_per_pass[-1] > before.tokens_per_pass[-1] + 1


def test_all_weights_learn_too(done: Done, tmp_path: Path) -> None:
    config = replace(TUNE, lora=0, lr=RATES[0], steps=8, checkpoint_seconds=1e9)
    card = run(replace(done.job, folder=copied(done, tmp_path), finetune=config))
    assert card.before == done.card.before
    assert card.after.by_position[0] > 0.6
    assert card.after.tokens_per_pass[-1] > card.before.tokens_per_pass[-1] + 1
    assert not torch.equal(load(tmp_path).tensors["embed"], load(done.job.folder).tensors["embed"])


def test_a_model_that_measures_worse_is_not_used_unasked(done: Done, tmp_path: Path) -> None:
    spoiled = replace(TUNE, lora=0, lr=0.05, steps=2, checkpoint_seconds=1e9)
    job = replace(done.job, draft=str(done.job.folder), folder=copied(done, tmp_path), finetune=spoiled)
    card = run(job)
    assert "mine, which it started from" in reason_to_hold(card)
    assert not (tmp_path / DRAFT_CARD).exists()
    held = read_draft_card(tmp_path / CANDIDATE)
    assert held == replace(card, data=held.data)
    run(replace(job, replace=True))
    assert read_draft_card(tmp_path).after == card.after
    assert not (tmp_path / CANDIDATE).exists()


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
    results = [
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
    assert results[0].token_ids == results[1].token_ids
    assert results[0].accepted["model"] > 6
    assert results[0].passes < results[1].passes


def test_impossible_jobs_are_refused_before_anything_is_done(done: Done, tmp_path: Path) -> None:
    job = replace(done.job, folder=tmp_path / "new", sources=())
    with pytest.raises(UsageError, match="is the draft model itself"):
        run(replace(job, folder=Path(job.draft)))
    with pytest.raises(UnknownModel, match="nobody"):
        run(replace(job, draft="nobody"))
    assert not job.folder.exists()


def test_answers_of_another_target_are_refused(done: Done, tmp_path: Path) -> None:
    copied(done, tmp_path)
    with pytest.raises(UsageError, match="answers of another target"):
        run(replace(done.job, target=done.job.draft, folder=tmp_path))


def test_a_damaged_card_is_reported(done: Done, tmp_path: Path) -> None:
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
            done.job,
            target="qwen2.5-coder-1.5b",
            draft="smollm2-135m",
            folder=tmp_path / "new",
            finetune=config,
        )
    )
    assert card.data["same_tokenizer"] is False
    assert card.data["unreadable"] == 0
    assert card.after.by_position[0] > card.before.by_position[0] + 0.1
    assert card.after.tokens_per_pass[-1] > card.before.tokens_per_pass[-1] + 0.5


@pytest.mark.gemma
def test_distributions_over_other_tokens_cannot_be_compared(
    done: Done, gemma_path: Path, tmp_path: Path
) -> None:
    job = replace(done.job, draft=str(gemma_path), folder=tmp_path, finetune=replace(TUNE, distill=0.5))
    with pytest.raises(UsageError, match="different tokenizers"):
        run(job)
