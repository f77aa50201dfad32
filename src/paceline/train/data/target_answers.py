"""The target's own answers to recorded conversations: the training data (DistillSpec, arXiv 2310.08461)."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline import hub
from paceline.config import SamplingParams
from paceline.constraints import Answer, Compiler, OutputSpec
from paceline.errors import ConstraintError, UsageError
from paceline.target.eager.target import placement
from paceline.target.weights.reader import load, open_checkpoint
from paceline.text import Tokenizer
from paceline.train.data.answer_plan import AnswersConfig, PlannedAnswer, plan_answers, select_prompts
from paceline.train.data.conversations import Source
from paceline.train.data.dataset import Answers
from paceline.train.data.prompts import Prompt, Prompts, collect
from paceline.train.data.rollout import Rollout, roll_out
from paceline.train.data.synthetic import synthesize
from paceline.train.train_decoder import TrainDecoder
from paceline.types import Cursor

if TYPE_CHECKING:  # the engine's libraries are needed only where it writes the answers
    from paceline.llm import LLM
    from paceline.output import Stream

JSON_CHARACTERS: Final = frozenset(b'{}[]:,"\\ \n\t-+.0123456789')
AHEAD: Final = 64  # answers that the engine begins before the first of them is complete

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

    On a GPU TrainDecoder writes them, hundreds at once; on a CPU the engine does; or a vLLM server elsewhere.
    """
    config, progress = config or AnswersConfig(), progress or _no_progress
    path = hub.resolve(model)
    tokenizer = Tokenizer.load(path)
    longest = _longest(path, config)
    prompts = collect(tokenizer, sources, longest, config.held_out)
    prompts = replace(prompts, prompts=tuple(select_prompts(prompts.prompts, config)))
    if config.synthetic or config.synthetic_chats:
        prompts = _with_synthetic(path, tokenizer, prompts, config, longest, progress)
    planned = plan_answers(prompts.prompts, config)
    if config.answers_from:
        answers, unanswered = _via_server(path, tokenizer, planned, config, progress)
    elif placement(config.engine)[0].type == "cpu":
        answers, unanswered = _via_engine(model, planned, config, progress)
    else:
        answers, unanswered = via_rollout(path, tokenizer, planned, config, progress)
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


def _with_synthetic(
    path: Path,
    tokenizer: Tokenizer,
    prompts: Prompts,
    config: AnswersConfig,
    longest: int,
    progress: Progress,
) -> Prompts:
    made = synthesize(
        _model(path, config),
        tokenizer,
        prompts.prompts,
        lambda prompt: config.synthetic if prompt.tools else config.synthetic_chats,
        config.rollout,
        longest,
        config.seed,
        partial(progress, "synthetic requests"),
    )
    return replace(prompts, prompts=(*prompts.prompts, *made), synthetic=len(made))


def _model(path: Path, config: AnswersConfig) -> TrainDecoder:
    device, dtype = placement(config.engine)
    return TrainDecoder(load(path, dtype), device, dtype)


def via_rollout(
    path: Path,
    tokenizer: Tokenizer,
    planned: Sequence[PlannedAnswer],
    config: AnswersConfig,
    progress: Progress,
) -> tuple[Answers, int]:
    """The answers, and how many failed. Calls that are not required are not constrained either."""
    model = _model(path, config)
    compiler = Compiler(tokenizer, model.shape.vocab_size)
    jobs = [
        replace(plan.job, cursor=partial(_call, tokenizer, compiler, plan.prompt))
        if plan.required
        else plan.job
        for plan in planned
    ]
    outputs = roll_out(model, jobs, sorted(tokenizer.eos_ids), config.rollout, partial(progress, "answers"))
    answered = [(plan, answer) for plan, answer in zip(planned, outputs, strict=True) if answer]
    answers = _answers(answered, tokenizer, model.shape.vocab_size, model.fingerprint)
    return answers, len(planned) - len(answered)


def _call(tokenizer: Tokenizer, compiler: Compiler, prompt: Prompt) -> Cursor:
    """The cursor at the start of an answer that must call a tool."""
    messages, tools = list(prompt.messages), list(prompt.tools)
    prompt_end = tokenizer.generation_prompt(tokenizer.render(messages, tools), messages, tools)
    form = tokenizer.tool_format
    shape: Answer = "messages" if form.channels else "text"
    constraint = OutputSpec(prompt.tools, "required").constraint(form, prompt_end, shape)
    assert constraint is not None
    return compiler.cursor(constraint)


def _via_server(
    path: Path,
    tokenizer: Tokenizer,
    planned: Sequence[PlannedAnswer],
    config: AnswersConfig,
    progress: Progress,
) -> tuple[Answers, int]:
    """Nothing is constrained. The model here must be the server's: its hidden states are computed here."""
    from paceline.loading import model_fingerprint
    from paceline.train.data.server_answers import server_answers

    free = [replace(plan, required=False) for plan in planned]
    outputs = server_answers(
        config.answers_from, tokenizer, free, config.rollout, partial(progress, "answers")
    )
    vocab_size = open_checkpoint(path).shape.vocab_size
    answered = list(zip(free, outputs, strict=True))
    return _answers(answered, tokenizer, vocab_size, model_fingerprint(path)), 0


def _via_engine(
    name: str, planned: Sequence[PlannedAnswer], config: AnswersConfig, progress: Progress
) -> tuple[Answers, int]:
    from paceline.llm import LLM

    llm = LLM(name, config=config.engine)
    outputs = answer_all(llm, planned, config.rollout, partial(progress, "answers"))
    answered = [(plan, answer) for plan, answer in zip(planned, outputs, strict=True) if answer]
    answers = _answers(answered, llm.tokenizer, llm.target.vocab_size, llm.target.fingerprint, enforced=True)
    return answers, len(planned) - len(answered)


def answer_all(
    llm: "LLM",
    planned: Sequence[PlannedAnswer],
    rollout: Rollout,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[int] | None]:
    """The answers through the engine, in order; None where the tools' schemas cannot be enforced."""
    answers: list[list[int] | None] = []
    waiting: Iterator[PlannedAnswer] = iter(planned)
    streams: deque[Stream | None] = deque()
    while len(answers) < len(planned):
        while len(streams) < AHEAD and (plan := next(waiting, None)) is not None:
            streams.append(_start_stream(llm, plan, rollout))
        stream = streams.popleft()
        answers.append(None if stream is None else _read_stream(stream))
        if progress is not None:
            progress(len(answers), len(planned))
    return answers


def _read_stream(stream: "Stream") -> list[int] | None:
    try:
        return list(stream.read().token_ids)
    except ConstraintError:  # its grammar has no valid continuation
        return None


def _start_stream(llm: "LLM", plan: PlannedAnswer, rollout: Rollout) -> "Stream | None":
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


def _answers(
    answered: Sequence[tuple[PlannedAnswer, Sequence[int]]],
    tokenizer: Tokenizer,
    vocab_size: int,
    target: str,
    enforced: bool = False,
) -> Answers:
    """enforced: calls that are not required follow the grammar, too."""
    planned = [plan for plan, _ in answered]
    return Answers.of(
        [plan.prompt.tokens for plan in planned],
        [outputs for _, outputs in answered],
        sampled=[plan.job.sampled for plan in planned],
        held_out=[plan.prompt.held_out for plan in planned],
        constrained=[plan.required or (enforced and bool(plan.prompt.tools)) for plan in planned],
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
