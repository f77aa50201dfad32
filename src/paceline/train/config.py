"""What all trainings have in common: how long they take, how much at once, and how fast they learn."""

import math
from dataclasses import dataclass
from typing import Final

from paceline.errors import SettingError, UsageError

MOST_SEEDS: Final = 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    steps: int = 0  # 0: as many as fit into the time
    minutes: float = 10.0  # taken where no steps are given
    tokens_per_batch: int = 65536
    max_len: int = 2048
    weight_decay: float = 0.0
    warmup: float = 0.04  # share of the training
    last_lr: float = 0.1  # share of the rate that is left at the end
    clip: float = 1.0
    seed: int = 0
    checkpoint_seconds: float = 60.0

    def __post_init__(self) -> None:
        self.require_whole(steps=0, tokens_per_batch=1, max_len=2)
        if not 0 <= self.seed < MOST_SEEDS:
            raise self.unusable("seed", f"0 to {MOST_SEEDS - 1}")
        if self.steps == 0 and not 0 < self.minutes < math.inf:
            raise UsageError(f"steps={self.steps}, minutes={self.minutes}: one of them must be above 0")
        self.require_shares("warmup", "last_lr")
        self.require_positive("clip", "checkpoint_seconds")
        if not self.weight_decay >= 0:
            raise self.unusable("weight_decay", "0 or more")

    def rate(self, share: float) -> float:
        """Of the learning rate, when this share of the training is done: a ramp, then a cosine."""
        if share < self.warmup:
            return (share + 1e-3) / (self.warmup + 1e-3)
        done = (share - self.warmup) / max(1 - self.warmup, 1e-9)
        return self.last_lr + (1 - self.last_lr) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))

    def require_whole(self, **least: int) -> None:
        for name, lowest in least.items():
            if not isinstance(getattr(self, name), int) or getattr(self, name) < lowest:
                raise self.unusable(name, f"a whole number, {lowest} or more")

    def require_shares(self, *names: str) -> None:
        for name in names:
            if not 0 <= getattr(self, name) <= 1:
                raise self.unusable(name, "0 to 1")

    def require_positive(self, *names: str) -> None:
        for name in names:
            if not getattr(self, name) > 0:
                raise self.unusable(name, "more than 0")

    def unusable(self, name: str, expected: str) -> SettingError:
        return SettingError(name, getattr(self, name), expected)
