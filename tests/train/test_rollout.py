"""Rollouts are what the engine answers, in the order of their jobs, whoever is answered beside them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, EngineConfig, SamplingParams, SpecConfig
from paceline.train.data import rollout
from paceline.train.data.prompts import Prompt
from paceline.train.data.rollout import Job, Rollout, roll_out
from support.models import some_tokens
from support.servers import toy_chat_model
from support.training import WEATHER, user

HOW = Rollout(max_new=24, temperature=30.0)  # the toy model is sure of itself
LENGTHS = (1, 30, 5, 17, 2, 9)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_chat_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(str(path), config=EngineConfig("cpu", cache_mb=64, max_batch=2))


def jobs(llm: LLM, sampled: bool) -> list[Job]:
    vocab = llm.target.vocab_size
    prompts = [Prompt(tuple(some_tokens(n, n, vocab)), False) for n in LENGTHS]
    return [Job(prompt, sampled, seed=2**60 + i) for i, prompt in enumerate(prompts)]


def alone(llm: LLM, job: Job) -> list[int]:
    """Without drafts, one at a time."""
    params = SamplingParams(max_tokens=HOW.max_new, seed=job.seed)
    if job.sampled:
        params = replace(params, temperature=HOW.temperature, top_p=HOW.top_p)
    return list(llm.generate(list(job.prompt.tokens), params, spec=SpecConfig(())).token_ids)


@pytest.mark.parametrize("ahead", [1, 4])
@pytest.mark.parametrize("sampled", [False, True])
def test_answers_are_those_of_the_engine_in_order(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, sampled: bool, ahead: int
) -> None:
    monkeypatch.setattr(rollout, "AHEAD", ahead)
    todo, seen = jobs(llm, sampled), list[tuple[int, int]]()
    answers = roll_out(llm, todo, HOW, lambda *at: seen.append(at))
    assert answers == [alone(llm, job) for job in todo]
    assert seen == [(i + 1, len(todo)) for i in range(len(todo))]
    assert len({tuple(answer) for answer in answers}) == len(todo)
    assert all(len(a) == HOW.max_new or a[-1] in llm.tokenizer.eos_ids for a in answers)


def test_answers_begin_while_the_oldest_is_being_written(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, start = list[Job](), rollout._start_stream

    def counted(llm: LLM, job: Job, how: Rollout) -> Any:
        begun.append(job)
        return start(llm, job, how)

    monkeypatch.setattr(rollout, "_start_stream", counted)
    monkeypatch.setattr(rollout, "AHEAD", 2)
    todo, seen = jobs(llm, sampled=True), list[int]()
    roll_out(llm, todo, HOW, lambda *_: seen.append(len(begun)))
    assert seen == [4, 5, 6, 6, 6, 6]
    assert begun == todo


def test_a_call_is_made_where_it_is_required_and_what_cannot_be_enforced_is_empty(llm: LLM) -> None:
    tokens = tuple(llm.encode([user("Rain in Oslo?")]).tokens)
    prompt = Prompt(tokens, False, (user("Rain in Oslo?"),), (WEATHER,))
    odd = replace(prompt, tools=({"type": "function", "function": {"name": "x", "parameters": {"type": 7}}},))
    todo = [Job(prompt, required=True), Job(odd, required=True), Job(prompt, required=False)]
    required, empty, free = roll_out(llm, todo, Rollout(max_new=40))
    assert "weather" in llm.tokenizer.decode(required)
    assert empty == []
    assert free != required
