"""The trainer learns, stops when it should, and goes on where it was killed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.drafters.heads import drafter_of
from paceline.errors import CorruptModel, OutOfMemory, UsageError
from paceline.heads.head_checkpoint import Card, load, save
from paceline.train.evaluate import replay
from paceline.train.losses.base import TrainBatch
from paceline.train.recipe import Recipe, TrainConfig, default_taps, new_recipe, pieces_of
from paceline.train.trainer import CHECKPOINT, TrainProgress, train
from support.heads import batches, recorded, target_text, tiny_config, tiny_model, tiny_weights
from support.models import VOCAB

pytestmark = pytest.mark.slow

MODEL = tiny_model()


def fresh(config: TrainConfig) -> Recipe:
    return new_recipe(config, MODEL, torch.arange(VOCAB))


def weights(of: Recipe) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in of.net.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    ("kind", "optimizer"), [("block", "adamw"), ("block", "muon"), ("eagle", "adamw"), ("medusa", "adamw")]
)
def test_a_killed_training_comes_out_the_same(tmp_path: Path, kind: str, optimizer: str) -> None:
    config = tiny_config(7, kind=kind, optimizer=optimizer, checkpoint_seconds=1e-9)
    straight = fresh(config)
    train(straight, MODEL, batches, config)

    def kill(progress: TrainProgress) -> None:
        if progress.step == 4:
            raise Killed

    killed = fresh(config)
    with pytest.raises(Killed):
        train(killed, MODEL, batches, config, tmp_path, kill)
    again, steps = fresh(config), []
    train(again, MODEL, batches, config, tmp_path, lambda p: steps.append(p.step))
    assert steps == [4, 5, 6, 7]  # the fourth was not saved yet
    assert same(weights(straight), weights(again))
    assert not same(weights(straight), weights(killed))


def test_a_step_that_does_not_fit_says_so_and_a_smaller_one_goes_on(tmp_path: Path) -> None:
    config = tiny_config(5, tokens_per_batch=4096, checkpoint_seconds=1e-9)
    of, after = fresh(config), [3]

    def full(
        batch: TrainBatch, progress: float, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        after[0] -= 1
        if after[0] < 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return of.loss(batch, progress, generator)

    with pytest.raises(OutOfMemory, match=r"4096 tokens: give a smaller --batch-tokens, such as 2048"):
        train(replace(of, loss=full), MODEL, batches, config, tmp_path)
    less, steps = replace(config, tokens_per_batch=2048), []
    again = fresh(less)
    train(again, MODEL, batches, less, tmp_path, lambda p: steps.append(p.step))
    assert steps == [4, 5]


@pytest.mark.parametrize("kind", ["block", "eagle", "medusa"])
def test_every_kind_learns_is_stored_and_served(tmp_path: Path, kind: str) -> None:
    config = tiny_config(40, kind=kind)
    of, losses = fresh(config), []
    train(of, MODEL, batches, config, report=lambda p: losses.append(p.loss))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    save(tmp_path, Card(of.kind, of.net.shape, "tiny", MODEL.fingerprint, "float32"), of.net)
    net = load(tmp_path, pieces_of(MODEL)).net
    texts = recorded(target_text()[:4])
    before, after = (replay(drafter_of(n), MODEL, texts, 4) for n in (of.net, net))
    assert before == after
    assert sum(guess.right for guess in after) > 10


def test_another_seed_is_another_training() -> None:
    found = []
    for seed in (0, 0, 1):
        config = tiny_config(2, seed=seed)
        of = fresh(config)
        train(of, MODEL, batches, config)
        found.append(weights(of))
    assert same(found[0], found[1])
    assert not same(found[0], found[2])


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    config = tiny_config(1)
    train(fresh(config), MODEL, batches, config, tmp_path)
    other = tiny_config(1, seed=5)
    with pytest.raises(UsageError, match="other settings"):
        train(fresh(other), MODEL, batches, other, tmp_path)
    elsewhere = replace(fresh(config), began_from="the weights of a drafter")
    with pytest.raises(UsageError, match="other settings"):
        train(elsewhere, MODEL, batches, config, tmp_path)
    (tmp_path / CHECKPOINT).write_bytes(b"nothing")
    with pytest.raises(CorruptModel, match="delete it"):
        train(fresh(config), MODEL, batches, config, tmp_path)


@pytest.mark.parametrize(("kind", "name"), [("block", "Block"), ("eagle", "Eagle"), ("medusa", "Medusa")])
@pytest.mark.parametrize(("suffix", "steps_key"), [("Shape", "look_steps"), ("Config", "eval_steps")])
def test_a_checkpoint_with_an_identity_of_0_1_is_resumed(
    tmp_path: Path, kind: str, name: str, suffix: str, steps_key: str
) -> None:
    config, path = tiny_config(2, kind=kind), tmp_path / CHECKPOINT
    of = fresh(config)
    train(of, MODEL, batches, config, tmp_path)
    state = torch.load(path, weights_only=True)
    assert state["identity"]["shape"]["kind"] == kind
    shown = repr(of.net.shape)
    assert shown.startswith(f"{name}Config(")
    state["identity"] |= {steps_key: 300, "shape": shown.replace("Config(", f"{suffix}(", 1)}
    torch.save(state, path)
    again = fresh(config)
    assert train(again, MODEL, batches, config, tmp_path).step == 2
    assert same(weights(of), weights(again))
    state["identity"]["shape"] = shown.replace("width=", "width=1", 1)
    torch.save(state, path)
    with pytest.raises(UsageError, match="other settings"):
        train(fresh(config), MODEL, batches, config, tmp_path)


def test_evaluations_may_be_as_rare_as_one_likes_after_an_interruption(tmp_path: Path) -> None:
    config = tiny_config(1)
    train(fresh(config), MODEL, batches, config, tmp_path)
    assert train(fresh(config), MODEL, batches, replace(config, eval_steps=7), tmp_path).step == 1


def test_time_ends_a_training_and_rates_follow_it(tmp_path: Path) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    config = tiny_config(0, minutes=1.0)
    seen: list[TrainProgress] = []
    last = train(fresh(config), MODEL, batches, config, None, seen.append, clock=clock)
    assert 0 < last.step < 60
    assert last.seconds >= 60
    left = [p.seconds_left for p in seen]
    assert left == sorted(left, reverse=True)
    assert left[-1] < 10


def test_held_out_text_is_looked_at_now_and_then() -> None:
    config = tiny_config(5, eval_steps=2)
    seen: list[float | None] = []
    looks = iter([0.25, 0.5])
    train(
        fresh(config),
        MODEL,
        batches,
        config,
        report=lambda p: seen.append(p.held_out),
        evaluate=lambda: next(looks),
    )
    assert seen == [None, 0.25, 0.25, 0.5, 0.5]


def test_nothing_to_train_on_is_reported() -> None:
    config = tiny_config(1)
    with pytest.raises(UsageError, match="nothing to train on"):
        train(fresh(config), MODEL, lambda _: [], config)


def test_a_block_can_begin_from_the_targets_last_layers() -> None:
    config, theirs = tiny_config(1, layers=2), tiny_weights().tensors
    plain = new_recipe(config, MODEL, torch.arange(VOCAB)).net.state_dict()
    begun = new_recipe(config, MODEL, torch.arange(VOCAB), theirs).net.state_dict()
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        assert torch.equal(begun[f"layers.0.{name}.weight"], theirs[f"layers.3.{name}"])
        assert torch.equal(begun[f"layers.1.{name}.weight"], theirs[f"layers.4.{name}"])
    assert torch.equal(begun["mask"], plain["mask"])
    narrow = new_recipe(replace(config, ff_width=7), MODEL, torch.arange(VOCAB), theirs).net.state_dict()
    assert narrow["layers.1.up.weight"].shape == (7, 48)
    assert torch.equal(narrow["layers.1.q.weight"], theirs["layers.4.q"])


def test_taps_are_spread_over_the_layers() -> None:
    assert default_taps(30, 5) == (1, 8, 14, 20, 27)
    assert default_taps(28, 3) == (1, 13, 25)
    assert default_taps(3, 5) == (0,)
    assert default_taps(2, 1) == (0,)


@pytest.mark.parametrize(
    "wrong", [{"kind": "oracle"}, {"block": 1}, {"warmup": 2.0}, {"lr": 0.0}, {"steps": 0, "minutes": 0.0}]
)
def test_settings_out_of_range(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        TrainConfig(**wrong)  # type: ignore[arg-type]
