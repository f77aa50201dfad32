"""From recorded conversations to answers of the real model, as it is served."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.config import EngineConfig
from paceline.errors import UsageError
from paceline.llm import LLM
from paceline.target.weights.reader import load
from paceline.text import Tokenizer, parse_tool_calls
from paceline.train.data.answer_plan import AnswersConfig, plan_answers, select_prompts
from paceline.train.data.prompts import Prompt, collect
from paceline.train.data.rollout import Rollout
from paceline.train.data.target_answers import (
    AnswerSet,
    always_drafted,
    answer_all,
    make_answers,
    via_rollout,
)
from support.training import assistant, called, record, result, user, write

NEW = 24
CONFIG = AnswersConfig(required=0.5, greedy=0.5, rollout=Rollout(max_new=NEW), engine=EngineConfig("cpu"))


def prompts(count: int, tools: bool = True) -> list[Prompt]:
    return [
        Prompt((i, 1, 2), False, (user(str(i)),), ({},) if tools else (), called=True) for i in range(count)
    ]


def test_the_plan_depends_on_the_prompt_alone() -> None:
    whole, some = plan_answers(prompts(400), CONFIG), plan_answers(prompts(400)[100:], CONFIG)
    assert whole[100:] == some
    assert 140 < sum(ask.job.sampled for ask in whole) < 260
    assert 140 < sum(ask.required for ask in whole) < 260
    assert len({ask.job.seed for ask in whole}) == 400
    assert whole != plan_answers(prompts(400), AnswersConfig(required=0.5, greedy=0.5, seed=1))
    assert not any(ask.required for ask in plan_answers(prompts(50, tools=False), CONFIG))
    free = [replace(prompt, called=False) for prompt in prompts(50)]
    assert not any(ask.required for ask in plan_answers(free, CONFIG))
    calls = replace(CONFIG, only_calls=True)
    assert select_prompts([*free, *prompts(400)], calls) == prompts(400)
    with pytest.raises(UsageError, match="none of the recorded answers called a tool"):
        select_prompts(free, calls)


def test_a_prompt_answered_several_times_is_answered_greedily_once() -> None:
    asks = plan_answers(prompts(9), AnswersConfig(per_prompt=3, greedy=1.0))
    assert [ask.job.sampled for ask in asks] == [False, True, True] * 9
    assert len({ask.job.seed for ask in asks}) == 27


def test_fewer_prompts_are_some_of_them() -> None:
    few = select_prompts(prompts(100), AnswersConfig(max_prompts=10))
    assert len(few) == 10
    assert all(prompt in prompts(100) for prompt in few)
    assert few != select_prompts(prompts(100), AnswersConfig(max_prompts=10, seed=1))


def test_settings_out_of_range_are_refused() -> None:
    for wrong in ({"greedy": 1.5}, {"required": -1}, {"per_prompt": 0}, {"max_prompt": 0}):
        with pytest.raises(UsageError, match="is not usable"):
            AnswersConfig(**wrong)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    talks = [
        record(user(f"Weather in {town}?"), called(town), result("Rain."), assistant("It rains."), group=town)
        for town in ("Oslo", "Rome", "Lima", "Bonn")
    ]
    talks += [{"messages": [user(f"Count to {n}.")]} for n in ("three", "five")]
    return write(tmp_path_factory.mktemp("source") / "talks.jsonl", talks)


@pytest.fixture(scope="module")
def made(smollm2_path: Path, source: Path) -> AnswerSet:
    return make_answers("smollm2-135m", [source], CONFIG)


@pytest.mark.model
def test_answers_are_what_is_served(made: AnswerSet, smollm2_path: Path) -> None:
    tokenizer, answers = Tokenizer.load(smollm2_path), made.answers
    assert len(answers) == len(made.prompts.prompts) == 10
    assert made.unanswered == 0
    assert answers.tokenizer == tokenizer.fingerprint
    assert answers.target == load(smollm2_path).fingerprint
    asks = plan_answers(made.prompts.prompts, CONFIG)
    for i, prompt in enumerate(made.prompts.prompts):
        assert tuple(answers.prompt(i)) == prompt.tokens
        assert answers.held_out[i] == prompt.held_out
        assert 1 <= len(answers.answer(i)) <= NEW
        assert answers.constrained[i] == bool(prompt.tools)  # the engine lets no call be wrong
        if asks[i].required:
            text = tokenizer.decode(answers.answer(i).tolist())
            assert text.startswith('<tool_call>[{"name": "weather", "arguments": {"town": "')
            if text.endswith("</tool_call>"):
                assert parse_tool_calls(text, tokenizer.tool_format)[1][0].name == "weather"
    assert 0 < sum(ask.required for ask in asks) < 10
    assert 0 < answers.sampled.sum() < 10


@pytest.mark.model
def test_many_at_once_they_are_the_same_answers(source: Path, smollm2_path: Path) -> None:
    engine = EngineConfig("cpu", dtype="float32")
    config = AnswersConfig(required=1.0, rollout=Rollout(max_new=16, slots=2), engine=engine)
    tokenizer = Tokenizer.load(smollm2_path)
    asks = [ask for ask in plan_answers(collect(tokenizer, [source], 1024).prompts, config) if ask.required][
        :3
    ]
    asks += [replace(ask, prompt=replace(ask.prompt, tools=({"type": "function"},))) for ask in asks[:1]]
    rolled, unanswered = via_rollout(smollm2_path, tokenizer, asks, config, lambda *_: None)
    assert (len(rolled), unanswered) == (3, 1)
    assert rolled.constrained.all()
    served = answer_all(LLM("smollm2-135m", config=engine), asks[:3], config.rollout)
    assert [rolled.answer(i).tolist() for i in range(3)] == served


@pytest.mark.model
def test_json_and_marks_can_always_be_drafted(smollm2_path: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_path)
    always = always_drafted(tokenizer)
    assert tokenizer.eos_ids <= set(always)
    assert set('{}[]:,"') <= {tokenizer.decode([token]) for token in always}
    assert np.all(np.diff(always) > 0)
    assert len(always) < 100
