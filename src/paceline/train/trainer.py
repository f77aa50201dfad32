"""The training loop of draft heads and draft models: steps until their number or the time is used up.

A killed training resumes from its last checkpoint. With a given number of steps the result is the same as
without the interruption: a step depends on the seed, its number and the weights alone.
"""

import ast
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from pathlib import Path
from time import monotonic
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from paceline.atomic import remove_unfinished, replacing
from paceline.errors import CorruptModel, OutOfMemory, UsageError
from paceline.train.config import Schedule
from paceline.train.data.dataset import Batch
from paceline.train.losses.base import TrainBatch
from paceline.train.optim import Optimizers, optimizers_of
from paceline.train.recipe import Recipe, TrainConfig
from paceline.train.train_decoder import TrainDecoder

CHECKPOINT: Final = "training.pt"
_EVAL_STEPS: Final = ("eval_steps", "look_steps")  # in files of 0.1; evaluation changes no weight
_STATE: Final = {"step", "seconds", "identity", "weights", "optimizers"}

Batches = Callable[[int], Iterable[Batch]]  # epoch seed -> every text once, in an order that follows from it


class Learner(Protocol):
    """The model that is trained, in place."""

    @property
    def device(self) -> torch.device: ...
    @property
    def weights(self) -> Mapping[str, Tensor]: ...  # the trainable ones
    @property
    def optimizers(self) -> Optimizers: ...
    @property
    def identity(self) -> dict[str, Any]: ...  # all that the result depends on, beside the settings

    def loss(
        self, batch: Batch, share: float, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and scalar metrics. share: of the training that is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class TrainProgress:
    step: int  # done
    loss: float
    metrics: dict[str, float]  # of the last step
    held_out: float | None  # the last evaluation on held-out text
    seconds: float  # used so far
    seconds_left: float  # about


Report = Callable[[TrainProgress], None]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Measures the learner on held-out text, without changing it."""

    measured: Callable[[], float]
    every: int  # steps


def take_steps(
    learner: Learner,
    batches: Batches,
    schedule: Schedule,
    folder: Path | None = None,
    report: Report = lambda _: None,
    evaluate: Evaluation | None = None,
    clock: Callable[[], float] = monotonic,
) -> TrainProgress:
    """folder: of the checkpoints, old and new."""
    run = _TrainRun(learner, schedule, folder, clock)
    for batch in islice(_endless(batches, schedule.seed), run.step, None):
        if run.share >= 1:
            break
        run.take(batch)
        if evaluate is not None and run.step % evaluate.every == 0:
            run.held_out = evaluate.measured()
        report(run.progress())
        run.save_if_due()
    run.save()
    return run.progress()


def autocast(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


class _TrainRun:
    def __init__(
        self, learner: Learner, schedule: Schedule, folder: Path | None, clock: Callable[[], float]
    ) -> None:
        self._learner, self._schedule, self._clock = learner, schedule, clock
        self._path = None if folder is None else folder / CHECKPOINT
        self.step, self._used, self._began, self._saved = 0, 0.0, clock(), clock()
        self._loss = torch.zeros(())
        self._metrics: dict[str, Tensor] = {}
        self.held_out: float | None = None
        self._resume()

    @property
    def seconds(self) -> float:
        return self._used + self._clock() - self._began

    @property
    def share(self) -> float:
        """The share of the training that is done, 0 to 1."""
        if self._schedule.steps:
            return self.step / self._schedule.steps
        return min(1.0, self.seconds / (60 * self._schedule.minutes))

    def take(self, batch: Batch) -> None:
        try:
            self._learn(batch)
        except torch.OutOfMemoryError:
            size = self._schedule.tokens_per_batch
            raise OutOfMemory(
                f"no memory is left for a step of {size} tokens: give a smaller --batch-tokens, "
                f"such as {max(1, size // 2)}; the training then resumes from its last checkpoint"
            ) from None
        self.step += 1

    def _learn(self, batch: Batch) -> None:
        share, weights = self.share, list(self._learner.weights.values())
        generator = torch.Generator().manual_seed(self._schedule.seed * 1_000_003 + self.step)
        self._loss, self._metrics = self._learner.loss(batch, share, generator)
        if not self._loss.requires_grad:
            return  # the batch has no position to train on
        self._loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(weights, self._schedule.clip)
        if torch.isfinite(norm):  # else the step is skipped
            self._learner.optimizers.step(self._schedule.rate(share))
        for weight in weights:
            weight.grad = None

    def progress(self) -> TrainProgress:
        share = max(self.share, 1e-9)
        metrics = {name: float(value) for name, value in self._metrics.items()}
        left = self.seconds * (1 - share) / share
        return TrainProgress(
            self.step, float(self._loss.detach()), metrics, self.held_out, self.seconds, left
        )

    def save_if_due(self) -> None:
        if self._clock() - self._saved >= self._schedule.checkpoint_seconds:
            self.save()

    def save(self) -> None:
        self._saved = self._clock()
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "identity": self._identity(),
            "weights": {name: weight.detach() for name, weight in self._learner.weights.items()},
            "optimizers": self._learner.optimizers.state(),
        }
        with replacing(self._path) as fresh:
            torch.save(state, fresh)

    def _identity(self) -> dict[str, Any]:
        """Duration, batch size and evaluation may change between an interruption and its resumption."""
        same = replace(self._schedule, minutes=1.0, checkpoint_seconds=1.0, tokens_per_batch=1)
        return _current_form({**asdict(same), **self._learner.identity})

    def _resume(self) -> None:
        if self._path is None:
            return
        remove_unfinished(self._path)
        if not self._path.exists():
            return
        state = _read(self._path, self._learner.device)
        if _current_form(state["identity"]) != self._identity():
            raise UsageError(
                f"{self._path.parent.name} holds a training with other settings or of another model: "
                "continue with those, or give another folder"
            )
        self.step, self._used = state["step"], state["seconds"]
        with torch.no_grad():
            for name, weight in self._learner.weights.items():
                weight.copy_(state["weights"][name])
        self._learner.optimizers.restore(state["optimizers"])


def _read(path: Path, device: torch.device) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch has many
        raise CorruptModel(f"{path.name} is damaged: {str(error)[:80]}; delete it to start again") from None
    if not isinstance(state, dict) or set(state) != _STATE:
        raise CorruptModel(f"{path.name} is not a checkpoint of a training; delete it to start again")
    return state


def _current_form(identity: dict[str, Any]) -> dict[str, Any]:
    """An identity without the interval of evaluations, and with the head's shape as a table.

    Before 0.2 the shape was a repr: "BlockShape(width=64, ...)".
    """
    current = {name: value for name, value in identity.items() if name not in _EVAL_STEPS}
    shape = current.get("shape")
    return current | {"shape": _shape_from_repr(shape)} if isinstance(shape, str) else current


def _shape_from_repr(text: str) -> dict[str, Any]:
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            return {}
        kind = call.func.id.removesuffix("Shape").removesuffix("Config").lower()
        return {"kind": kind, **{str(k.arg): ast.literal_eval(k.value) for k in call.keywords}}
    except (SyntaxError, ValueError):
        return {}


def _endless(batches: Batches, seed: int) -> Iterator[Batch]:
    for epoch in count():
        some = False
        for batch in batches(seed * 1_000_003 + epoch):
            some = True
            yield batch
        if not some:
            raise UsageError("there is nothing to train on: the texts hold no batch")


def train(
    recipe: Recipe,
    model: TrainDecoder,
    batches: Batches,
    config: TrainConfig,
    folder: Path | None = None,
    report: Report = lambda _: None,
    evaluate: Callable[[], float] | None = None,
    clock: Callable[[], float] = monotonic,
) -> TrainProgress:
    """Trains the recipe's network in place. folder: of the checkpoints, old and new.

    evaluate: measures the network on held-out text, without changing it.
    """
    evaluation = None if evaluate is None else Evaluation(evaluate, config.eval_steps)
    return take_steps(_HeadLearner(recipe, model, config), batches, config, folder, report, evaluation, clock)


class _HeadLearner:
    def __init__(self, recipe: Recipe, model: TrainDecoder, config: TrainConfig) -> None:
        self._recipe, self._model, self.device = recipe, model, model.device
        self.weights = dict(recipe.net.named_parameters())
        self.optimizers = optimizers_of(self.weights, config)

    @property
    def identity(self) -> dict[str, Any]:
        net = self._recipe.net
        shape: Any = net.shape  # a dataclass
        ids = hashlib.sha256(net.draft_ids.numpy(force=True).tobytes()).hexdigest()
        of = {"target": self._model.fingerprint, "began_from": self._recipe.began_from}
        if self._model.computed_by:
            of["hidden_states"] = self._model.computed_by
        return {"shape": {"kind": self._recipe.kind, **asdict(shape)}, "draft_ids": ids, **of}

    def loss(
        self, batch: Batch, share: float, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        tokens, mask, constrained = (
            part.to(self.device) for part in (batch.tokens, batch.loss_mask, batch.constrained)
        )
        hidden, final = self._model.features(tokens, self._recipe.net.train().shape.taps)
        with autocast(self.device):
            return self._recipe.loss(TrainBatch(tokens, mask, hidden, final, constrained), share, generator)
