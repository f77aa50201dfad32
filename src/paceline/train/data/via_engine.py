"""Answers through the engine, tool grammars included: on a CPU faster than rollouts."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from paceline.config import SamplingParams
from paceline.errors import ConstraintError
from paceline.llm import LLM
from paceline.output import Stream
from paceline.train.data.plan import PlannedAnswer
from paceline.train.data.rollout import Progress, Rollout

AHEAD: Final = 64  # answers begun before the first of them is complete


def answer_all(
    llm: LLM, planned: Sequence[PlannedAnswer], rollout: Rollout, progress: Progress | None = None
) -> list[list[int] | None]:
    """The answers in order; None where the tools' schemas cannot be enforced."""
    answers: list[list[int] | None] = []
    waiting: Iterator[PlannedAnswer] = iter(planned)
    streams: deque[Stream | None] = deque()
    while len(answers) < len(planned):
        while len(streams) < AHEAD and (plan := next(waiting, None)) is not None:
            streams.append(_stream(llm, plan, rollout))
        stream = streams.popleft()
        answers.append(None if stream is None else _read(stream))
        if progress is not None:
            progress(len(answers), len(planned))
    return answers


def _read(stream: Stream) -> list[int] | None:
    try:
        return list(stream.read().token_ids)
    except ConstraintError:  # its grammar has no valid continuation
        return None


def _stream(llm: LLM, plan: PlannedAnswer, rollout: Rollout) -> Stream | None:
    params = SamplingParams(max_tokens=rollout.max_new, seed=plan.job.seed)
    if plan.job.sampled:
        params = replace(params, temperature=rollout.temperature, top_p=rollout.top_p)
    if not plan.prompt.tools:
        return llm.stream(list(plan.prompt.tokens), params)
    try:
        return llm.stream(
            list(plan.prompt.messages),
            params,
            tools=list(plan.prompt.tools),
            tool_choice="required" if plan.required else "auto",
        )
    except ConstraintError:
        return None
