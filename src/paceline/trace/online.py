"""Texts that were served and where guesses in them went wrong: what a drafter goes on learning from."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from paceline.config import EngineConfig, LearnConfig, settings
from paceline.types import ROOT, Round

LEAST: Final = 2  # tokens of an answer that can be learned from: one to guess from, one to guess


@dataclass(frozen=True, slots=True)
class TrainingSample:
    tokens: tuple[int, ...]  # prompt and answer
    prompt_len: int
    wrong: Mapping[
        str, tuple[int, ...]
    ]  # drafter -> the last tokens before each draft of its that was refused
    opening: str  # the first thing the user said: all turns of a conversation share it
    constrained: bool = False  # a grammar chose, too

    def first(self, most: int) -> "TrainingSample":
        """Its first `most` tokens."""
        wrong = {name: tuple(at for at in places if at < most) for name, places in self.wrong.items()}
        return replace(self, tokens=self.tokens[:most], wrong=wrong)

    @property
    def answered(self) -> int:
        return len(self.tokens) - self.prompt_len


@dataclass(frozen=True, slots=True)
class RefreshJob:
    """All that a process needs that goes on training drafters."""

    model: str  # its path
    drafters: tuple[str, ...]  # folders
    engine: EngineConfig
    texts: tuple[TrainingSample, ...]  # oldest first
    config: LearnConfig = field(default_factory=LearnConfig)

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, given: bytes) -> "RefreshJob":
        table: dict[str, Any] = json.loads(given)
        return cls(
            table["model"],
            tuple(table["drafters"]),
            settings(EngineConfig, table["engine"]),
            tuple(_text(text) for text in table["texts"]),
            settings(LearnConfig, table["config"]),
        )


def _text(table: Mapping[str, Any]) -> TrainingSample:
    wrong = {name: tuple(places) for name, places in table["wrong"].items()}
    return TrainingSample(**{**table, "tokens": tuple(table["tokens"]), "wrong": wrong})


def wrong_places(rounds: Iterable[Round]) -> dict[str, tuple[int, ...]]:
    """Who was refused, and after which token each such draft began. What a stop cut off was not judged."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for r in rounds:
        if len(r.tokens) <= len(r.path) or len(r.draft) == len(r.path):
            continue
        refused = r.draft.children(r.path[-1] if r.path else ROOT)
        for name in {r.draft.sources[node] for node in refused}:
            found[name].append(r.start - 1)
    return {name: tuple(places) for name, places in found.items()}
