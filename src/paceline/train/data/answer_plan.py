"""The plan of answers: which prompts, greedy or sampled, free or under the tools' grammar."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.config import EngineConfig, require_between, require_min
from paceline.errors import UsageError
from paceline.train.data.held_out import SHARE
from paceline.train.data.prompts import Prompt
from paceline.train.data.rollout import Job, Rollout


@dataclass(frozen=True, slots=True)
class AnswersConfig:
    """Which answers the target writes, and how."""

    max_prompt: int = 3072  # tokens; longer prompts lose their oldest messages
    max_prompts: int = 0  # recorded ones; 0: all
    synthetic: int = 0  # further requests for each one recorded with tools, written by the target
    synthetic_chats: int = 0  # the same for requests without tools
    per_prompt: int = 1  # answers; all but the first are sampled
    greedy: float = 0.7  # share of the first answers that are greedy; the others are sampled
    required: float = (
        0.8  # share of the prompts whose recorded answer called a tool that must do so again, by grammar
    )
    only_calls: bool = False  # only prompts whose recorded answer called a tool
    held_out: float = SHARE  # of the conversations
    answers_from: str = ""  # URL of a vLLM server that writes them; "": written here
    seed: int = 0
    rollout: Rollout = field(default_factory=Rollout)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        require_between(self, 0, 1, "greedy", "required", "held_out")
        require_between(self, 0, 2**32 - 1, "seed")
        require_min(self, max_prompt=1, max_prompts=0, synthetic=0, synthetic_chats=0, per_prompt=1)


def select_prompts(prompts: Sequence[Prompt], config: AnswersConfig) -> list[Prompt]:
    """The recorded prompts that are answered."""
    selected = [prompt for prompt in prompts if prompt.called or not config.only_calls]
    if not selected:
        raise UsageError("only_calls=True leaves no prompt: none of the recorded answers called a tool")
    if config.max_prompts:
        selected = sorted(selected, key=lambda prompt: _coins(prompt, config.seed, 0)[0])[
            : config.max_prompts
        ]
    return selected


def plan_answers(prompts: Sequence[Prompt], config: AnswersConfig) -> list[Job]:
    """The plan for a prompt depends on the prompt and the seed, not on other prompts."""
    return [answer for prompt in prompts for answer in _planned(prompt, config)]


def _planned(prompt: Prompt, config: AnswersConfig) -> Iterator[Job]:
    _, greedy, required = _coins(prompt, config.seed, 0)
    for nth in range(config.per_prompt):
        sampled = nth > 0 or greedy >= config.greedy
        must_call = prompt.called and bool(prompt.tools) and required < config.required
        yield Job(prompt, sampled, int(_coins(prompt, config.seed, nth + 1)[0] * 2**63), must_call)


def _coins(prompt: Prompt, seed: int, nth: int) -> tuple[float, float, float]:
    """Three uniform numbers in [0, 1)."""
    text = np.asarray((seed, nth, *prompt.tokens), "<i8").tobytes()
    digest = hashlib.sha256(text).digest()
    first, second, third = (int.from_bytes(digest[i : i + 6]) / 2**48 for i in (0, 8, 16))
    return first, second, third
