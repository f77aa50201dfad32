"""Rollouts: answers of the target through the engine, as it serves them."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from paceline.config import SamplingParams, require_min
from paceline.errors import ConstraintError
from paceline.train.data.prompts import Prompt

if TYPE_CHECKING:  # the engine's libraries are needed only where it writes the answers
    from paceline.llm import LLM
    from paceline.output import Stream

AHEAD: Final = 4  # answers begun before the oldest of them is complete, for each place in a pass

Progress = Callable[[int, int], None]  # answers done, answers in total


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to be written."""

    prompt: Prompt
    sampled: bool = False  # False: greedy
    seed: int = 0  # of its noise; below 2**63
    required: bool = False  # it must call a tool


@dataclass(frozen=True, slots=True)
class Rollout:
    """How long answers are, and how they are sampled."""

    max_new: int = 384  # tokens of an answer
    temperature: float = 0.7  # of sampled answers
    top_p: float = 0.9

    def __post_init__(self) -> None:
        require_min(self, max_new=1)


def roll_out(
    llm: "LLM", jobs: Sequence[Job], how: Rollout, progress: Progress | None = None
) -> list[list[int]]:
    """The answers in the order of their jobs, each with the token that ended it, if any did.

    An answer is empty where its tools' schemas cannot be enforced or leave no valid continuation.
    """
    answers: list[list[int]] = []
    waiting: Iterator[Job] = iter(jobs)
    streams: deque[Stream | None] = deque()
    ahead = AHEAD * llm.engine.config.max_batch
    while len(answers) < len(jobs):
        while len(streams) < ahead and (job := next(waiting, None)) is not None:
            streams.append(_start_stream(llm, job, how))
        stream = streams.popleft()
        answers.append([] if stream is None else _read_stream(stream))
        if progress is not None:
            progress(len(answers), len(jobs))
    return answers


def _start_stream(llm: "LLM", job: Job, how: Rollout) -> "Stream | None":
    params, prompt = SamplingParams(max_tokens=how.max_new, seed=job.seed), job.prompt
    if job.sampled:
        params = replace(params, temperature=how.temperature, top_p=how.top_p)
    if not prompt.tools:
        return llm.stream(list(prompt.tokens), params)
    choice = "required" if job.required else "auto"
    try:
        return llm.stream(list(prompt.messages), params, tools=list(prompt.tools), tool_choice=choice)
    except ConstraintError:
        return None


def _read_stream(stream: "Stream") -> list[int]:
    try:
        return list(stream.read().token_ids)
    except ConstraintError:  # its grammar has no valid continuation
        return []
