"""Online training: settings, the samples a server records, and the job for the trainer process."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from paceline.config import (
    EngineConfig,
    require,
    require_between,
    require_min,
    require_positive,
    require_whole,
    settings,
)
from paceline.types import ROOT, Round

MIN_ANSWER_TOKENS: Final = 2  # of a sample: one to draft from, one to predict


@dataclass(frozen=True, slots=True)
class OnlineTrainingConfig:
    """How a server trains its drafters further on its own traffic, while it is idle."""

    idle_s: float = 5.0  # without a request, before training starts or resumes
    patience_s: float = 60.0  # after which a new version is loaded even while requests run
    min_new_samples: int = 32  # since the last training
    buffer_tokens: int = 262_144  # of samples in memory; the oldest are dropped
    train_tokens: int = 16_384  # of the latest samples, in one training
    eval_tokens: int = 8_192  # of the latest held-out samples, on which old and new are compared
    max_len: int = 4_096  # tokens of a sample
    batch_tokens: int = 512
    anchors: int = 32  # positions of each sample that are drafted from in one step, at most
    steps: int = 64
    lr: float = 1e-4
    accepted_share: float = 0.25  # of the positions without a rejected draft, trained on beside the others
    held_out: float = 0.1  # share of conversations
    min_positions: int = 200  # held out: with fewer, nothing is measured and nothing trained
    min_gain: float = 0.01  # in tokens per pass, for a new version to be used
    max_versions: int = 8  # kept of each drafter, besides the first

    def __post_init__(self) -> None:
        tokens = ("buffer_tokens", "train_tokens", "eval_tokens", "max_len", "batch_tokens")
        counts = (*tokens, "min_new_samples", "anchors", "steps", "min_positions", "max_versions")
        require_whole(self, *counts)
        require_min(self, **dict.fromkeys(counts, 1))
        for name in ("idle_s", "patience_s"):
            require(lambda x: x >= 0, name, getattr(self, name), "0 or more seconds")
        require_positive(self, "lr")
        require_between(self, 0, 1, "accepted_share")
        require(lambda x: 0 < x < 1, "held_out", self.held_out, "more than 0 and less than 1")
        require_min(self, min_gain=0)


@dataclass(frozen=True, slots=True)
class TrainingSample:
    tokens: tuple[int, ...]  # prompt and answer
    prompt_len: int
    rejected: Mapping[str, tuple[int, ...]]  # drafter -> index of the last token before each rejected draft
    opening: str  # the user's first message: all turns of a conversation share it
    constrained: bool = False  # sampled under a grammar

    def truncate(self, max_tokens: int) -> "TrainingSample":
        rejected = {name: tuple(i for i in at if i < max_tokens) for name, at in self.rejected.items()}
        return replace(self, tokens=self.tokens[:max_tokens], rejected=rejected)

    @property
    def answer_len(self) -> int:
        return len(self.tokens) - self.prompt_len


@dataclass(frozen=True, slots=True)
class RefreshJob:
    """The input of one run of the trainer process."""

    model: str  # its path
    drafters: tuple[str, ...]  # folders
    engine: EngineConfig
    samples: tuple[TrainingSample, ...]  # oldest first
    config: OnlineTrainingConfig = field(default_factory=OnlineTrainingConfig)

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, encoded: bytes) -> "RefreshJob":
        table: dict[str, Any] = json.loads(encoded)
        return cls(
            table["model"],
            tuple(table["drafters"]),
            settings(EngineConfig, table["engine"]),
            tuple(_sample(sample) for sample in table["samples"]),
            settings(OnlineTrainingConfig, table["config"]),
        )


def _sample(table: Mapping[str, Any]) -> TrainingSample:
    rejected = {name: tuple(at) for name, at in table["rejected"].items()}
    return TrainingSample(**{**table, "tokens": tuple(table["tokens"]), "rejected": rejected})


def rejected_positions(rounds: Iterable[Round]) -> dict[str, tuple[int, ...]]:
    """For each drafter, the index of the last token before each draft of its own that was rejected.

    A draft that a stop condition cut off was not verified to its end, and does not count.
    """
    positions: defaultdict[str, list[int]] = defaultdict(list)
    for r in rounds:
        if len(r.tokens) <= len(r.path) or len(r.draft) == len(r.path):
            continue
        rejected = r.draft.children(r.path[-1] if r.path else ROOT)
        for name in {r.draft.sources[node] for node in rejected}:
            positions[name].append(r.start - 1)
    return {name: tuple(at) for name, at in positions.items()}
