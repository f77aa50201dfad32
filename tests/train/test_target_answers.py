"""From recorded conversations to answers of the real model, as it is served."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.config import EngineConfig
from paceline.errors import UsageError
from paceline.target.load import LoadPlan
from paceline.target.weights.reader import load
from paceline.text import Tokenizer, parse_tool_calls
from paceline.train.data import target_answers
from paceline.train.data.answer_plan import AnswersConfig, plan_answers, select_prompts
from paceline.train.data.prompts import Prompt
from paceline.train.data.rollout import Rollout
from paceline.train.data.target_answers import (
    GPU_BATCH,
    AnswerSet,
    always_drafted,
    answering_config,
    make_answers,
)
from support import tiny_gguf
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
    assert 140 < sum(ask.sampled for ask in whole) < 260
    assert 140 < sum(ask.required for ask in whole) < 260
    assert len({ask.seed for ask in whole}) == 400
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
    assert [ask.sampled for ask in asks] == [False, True, True] * 9
    assert len({ask.seed for ask in asks}) == 27


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


def test_on_a_gpu_many_answers_share_a_pass_and_the_cache_takes_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", "qwen2", kind="Q4_K")
    engine, free = EngineConfig("cuda", cache_mb=64), 2000 << 20
    plan = LoadPlan("cuda", "", weights=800 << 20, cache=64 << 20, other=200 << 20, token=1)
    planned_for: list[EngineConfig] = []

    def planned(path: Path, config: EngineConfig) -> LoadPlan:
        planned_for.append(config)
        return plan

    monkeypatch.setattr(target_answers, "plan_load", planned)
    monkeypatch.setattr(target_answers, "placement", lambda _: (torch.device("cuda"), torch.bfloat16))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))
    made = answering_config(path, engine)
    assert (made.max_batch, made.cache_mb) == (GPU_BATCH, int(0.6 * 1000))
    assert planned_for[0].max_batch == GPU_BATCH
    assert answering_config(path, replace(engine, max_batch=999, cache_mb=900)).cache_mb == 900
    assert answering_config(path, replace(engine, max_batch=999)).max_batch == 999
    monkeypatch.undo()
    assert answering_config(path, EngineConfig("cpu")) == EngineConfig("cpu")


@pytest.mark.model
def test_json_and_marks_can_always_be_drafted(smollm2_path: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_path)
    always = always_drafted(tokenizer)
    assert tokenizer.eos_ids <= set(always)
    assert set('{}[]:,"') <= {tokenizer.decode([token]) for token in always}
    assert np.all(np.diff(always) > 0)
    assert len(always) < 100
