"""From recorded conversations to the target's own answers: the data a drafter is trained on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from paceline import hub
from paceline.constraints import Compiler, OutputSpec
from paceline.errors import UsageError
from paceline.target.eager.target import placement
from paceline.target.weights.reader import load, open_checkpoint
from paceline.text import Tokenizer
from paceline.train.data.conversations import Source
from paceline.train.data.dataset import Answers
from paceline.train.data.plan import AnswersConfig, PlannedAnswer, plan_answers, select_prompts
from paceline.train.data.prompts import Prompt, Prompts, collect
from paceline.train.data.rollout import roll_out
from paceline.train.data.synthetic import synthesize
from paceline.train.train_decoder import TrainDecoder
from paceline.types import Cursor

JSON_CHARACTERS: Final = frozenset(b'{}[]:,"\\ \n\t-+.0123456789')

Progress = Callable[[str, int, int], None]  # what is being made, how many there are, how many there will be


@dataclass(frozen=True, slots=True)
class AnswerSet:
    answers: Answers
    prompts: Prompts  # what is answered, and what could not be used
    unanswered: int  # because their tools' schemas cannot be enforced


def make_answers(
    model: str,
    sources: Sequence[Source],
    config: AnswersConfig | None = None,
    progress: Progress | None = None,
) -> AnswerSet:
    """The answers of `model` to the prompts in `sources`; the same settings give the same answers.

    On a GPU they are written by DenseModel, hundreds at once; on a CPU by the engine.
    """
    config, progress = config or AnswersConfig(), progress or _silent
    path = hub.resolve(model)
    tokenizer = Tokenizer.load(path)
    longest = _longest(path, config)
    found = collect(tokenizer, sources, longest, config.held_out)
    found = replace(found, prompts=tuple(select_prompts(found.prompts, config)))
    if config.synthetic or config.synthetic_chats:
        found = _more(path, tokenizer, found, config, longest, progress)
    asks = plan_answers(found.prompts, config)
    if placement(config.engine)[0].type == "cpu":
        answers, unanswered = _served(model, asks, config, progress)
    else:
        answers, unanswered = rolled_out(path, tokenizer, asks, config, progress)
    return AnswerSet(answers, found, unanswered)


def _silent(what: str, done: int, of: int) -> None:
    return


def _longest(path: Path, config: AnswersConfig) -> int:
    room = open_checkpoint(path).shape.max_context - config.rollout.max_new
    if room < 1:
        raise UsageError(
            f"max_new={config.rollout.max_new} leaves no room for a prompt in the context of {path.name}"
        )
    return min(config.max_prompt, room)


def _more(
    path: Path, tokenizer: Tokenizer, found: Prompts, config: AnswersConfig, longest: int, progress: Progress
) -> Prompts:
    made = synthesize(
        _model(path, config),
        tokenizer,
        found.prompts,
        lambda prompt: config.synthetic if prompt.tools else config.synthetic_chats,
        config.rollout,
        longest,
        config.seed,
        partial(progress, "made-up requests"),
    )
    return replace(found, prompts=(*found.prompts, *made), synthetic=len(made))


def _model(path: Path, config: AnswersConfig) -> TrainDecoder:
    device, dtype = placement(config.engine)
    return TrainDecoder(load(path, dtype), device, dtype)


def rolled_out(
    path: Path, tokenizer: Tokenizer, asks: Sequence[PlannedAnswer], config: AnswersConfig, progress: Progress
) -> tuple[Answers, int]:
    """And how many could not be given. Tools that need not be called are left to the target, unenforced."""
    model = _model(path, config)
    compiler = Compiler(tokenizer, model.shape.vocab_size)
    jobs = [
        replace(ask.job, cursor=partial(_call, tokenizer, compiler, ask.prompt)) if ask.required else ask.job
        for ask in asks
    ]
    said = roll_out(model, jobs, sorted(tokenizer.eos_ids), config.rollout, partial(progress, "answers"))
    kept = [(ask, answer) for ask, answer in zip(asks, said, strict=True) if answer]
    return _answers(kept, tokenizer, model.shape.vocab_size, model.fingerprint), len(asks) - len(kept)


def _call(tokenizer: Tokenizer, compiler: Compiler, prompt: Prompt) -> Cursor:
    """At the start of an answer that must call one of the prompt's tools."""
    messages, tools = list(prompt.messages), list(prompt.tools)
    prompt_end = tokenizer.generation_prompt(tokenizer.render(messages, tools), messages, tools)
    constraint = OutputSpec(prompt.tools, "required").constraint(tokenizer.tool_format, prompt_end)
    assert constraint is not None
    return compiler.cursor(constraint)


def _served(
    name: str, asks: Sequence[PlannedAnswer], config: AnswersConfig, progress: Progress
) -> tuple[Answers, int]:
    from paceline.llm import LLM
    from paceline.train.data.via_engine import serve

    llm = LLM(name, config=config.engine)
    said = serve(llm, asks, config.rollout, partial(progress, "answers"))
    kept = [(ask, answer) for ask, answer in zip(asks, said, strict=True) if answer]
    made = _answers(kept, llm.tokenizer, llm.target.vocab_size, llm.target.fingerprint, enforced=True)
    return made, len(asks) - len(kept)


def _answers(
    answered: Sequence[tuple[PlannedAnswer, Sequence[int]]],
    tokenizer: Tokenizer,
    vocab_size: int,
    target: str,
    enforced: bool = False,
) -> Answers:
    """enforced: even a call that need not be made follows its grammar."""
    asks = [ask for ask, _ in answered]
    return Answers.of(
        [ask.prompt.tokens for ask in asks],
        [said for _, said in answered],
        sampled=[ask.job.sampled for ask in asks],
        held_out=[ask.prompt.held_out for ask in asks],
        constrained=[ask.required or (enforced and bool(ask.prompt.tools)) for ask in asks],
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
