"""From recorded conversations to the target's own answers: the data a drafter is trained on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from paceline import models
from paceline.errors import SettingError
from paceline.target.load import load, open_checkpoint
from paceline.target.torch_target import placement
from paceline.text import Tokenizer
from paceline.train.asks import AnswersConfig, Asked, asks_of
from paceline.train.conversations import Source
from paceline.train.dataset import Answers
from paceline.train.dense import DenseModel
from paceline.train.prompts import Prompts, collect
from paceline.train.rollout import roll_out

JSON_CHARACTERS: Final = frozenset(b'{}[]:,"\\ \n\t-+.0123456789')

Progress = Callable[[str, int, int], None]  # what is being made, how many there are, how many there will be


@dataclass(frozen=True, slots=True)
class Made:
    answers: Answers
    prompts: Prompts  # what is answered, and what could not be used
    unanswered: int  # because their tools' schemas cannot be enforced


def make_answers(
    model: str,
    sources: Sequence[Source],
    config: AnswersConfig | None = None,
    progress: Progress | None = None,
) -> Made:
    """The answers of `model` to the prompts in `sources`; the same settings give the same answers.

    On a GPU, free answers are written by DenseModel; all others by the engine, as they are served.
    """
    config, progress = config or AnswersConfig(), progress or _silent
    path = models.resolve(model)
    tokenizer = Tokenizer.load(path)
    found = collect(tokenizer, sources, _longest(path, config), config.held_out)
    asks = asks_of(found.prompts, config)
    device, _ = placement(config.engine)
    by_the_engine = [ask for ask in asks if ask.required or device.type == "cpu"]
    free = [] if device.type == "cpu" else [ask for ask in asks if not ask.required]
    parts: list[Answers] = []
    unanswered = 0
    if free:
        parts.append(_free(path, tokenizer, free, config, progress))
    if by_the_engine:
        served, unanswered = _served(model, by_the_engine, config, progress)
        parts.append(served)
    return Made(parts[0] if len(parts) == 1 else parts[0] + parts[1], found, unanswered)


def _silent(what: str, done: int, of: int) -> None:
    return


def _longest(path: Path, config: AnswersConfig) -> int:
    room = open_checkpoint(path).shape.max_context - config.rollout.max_new
    if room < 1:
        raise SettingError(
            f"max_new={config.rollout.max_new} leaves no room for a prompt in the context of {path.name}"
        )
    return min(config.max_prompt, room)


def _free(
    path: Path, tokenizer: Tokenizer, asks: Sequence[Asked], config: AnswersConfig, progress: Progress
) -> Answers:
    device, dtype = placement(config.engine)
    model = DenseModel(load(path, dtype), device, dtype)
    jobs = [ask.job for ask in asks]
    said = roll_out(model, jobs, sorted(tokenizer.eos_ids), config.rollout, partial(progress, "free answers"))
    return _answers(asks, said, tokenizer, model.shape.vocab_size, model.fingerprint)


def _served(
    name: str, asks: Sequence[Asked], config: AnswersConfig, progress: Progress
) -> tuple[Answers, int]:
    from paceline.llm import LLM
    from paceline.train.served import serve

    llm = LLM(name, config=config.engine)
    said = serve(llm, asks, config.rollout, partial(progress, "served answers"))
    kept = [(ask, answer) for ask, answer in zip(asks, said, strict=True) if answer is not None]
    made = _answers(
        [ask for ask, _ in kept],
        [answer for _, answer in kept],
        llm.tokenizer,
        llm.target.vocab_size,
        llm.target.fingerprint,
    )
    return made, len(asks) - len(kept)


def _answers(
    asks: Sequence[Asked], said: Sequence[Sequence[int]], tokenizer: Tokenizer, vocab_size: int, target: str
) -> Answers:
    return Answers.of(
        [ask.prompt.tokens for ask in asks],
        said,
        sampled=[ask.job.sampled for ask in asks],
        held_out=[ask.prompt.held_out for ask in asks],
        constrained=[ask.required for ask in asks],
        always=always_drafted(tokenizer),
        vocab_size=vocab_size,
        target=target,
        tokenizer=tokenizer.fingerprint,
    )


def always_drafted(tokenizer: Tokenizer) -> list[int]:
    """Tokens a drafter must be able to say: marks of the model's own, and what JSON is made of."""
    single = (
        token
        for token in range(tokenizer.vocab_size)
        if len(piece := tokenizer.piece(token)) == 1 and piece[0] in JSON_CHARACTERS
    )
    return sorted({*tokenizer.added, *tokenizer.eos_ids, *single})
