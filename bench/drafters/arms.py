"""The lists of drafters in the table: which exist here, their settings, and their memory."""

import gc
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import torch

from bench.own.suffix import resident
from paceline import LLM, EngineConfig, SpecConfig, hub
from paceline.drafters import model_free
from paceline.drafters.draft_model import DraftVocab, drafter_for
from paceline.errors import PacelineError
from paceline.loading import (
    TrainedHead,
    find_heads,
    head_drafters,
    layer_skip_drafter,
    quantized_drafter,
    read_heads,
)
from paceline.target.hardware import trim_heap
from paceline.target.load import load_target
from paceline.text import Tokenizer
from paceline.types import Drafter

PLAIN: Final = "none"
LEARNING: Final = ("ngram", "suffix", "recycle")  # no model, and no grammar
WIDE: Final = ("suffix", "recycle")  # of these, those that grow trees
WAYS: Final[dict[str, DraftVocab]] = {"tokens": "intersection", "text": "text"}  # of another tokenizer

Make = Callable[[], Drafter]


@dataclass(frozen=True)
class Arm:
    """One line of the table."""

    name: str
    drafters: tuple[str, ...]
    rows: int = 0  # drafted tokens of a tree at most; 0: a chain
    bound: bool = False  # drafts only where there is a grammar

    def goes_by(self, name: str) -> bool:
        """Its own name, or its drafters', as which `model` stands for every way to use one."""
        joined = "+".join(self.drafters)
        return name in (self.name, joined) or joined in [f"{name} by {way}" for way in WAYS]

    def spec(self, length: int, most: int, width: int, planned: bool) -> SpecConfig:
        """length: always so many drafted tokens; most: at most so many, where the controller plans them."""
        if self.name == PLAIN:
            return SpecConfig(self.drafters, max_draft=0)
        guesses = self.rows or (most if planned else length)
        return SpecConfig(self.drafters, guesses, width if self.rows else 1, adaptive=planned)


@dataclass
class Stock:
    """The drafters that hold weights, which all lines share; the others are made anew for each."""

    drafters: dict[str, Drafter] = field(default_factory=dict)
    mb: dict[str, float] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def every(self) -> dict[str, Drafter]:
        return {**model_free(), **self.drafters}

    def add(
        self, name: str, make: Make, use: Callable[[Mapping[str, Drafter], str], None], gpu: bool
    ) -> None:
        """Memory is what is held after a first short answer, beyond what was held before."""
        before = held(gpu)
        try:
            made = make()
        except PacelineError as reason:
            self.left_out.append(f"{name}: {reason}")
            return
        use({name: made}, name)
        self.mb[name] = max(0.0, (held(gpu) - before) / 2**20)
        if name not in model_free():
            self.drafters[name] = made

    def memory(self, arm: Arm) -> float:
        return sum(self.mb.get(name, 0.0) for name in arm.drafters)


def held(gpu: bool) -> int:
    """Bytes: of the GPU's memory, or resident."""
    gc.collect()
    if gpu:
        return torch.cuda.memory_allocated()
    trim_heap()
    return resident()


def heads(names: Sequence[str]) -> dict[str, TrainedHead]:
    """Trained drafters by what the table calls them: their kind, and their name where it has several."""
    found = [one for name in names for one in find_heads([name])]
    kinds = Counter(one.kind for one in found)
    named = {one.kind if kinds[one.kind] == 1 else f"{one.kind} {one.name}": one for one in found}
    if len(named) < len(found):
        raise SystemExit("two trained drafters of one kind have the same name: rename the folder of one")
    return named


def makers(
    llm: LLM, path: Path, config: EngineConfig, trained: Mapping[str, TrainedHead], draft_model: str | None
) -> dict[str, Make]:
    """Every drafter that could be made here, by the name the table gives it."""
    found: dict[str, Make] = {name: partial(model_free().__getitem__, name) for name in LEARNING}
    found |= {
        "self": partial(layer_skip_drafter, llm.target, llm.tokenizer),
        "quantized": partial(quantized_drafter, llm.target, path, config),
    }
    if draft_model is not None:
        found |= _draft_models(llm, draft_model, config)
    return found | {name: partial(_trained, llm, one, path, config) for name, one in trained.items()}


def _draft_models(llm: LLM, name: str, config: EngineConfig) -> dict[str, Make]:
    path = hub.resolve(name)
    tokenizer = Tokenizer.load(path)

    def make(way: DraftVocab) -> Drafter:
        model = load_target(path, config)
        return drafter_for(model, tokenizer, llm.tokenizer, llm.target.vocab_size, way)

    if tokenizer.fingerprint == llm.tokenizer.fingerprint:
        return {"model": partial(make, "auto")}
    return {f"model by {name}": partial(make, way) for name, way in WAYS.items()}


def _trained(llm: LLM, one: TrainedHead, path: Path, config: EngineConfig) -> Drafter:
    (drafter,) = head_drafters(llm.target, read_heads([one], path), config)
    return drafter


def arms(names: Collection[str], trained: Sequence[str], trees: Sequence[int]) -> list[Arm]:
    """Alone, joined, as the default lists, and as trees of so many tokens. trained: which of them are."""
    default = SpecConfig().drafters
    chains = [
        Arm(PLAIN, (PLAIN,)),
        Arm("grammar", ("grammar",), bound=True),
        *(Arm(name, (name,)) for name in names),
        *(Arm(f"suffix+{head}", ("suffix", head)) for head in trained),
        Arm("default", default),
        *(Arm(f"default+{head}", (*default, head)) for head in trained),
    ]
    wide = [arm for arm in chains if set(arm.drafters) <= {*WIDE, *trained}]
    return chains + [Arm(f"{arm.name}, trees of {n}", arm.drafters, n) for arm in wide for n in trees]


def select(every: Sequence[Arm], names: Sequence[str] | None) -> list[Arm]:
    """Those that go by these names, and plain decoding; None: all. A name that no line goes by ends it."""
    if names is None:
        return list(every)
    unknown = [name for name in names if not any(arm.goes_by(name) for arm in every)]
    if unknown or not names:
        known = ", ".join(arm.name for arm in every if not arm.rows)
        raise SystemExit(
            f"--drafters: there is no {' and no '.join(map(repr, unknown)) or 'name'}, but {known}; "
            "--draft-model and --trained add more"
        )
    return [arm for arm in every if any(map(arm.goes_by, (PLAIN, *names)))]
