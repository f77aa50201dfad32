"""Answers through the engine: what is served, tool grammars included. On a CPU the quicker way, too."""

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


def serve(
    llm: LLM, asks: Sequence[PlannedAnswer], how: Rollout, progress: Progress | None = None
) -> list[list[int] | None]:
    """The answers in order; None where the tools' schemas cannot be enforced."""
    answers: list[list[int] | None] = []
    waiting: Iterator[PlannedAnswer] = iter(asks)
    streams: deque[Stream | None] = deque()
    while len(answers) < len(asks):
        while len(streams) < AHEAD and (ask := next(waiting, None)) is not None:
            streams.append(_stream(llm, ask, how))
        stream = streams.popleft()
        answers.append(None if stream is None else _read(stream))
        if progress is not None:
            progress(len(answers), len(asks))
    return answers


def _read(stream: Stream) -> list[int] | None:
    try:
        return list(stream.read().token_ids)
    except ConstraintError:  # its grammar led nowhere
        return None


def _stream(llm: LLM, ask: PlannedAnswer, how: Rollout) -> Stream | None:
    params = SamplingParams(max_tokens=how.max_new, seed=ask.job.seed)
    if ask.job.sampled:
        params = replace(params, temperature=how.temperature, top_p=how.top_p)
    if not ask.prompt.tools:
        return llm.stream(list(ask.prompt.tokens), params)
    try:
        return llm.stream(
            list(ask.prompt.messages),
            params,
            tools=list(ask.prompt.tools),
            tool_choice="required" if ask.required else "auto",
        )
    except ConstraintError:
        return None
