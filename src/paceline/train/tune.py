"""Steps of a draft model's training, until the time or their number is used up.

A training that was killed goes on from its last checkpoint. With a given number of steps it comes out as if
it had never stopped: what a step does follows from the seed, its number and the weights alone.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from pathlib import Path
from time import monotonic
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import CorruptModel, SettingError
from paceline.train.dataset import Batch
from paceline.train.dense import DenseModel
from paceline.train.draft_net import DraftNet
from paceline.train.loop import CHECKPOINT, Batches, Progress, Report

_STATE: Final = {"step", "seconds", "identity", "weights", "optimizer"}


@dataclass(frozen=True, slots=True)
class TuneConfig:
    lora: int = 16  # rank of what is added to each matrix; 0: all weights are trained
    alpha: float = 0.0  # the additions are scaled by alpha / lora; 0: twice the rank
    distill: float = 0.0  # share of the loss that is the distance from the target's law, not from its token
    steps: int = 0  # 0: as many as fit into the time
    minutes: float = 10.0  # taken where no steps are given
    tokens_per_batch: int = 16384
    max_len: int = 2048
    lr: float = 0.0  # 0: 5e-4 for additions, 5e-5 for all weights
    weight_decay: float = 0.0
    warmup: float = 0.05  # share of the training
    last_lr: float = 0.1  # share of the rate that is left at the end
    clip: float = 1.0
    seed: int = 0
    checkpoint_seconds: float = 120.0

    def __post_init__(self) -> None:
        for name, least in (("lora", 0), ("steps", 0), ("tokens_per_batch", 1), ("max_len", 2)):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                raise _unusable(self, name, f"a whole number, {least} or more")
        if self.steps == 0 and self.minutes <= 0:
            raise SettingError(f"steps={self.steps}, minutes={self.minutes}: one of them must be above 0")
        for name in ("distill", "warmup", "last_lr"):
            if not 0 <= getattr(self, name) <= 1:
                raise _unusable(self, name, "0 to 1")
        for name in ("alpha", "lr", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise _unusable(self, name, "0 or more")
        for name in ("clip", "checkpoint_seconds"):
            if not getattr(self, name) > 0:
                raise _unusable(self, name, "more than 0")

    @property
    def scale(self) -> float:
        """The alpha that is used."""
        return self.alpha or 2.0 * self.lora

    @property
    def rate(self) -> float:
        """The learning rate that is used."""
        return self.lr or (5e-4 if self.lora else 5e-5)


def tune(
    net: DraftNet,
    batches: Batches,
    config: TuneConfig,
    folder: Path | None = None,
    report: Report = lambda _: None,
    teacher: DenseModel | None = None,
    clock: Callable[[], float] = monotonic,
) -> Progress:
    """Trains the net in place. folder: where checkpoints go, and are found. teacher: the target."""
    run = _Run(net, config, folder, teacher, clock)
    for batch in islice(_endless(batches, config.seed), run.step, None):
        if run.share >= 1:
            break
        run.take(batch)
        report(run.progress())
        run.save_if_due()
    run.save()
    return run.progress()


def loss_of(net: DraftNet, batch: Batch, teacher: DenseModel | None = None, distill: float = 0.0) -> Tensor:
    """The mean over the answers' tokens; what comes before every answer of the batch is only read."""
    device = net.model.device
    tokens, own = batch.tokens.to(device), batch.loss_mask.to(device)
    first = int(own.int().argmax(1).min())  # where the earliest answer begins
    start = max(0, first - 1)  # the row that guesses it
    asked = own[:, start + 1 :]
    logits = net.model.logits(net.hidden(tokens[:, :-1], start)[asked])
    loss = F.cross_entropy(logits, tokens[:, start + 1 :][asked])
    if teacher is None or not distill:
        return loss
    _, final = teacher.features(tokens[:, :-1])
    theirs = teacher.logits(final[:, start:][asked])
    both = min(theirs.shape[-1], logits.shape[-1])
    law, ours = (x[:, :both].log_softmax(-1) for x in (theirs, logits))
    return (1 - distill) * loss + distill * F.kl_div(ours, law, log_target=True, reduction="batchmean")


class _Run:
    def __init__(
        self,
        net: DraftNet,
        config: TuneConfig,
        folder: Path | None,
        teacher: DenseModel | None,
        clock: Callable[[], float],
    ) -> None:
        self._net, self._config, self._teacher, self._clock = net, config, teacher, clock
        self._path = None if folder is None else folder / CHECKPOINT
        self._weights = list(net.trained.values())
        self._optimizer = torch.optim.AdamW(
            self._weights, config.rate, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        self.step, self._used, self._began, self._saved = 0, 0.0, clock(), clock()
        self._loss = torch.zeros(())
        self._resume()

    @property
    def seconds(self) -> float:
        return self._used + self._clock() - self._began

    @property
    def share(self) -> float:
        """How much of the training is done, 0 to 1."""
        if self._config.steps:
            return self.step / self._config.steps
        return min(1.0, self.seconds / (60 * self._config.minutes))

    def take(self, batch: Batch) -> None:
        config, share = self._config, self.share
        with _autocast(self._net.model.device):
            self._loss = loss_of(self._net, batch, self._teacher, config.distill)
        self._loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self._weights, config.clip)
        if torch.isfinite(norm):  # a broken step changes nothing
            for group in self._optimizer.param_groups:
                group["lr"] = config.rate * _rate(share, config)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def progress(self) -> Progress:
        share = max(self.share, 1e-9)
        left = self.seconds * (1 - share) / share
        return Progress(self.step, float(self._loss.detach()), {}, None, self.seconds, left)

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
            "identity": self._identity(),
            "weights": {name: weight.detach() for name, weight in self._net.trained.items()},
            "optimizer": self._optimizer.state_dict(),
        }
        beside = self._path.with_name(self._path.name + ".new")
        torch.save(state, beside)
        beside.replace(self._path)

    def _resume(self) -> None:
        if self._path is None or not self._path.exists():
            return
        state = _read(self._path, self._net.model.device)
        if state["identity"] != self._identity():
            raise SettingError(
                f"{self._path.parent.name} holds a training with other settings or of another model: "
                "go on with those, or give another folder"
            )
        self.step, self._used = state["step"], state["seconds"]
        self._net.load(state["weights"])
        self._optimizer.load_state_dict(state["optimizer"])

    def _identity(self) -> dict[str, Any]:
        """All that the outcome follows from; how long it may take can change while it is interrupted."""
        config = replace(self._config, minutes=1.0, checkpoint_seconds=1.0)
        return {**asdict(config), "model": self._net.model.fingerprint}


def _read(path: Path, device: torch.device) -> Mapping[str, Any]:
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch has many
        raise CorruptModel(f"{path.name} is damaged: {str(error)[:80]}; delete it to begin anew") from None
    if not isinstance(state, dict) or set(state) != _STATE:
        raise CorruptModel(
            f"{path.name} is not a checkpoint of a draft model's training; delete it to begin anew"
        )
    return state


def _endless(batches: Batches, seed: int) -> Iterator[Batch]:
    for epoch in count():
        yield from batches(seed * 1_000_003 + epoch)


def _rate(share: float, config: TuneConfig) -> float:
    """The learning rate, as a share of the configured one: a ramp, then a cosine."""
    if share < config.warmup:
        return (share + 1e-3) / (config.warmup + 1e-3)
    done = (share - config.warmup) / max(1 - config.warmup, 1e-9)
    return config.last_lr + (1 - config.last_lr) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def _autocast(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def _unusable(config: TuneConfig, name: str, expected: str) -> SettingError:
    return SettingError(f"{name}={getattr(config, name)!r} is not usable: expected {expected}")
