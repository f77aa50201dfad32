"""The target's own answers to recorded conversations: the training data (DistillSpec, arXiv 2310.08461)."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from paceline import hub
from paceline.config import EngineConfig
from paceline.errors import UsageError
from paceline.target.eager.target import placement
from paceline.target.load import plan_load
from paceline.target.weights.reader import open_checkpoint
from paceline.text import Tokenizer
from paceline.train.data.answer_plan import AnswersConfig, plan_answers, select_prompts
from paceline.train.data.conversations import Source
from paceline.train.data.dataset import Answers
from paceline.train.data.prompts import Prompts, collect
from paceline.train.data.rollout import Job, roll_out
from paceline.train.data.synthetic import synthesize

if TYPE_CHECKING:  # the engine's libraries are needed only where it writes the answers
    from paceline.llm import LLM

JSON_CHARACTERS: Final = frozenset(b'{}[]:,"\\ \n\t-+.0123456789')
GPU_BATCH: Final = 256  # answers in one pass
FREE_SHARE: Final = 0.6  # of a GPU's free memory that the cache may take
MAX_CACHE_MB: Final = 40_000

Progress = Callable[[str, int, int], None]  # stage, done, total


@dataclass(frozen=True, slots=True)
class AnswerSet:
    answers: Answers
    prompts: Prompts  # the prompts answered, and the unusable ones
    unanswered: int  # their tools' schemas cannot be enforced


def make_answers(
    model: str,
    sources: Sequence[Source],
    config: AnswersConfig | None = None,
    progress: Progress | None = None,
) -> AnswerSet:
    """The answers of `model` to the prompts in `sources`; the same settings give the same answers.

    The engine writes them, on a GPU many at once; or a vLLM server elsewhere.
    """
    config, progress = config or AnswersConfig(), progress or _no_progress
    path = hub.resolve(model)
    tokenizer = Tokenizer.load(path)
    longest = _longest(path, config)
    prompts = collect(tokenizer, sources, longest, config.held_out)
    prompts = replace(prompts, prompts=tuple(select_prompts(prompts.prompts, config)))
    load = cache(partial(_load, model, path, config.engine))
    if config.synthetic or config.synthetic_chats:
        prompts = _with_synthetic(load(), prompts, config, longest, progress)
    jobs = plan_answers(prompts.prompts, config)
    if config.answers_from:
        answers, unanswered = _via_server(path, tokenizer, jobs, config, progress)
    else:
        answers, unanswered = _via_engine(load(), jobs, config, progress)
    load.cache_clear()
    gc.collect()  # the model's memory is free before training needs it
    return AnswerSet(answers, prompts, unanswered)


def _no_progress(what: str, done: int, of: int) -> None:
    return


def _longest(path: Path, config: AnswersConfig) -> int:
    room = open_checkpoint(path).shape.max_context - config.rollout.max_new
    if room < 1:
        raise UsageError(
            f"max_new={config.rollout.max_new} leaves no room for a prompt in the context of {path.name}"
        )
    return min(config.max_prompt, room)


def _load(name: str, path: Path, config: EngineConfig) -> "LLM":
    from paceline.llm import LLM

    return LLM(name, config=answering_config(path, config))


def answering_config(path: Path, config: EngineConfig) -> EngineConfig:
    """On a GPU many answers at once, and a cache for them; on a CPU as it is."""
    device, _ = placement(config)
    if device.type != "cuda":
        return config
    free, _ = torch.cuda.mem_get_info(device)
    config = replace(config, max_batch=max(config.max_batch, GPU_BATCH))
    planned = plan_load(path, config)
    room_mb = int(FREE_SHARE * (free - planned.weights - planned.other)) >> 20
    return replace(config, cache_mb=max(config.cache_mb, min(MAX_CACHE_MB, room_mb)))


def _with_synthetic(
    llm: "LLM", prompts: Prompts, config: AnswersConfig, longest: int, progress: Progress
) -> Prompts:
    made = synthesize(
        llm,
        prompts.prompts,
        lambda prompt: config.synthetic if prompt.tools else config.synthetic_chats,
        config.rollout,
        longest,
        config.seed,
        partial(progress, "synthetic requests"),
    )
    return replace(prompts, prompts=(*prompts.prompts, *made), synthetic=len(made))


def _via_server(
    path: Path,
    tokenizer: Tokenizer,
    jobs: Sequence[Job],
    config: AnswersConfig,
    progress: Progress,
) -> tuple[Answers, int]:
    """Nothing is constrained. The model here must be the server's: its hidden states are computed here."""
    from paceline.loading import model_fingerprint
    from paceline.train.data.server_answers import server_answers

    free = [replace(job, required=False) for job in jobs]
    outputs = server_answers(
        config.answers_from, tokenizer, free, config.rollout, partial(progress, "answers")
    )
    vocab_size = open_checkpoint(path).shape.vocab_size
    answered = list(zip(free, outputs, strict=True))
    return _answers(answered, tokenizer, vocab_size, model_fingerprint(path)), 0


def _via_engine(
    llm: "LLM", jobs: Sequence[Job], config: AnswersConfig, progress: Progress
) -> tuple[Answers, int]:
    """The answers, and how many failed."""
    outputs = roll_out(llm, jobs, config.rollout, partial(progress, "answers"))
    answered = [(job, answer) for job, answer in zip(jobs, outputs, strict=True) if answer]
    answers = _answers(answered, llm.tokenizer, llm.target.vocab_size, llm.target.fingerprint, enforced=True)
    return answers, len(jobs) - len(answered)


def _answers(
    answered: Sequence[tuple[Job, Sequence[int]]],
    tokenizer: Tokenizer,
    vocab_size: int,
    target: str,
    enforced: bool = False,
) -> Answers:
    """enforced: calls that are not required follow the grammar, too."""
    jobs = [job for job, _ in answered]
    return Answers.of(
        [job.prompt.tokens for job in jobs],
        [outputs for _, outputs in answered],
        sampled=[job.sampled for job in jobs],
        held_out=[job.prompt.held_out for job in jobs],
        constrained=[job.required or (enforced and bool(job.prompt.tools)) for job in jobs],
        always=always_drafted(tokenizer),
        vocab_size=vocab_size,
        target=target,
        tokenizer=tokenizer.fingerprint,
    )


def always_drafted(tokenizer: Tokenizer) -> list[int]:
    """Tokens of every draft vocabulary: special tokens and single JSON characters."""
    single = (
        token
        for token in range(tokenizer.vocab_size)
        if len(piece := tokenizer.piece(token)) == 1 and piece[0] in JSON_CHARACTERS
    )
    return sorted({*tokenizer.added, *tokenizer.eos_ids, *single})
