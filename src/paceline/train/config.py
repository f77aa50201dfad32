"""Settings common to all trainings: duration, batch size, learning-rate schedule."""

import math
from dataclasses import dataclass
from typing import Final

from paceline.config import require, require_between, require_min, require_positive, require_whole
from paceline.errors import UsageError

MAX_SEED: Final = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    steps: int = 0  # 0: as many as fit into the time
    minutes: float = 10.0  # used where no steps are given
    tokens_per_batch: int = 65536
    max_len: int = 2048
    weight_decay: float = 0.0
    warmup: float = 0.04  # share of the training
    last_lr: float = 0.1  # share of the learning rate at the end
    clip: float = 1.0
    seed: int = 0
    checkpoint_seconds: float = 60.0

    def __post_init__(self) -> None:
        require_whole(self, "steps", "tokens_per_batch", "max_len", "seed")
        require_min(self, steps=0, tokens_per_batch=1, max_len=2, weight_decay=0)
        require(lambda x: 0 <= x <= MAX_SEED, "seed", self.seed, f"0 to {MAX_SEED}")
        if self.steps == 0 and not 0 < self.minutes < math.inf:
            raise UsageError(f"steps={self.steps}, minutes={self.minutes}: one of them must be above 0")
        require_between(self, 0, 1, "warmup", "last_lr")
        require_positive(self, "clip", "checkpoint_seconds")

    def rate(self, share: float) -> float:
        """The factor of the learning rate after this share of the training: linear warm-up, then cosine."""
        if share < self.warmup:
            return (share + 1e-3) / (self.warmup + 1e-3)
        done = (share - self.warmup) / max(1 - self.warmup, 1e-9)
        return self.last_lr + (1 - self.last_lr) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
