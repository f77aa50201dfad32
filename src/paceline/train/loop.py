"""The trainer: steps until the time or their number is used up, whatever kind of head it is.

A training that was killed goes on from its last checkpoint. With a given number of steps it comes out as if
it had never stopped: what a step does follows from the seed, its number and the weights alone.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from pathlib import Path
from time import monotonic
from typing import Any, Final

import torch
from torch import Tensor

from paceline.errors import CorruptModel, SettingError
from paceline.heads.teach import Lesson
from paceline.train.dataset import Batch
from paceline.train.dense import DenseModel
from paceline.train.optimizers import Optimizers
from paceline.train.recipe import Recipe, TrainConfig

CHECKPOINT: Final = "training.pt"

Batches = Callable[[int], Iterable[Batch]]  # all texts once, in an order that follows from the number given


@dataclass(frozen=True, slots=True)
class Progress:
    step: int  # done
    loss: float
    figures: dict[str, float]  # of the last step, as the loss names them
    held_out: float | None  # what the last look at held-out text gave
    seconds: float  # used so far
    seconds_left: float  # about


Report = Callable[[Progress], None]


def train(
    recipe: Recipe,
    model: DenseModel,
    batches: Batches,
    config: TrainConfig,
    folder: Path | None = None,
    report: Report = lambda _: None,
    look: Callable[[], float] | None = None,
    clock: Callable[[], float] = monotonic,
) -> Progress:
    """Trains the recipe's network in place. folder: where checkpoints go, and are found.

    look: measures the network on held-out text, and leaves it as it is.
    """
    run = _Run(recipe, model, config, folder, clock)
    for batch in islice(_endless(batches, config.seed), run.step, None):
        if run.over:
            break
        run.take(batch)
        if look is not None and run.step % config.look_steps == 0:
            run.held_out = look()
        report(run.progress())
        run.save_if_due()
    run.save()
    return run.progress()


class _Run:
    def __init__(
        self,
        recipe: Recipe,
        model: DenseModel,
        config: TrainConfig,
        folder: Path | None,
        clock: Callable[[], float],
    ) -> None:
        self._recipe, self._model, self._config, self._clock = recipe, model, config, clock
        self._path = None if folder is None else folder / CHECKPOINT
        self._optimizers = Optimizers(recipe.net, config)
        self.step, self._used, self._began, self._saved = 0, 0.0, clock(), clock()
        self._loss = torch.zeros(())
        self._figures: dict[str, Tensor] = {}
        self.held_out: float | None = None
        self._resume()

    @property
    def seconds(self) -> float:
        return self._used + self._clock() - self._began

    @property
    def over(self) -> bool:
        return self._share() >= 1

    def _share(self) -> float:
        """How much of the training is done, 0 to 1."""
        if self._config.steps:
            return self.step / self._config.steps
        return min(1.0, self.seconds / (60 * self._config.minutes))

    def take(self, batch: Batch) -> None:
        net, config, share = self._recipe.net.train(), self._config, self._share()
        device = self._model.device
        tokens, mask, constrained = (
            part.to(device) for part in (batch.tokens, batch.loss_mask, batch.constrained)
        )
        hidden, final = self._model.features(tokens, net.shape.taps)
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + self.step)
        with _autocast(device):
            self._loss, self._figures = self._recipe.loss(
                Lesson(tokens, mask, hidden, final, constrained), share, generator
            )
        if self._loss.requires_grad:  # a batch may hold nothing to learn
            self._loss.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), config.clip)
            if torch.isfinite(norm):  # a broken step changes nothing
                self._optimizers.step(_rate(share, config))
            net.zero_grad(set_to_none=True)
        self.step += 1

    def progress(self) -> Progress:
        share = max(self._share(), 1e-9)
        figures = {name: float(value) for name, value in self._figures.items()}
        left = self.seconds * (1 - share) / share
        return Progress(self.step, float(self._loss.detach()), figures, self.held_out, self.seconds, left)

    def save_if_due(self) -> None:
        if self._clock() - self._saved >= self._config.checkpoint_seconds:
            self.save()

    def save(self) -> None:
        self._saved = self._clock()
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "config": self._identity(),
            "target": self._model.fingerprint,
            "net": self._recipe.net.state_dict(),
            "optimizers": self._optimizers.state(),
        }
        beside = self._path.with_name(self._path.name + ".new")
        torch.save(state, beside)
        beside.replace(self._path)

    def _identity(self) -> dict[str, Any]:
        """All that the outcome follows from; how long it may take can change while it is interrupted."""
        net = self._recipe.net
        ids = hashlib.sha256(net.draft_ids.numpy(force=True).tobytes()).hexdigest()
        config = asdict(replace(self._config, minutes=1.0, checkpoint_seconds=1.0))
        return {**config, "shape": repr(net.shape), "draft_ids": ids}

    def _resume(self) -> None:
        if self._path is None or not self._path.exists():
            return
        state = _read(self._path, self._model.device)
        if (state["config"], state["target"]) != (self._identity(), self._model.fingerprint):
            raise SettingError(
                f"{self._path.parent.name} holds a training with other settings or another target: "
                "go on with those, or give another folder"
            )
        self.step, self._used = state["step"], state["seconds"]
        self._recipe.net.load_state_dict(state["net"])
        self._optimizers.restore(state["optimizers"])


def _read(path: Path, device: torch.device) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch has many
        raise CorruptModel(f"{path.name} is damaged: {str(error)[:80]}; delete it to begin anew") from None
    wanted = {"step", "seconds", "config", "target", "net", "optimizers"}
    if not isinstance(state, dict) or set(state) != wanted:
        raise CorruptModel(f"{path.name} is not a checkpoint of a training; delete it to begin anew")
    return state


def _endless(batches: Batches, seed: int) -> Iterator[Batch]:
    for epoch in count():
        some = False
        for batch in batches(seed * 1_000_003 + epoch):
            some = True
            yield batch
        if not some:
            raise SettingError("there is nothing to train on: the texts hold no batch")


def _rate(share: float, config: TrainConfig) -> float:
    """The learning rate, as a share of the configured one: a ramp, then a cosine."""
    if share < config.warmup:
        return (share + 1e-3) / (config.warmup + 1e-3)
    done = (share - config.warmup) / max(1 - config.warmup, 1e-9)
    return config.last_lr + (1 - config.last_lr) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def _autocast(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
