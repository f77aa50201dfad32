"""A draft model's training: it learns, stops when it should, and goes on where it was killed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import CorruptModel, UsageError
from paceline.train.draft_model.finetune import FinetuneConfig, finetune, loss_of
from paceline.train.draft_model.model import TrainableDraftModel
from paceline.train.trainer import CHECKPOINT, TrainProgress
from support.heads import PROMPT, batches, tiny_model, tiny_weights

pytestmark = pytest.mark.slow

STEPS = 12
BATCH = next(iter(batches(0)))


class Killed(Exception):
    pass


def small(**other: object) -> FinetuneConfig:
    given = {"steps": STEPS, "lora": 2, "lr": 5e-3, "checkpoint_seconds": 1e-9} | other
    return FinetuneConfig(**given)  # type: ignore[arg-type]


def fresh(config: FinetuneConfig, weights: int = 7) -> TrainableDraftModel:
    """A draft model that knows nothing of the tiny target."""
    return TrainableDraftModel(tiny_weights(weights), "cpu", config.lora, config.scale, config.seed)


def state(net: TrainableDraftModel) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in net.trained.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("lora", [0, 2])
def test_a_killed_training_comes_out_the_same(tmp_path: Path, lora: int) -> None:
    config = small(lora=lora)
    straight, killed, again = (fresh(config) for _ in range(3))
    finetune(straight, batches, config)

    def kill(progress: TrainProgress) -> None:
        if progress.step == 4:
            raise Killed

    with pytest.raises(Killed):
        finetune(killed, batches, config, tmp_path, kill)
    steps: list[int] = []
    finetune(again, batches, config, tmp_path, lambda p: steps.append(p.step))
    assert steps == list(range(4, STEPS + 1))  # the fourth was not saved yet
    assert same(state(straight), state(again))
    assert not same(state(straight), state(killed))


@pytest.mark.parametrize("lora", [0, 8])
@pytest.mark.parametrize("distill", [0.0, 1.0])
def test_it_learns_what_the_target_says(lora: int, distill: float) -> None:
    config = small(lora=lora, steps=40, lr=2e-2 if lora else 3e-3, distill=distill)
    net, losses = fresh(config), list[float]()
    finetune(net, batches, config, None, lambda p: losses.append(p.loss), tiny_model())
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_the_loss_is_over_the_answers_alone() -> None:
    net, mask = fresh(small()), BATCH.loss_mask.clone()
    mask[0, : PROMPT + 6] = False  # a longer prompt beside the others
    logits = net.model.logits(net.hidden(BATCH.tokens[:, :-1]))
    answered = mask[:, 1:]
    assert int(answered.sum()) == BATCH.tokens.shape[0] * (BATCH.tokens.shape[1] - PROMPT) - 6
    expected = F.cross_entropy(logits[answered], BATCH.tokens[:, 1:][answered])
    assert loss_of(net, replace(BATCH, loss_mask=mask)).item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_distance_from_its_own_distribution_is_zero() -> None:
    teacher = tiny_model()
    itself, other = (TrainableDraftModel(tiny_weights(seed), "cpu", 2, 4.0) for seed in (0, 7))
    assert loss_of(itself, BATCH, teacher, 1.0).item() == pytest.approx(0.0, abs=1e-5)
    assert loss_of(other, BATCH, teacher, 1.0).item() > 1


def test_the_seed_decides() -> None:
    found = []
    for seed in (0, 0, 1):
        config = small(steps=2, seed=seed)
        net = fresh(config)
        finetune(net, batches, config)
        found.append(state(net))
    assert same(found[0], found[1])
    assert not same(found[0], found[2])


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    config = small(steps=1)
    finetune(fresh(config), batches, config, tmp_path)
    reseeded, other = small(steps=1, seed=3), replace(tiny_weights(7), fingerprint="another")
    for net, settings in (
        (fresh(reseeded), reseeded),
        (TrainableDraftModel(other, "cpu", 2, config.scale), config),
    ):
        with pytest.raises(UsageError, match="other settings or of another model"):
            finetune(net, batches, settings, tmp_path)
    (tmp_path / CHECKPOINT).write_bytes(b"nothing")
    with pytest.raises(CorruptModel, match="delete it"):
        finetune(fresh(config), batches, config, tmp_path)
    torch.save({"step": 1}, tmp_path / CHECKPOINT)
    with pytest.raises(CorruptModel, match="not a checkpoint"):
        finetune(fresh(config), batches, config, tmp_path)


def test_nothing_to_train_on_is_reported() -> None:
    config = small()
    with pytest.raises(UsageError, match="nothing to train on"):
        finetune(fresh(config), lambda _: [], config)


def test_time_ends_a_training() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    config = small(steps=0, minutes=0.5)
    last = finetune(fresh(config), batches, config, clock=clock)
    assert 0 < last.step < 30
    assert last.seconds >= 30


@pytest.mark.parametrize(
    "wrong",
    [
        {"lora": -1},
        {"lora": 1.5},
        {"alpha": -1.0},
        {"distill": 2.0},
        {"warmup": 2.0},
        {"lr": -1e-3},
        {"lr": float("nan")},
        {"clip": 0.0},
        {"max_len": 1},
        {"tokens_per_batch": 0},
        {"steps": 0, "minutes": 0.0},
    ],
)
def test_settings_out_of_range(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        FinetuneConfig(**wrong)  # type: ignore[arg-type]
