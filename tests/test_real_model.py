"""The promise on the real SmolLM2: speculative text is plain text."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, EngineConfig, SpecConfig
from paceline.errors import PromptTooLong, UsageError
from paceline.types import TARGET

pytestmark = pytest.mark.model

PLAIN = SpecConfig(("none",), max_draft=0)
PROMPT = 'Copy: {"name": "get_weather", "city": "Oslo"}\n{"name": "get_weather", "city": "Oslo"}\n{"name":'
TOKENS = 32


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return LLM("smollm2-135m", config=EngineConfig(cache_mb=256))


@pytest.fixture(scope="module")
def self_drafting(smollm2_path: Path) -> LLM:
    """The model as its own draft model: the hardest test of the shared noise and of the drafter's cache."""
    return LLM("smollm2-135m", draft_model="smollm2-135m", config=EngineConfig(cache_mb=128))


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T=0.8": {"temperature": 0.8},
    "T=0.8 top-p": {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
    "penalties": {"temperature": 0.6, "repetition_penalty": 1.2, "presence_penalty": 0.5},
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("width", [1, 2])
def test_speculative_text_is_plain_text(llm: LLM, sampling: str, width: int) -> None:
    options: dict[str, Any] = {"seed": 7, "max_tokens": TOKENS, "ignore_eos": True, **SAMPLINGS[sampling]}
    plain = llm.generate(PROMPT, spec=PLAIN, tenant="plain", **options)
    for drafters in (("suffix",), ("ngram",), ("recycle",), ("suffix", "ngram")):
        spec = SpecConfig(drafters, tree_width=width, adaptive=False)
        fast = llm.generate(PROMPT, spec=spec, tenant="+".join(drafters), **options)
        assert fast.token_ids == plain.token_ids
        assert fast.text == plain.text


def test_drafts_are_accepted_where_text_repeats(llm: LLM) -> None:
    plain = llm.generate(PROMPT, spec=PLAIN, tenant="p", max_tokens=TOKENS, seed=1)
    fast = llm.generate(PROMPT, spec=SpecConfig(adaptive=False), tenant="f", max_tokens=TOKENS, seed=1)
    assert fast.token_ids == plain.token_ids
    assert fast.passes < plain.passes / 2
    assert fast.sources.count(TARGET) < len(fast.sources)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_prediction_of_the_answer_itself_is_accepted_whole(llm: LLM, temperature: float) -> None:
    options: dict[str, Any] = {
        "seed": 5,
        "max_tokens": TOKENS,
        "temperature": temperature,
        "ignore_eos": True,
    }
    plain = llm.generate("Once upon a time", spec=PLAIN, **options)
    spec = SpecConfig(("prediction",), adaptive=False)
    fast = llm.generate("Once upon a time", spec=spec, prediction=plain.text, **options)
    assert fast.token_ids == plain.token_ids
    assert fast.passes <= TOKENS // 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_drafting_for_itself_is_always_right(self_drafting: LLM, temperature: float) -> None:
    options: dict[str, Any] = {"seed": 3, "max_tokens": 24, "temperature": temperature, "ignore_eos": True}
    plain = self_drafting.generate("The sea was", spec=PLAIN, **options)
    spec = SpecConfig(("model",), max_draft=5, adaptive=False)
    fast = self_drafting.generate("The sea was", spec=spec, **options)
    assert fast.token_ids == plain.token_ids
    assert fast.accepted["model"] == fast.drafted["model"]
    tree = self_drafting.generate("The sea was", spec=replace(spec, tree_width=2), **options)
    assert tree.token_ids == plain.token_ids


def test_several_at_once_write_what_each_writes_alone(llm: LLM) -> None:
    prompts = [PROMPT, "Once upon a time", "def add(a, b):"]
    options: dict[str, Any] = {"seed": 2, "temperature": 0.7, "max_tokens": 16, "ignore_eos": True}
    alone = [llm.generate(p, tenant=f"a{i}", **options).token_ids for i, p in enumerate(prompts)]
    together = llm.batch(prompts, tenant="b", **options)
    assert [r.token_ids for r in together] == alone


def test_a_conversation_pays_only_for_what_is_new(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Say hello in French, please. " * 8}]
    first = llm.generate(messages, max_tokens=12, tenant="talk", seed=0)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And in German?"}]
    second = llm.generate(messages, max_tokens=4, tenant="talk", seed=0)
    assert second.cached_tokens >= first.prompt_tokens
    stranger = llm.generate(messages, max_tokens=4, tenant="stranger", seed=0)
    assert stranger.cached_tokens == 0
    assert stranger.prompt_tokens == second.prompt_tokens


@pytest.mark.parametrize("spec", [PLAIN, SpecConfig(("prediction",), adaptive=False)], ids=["plain", "fast"])
def test_stop_strings_cut_the_text(llm: LLM, spec: SpecConfig) -> None:
    free = llm.generate("Once upon a time", max_tokens=TOKENS, seed=0)
    stop = free.text[20:24]
    options: dict[str, Any] = {"max_tokens": TOKENS, "seed": 0, "spec": spec, "prediction": free.text}
    cut = llm.generate("Once upon a time", stop=(stop,), **options)
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.finish == "stop"


def test_logprobs_are_the_same(llm: LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 16, "seed": 0, "logprobs": 2, "ignore_eos": True}
    plain = llm.generate(PROMPT, spec=PLAIN, tenant="lp1", **options)
    fast = llm.generate(PROMPT, spec=SpecConfig(adaptive=False), tenant="lp2", **options)
    assert fast.logprobs == plain.logprobs
    assert [p.token for p in plain.logprobs] == list(plain.token_ids)


def test_pieces_tell_text_and_source(llm: LLM) -> None:
    stream = llm.stream(PROMPT, max_tokens=TOKENS, seed=0)
    pieces = list(stream)
    assert "".join(p.text for p in pieces) == stream.result.text
    assert tuple(p.token_id for p in pieces) == stream.result.token_ids
    assert {p.source for p in pieces} > {TARGET}


def test_an_abandoned_stream_is_cancelled(llm: LLM) -> None:
    stream = llm.stream(PROMPT, max_tokens=100, seed=0)
    next(stream)
    del stream
    assert not llm.engine.busy


def test_bad_requests_are_refused_and_break_nothing(llm: LLM) -> None:
    with pytest.raises(UsageError, match="temprature"):
        llm.generate("x", temprature=1)
    with pytest.raises(UsageError, match="empty"):
        llm.generate("")
    with pytest.raises(UsageError, match="'sufix'"):
        llm.generate("x", spec=SpecConfig(("sufix",)))
    with pytest.raises(PromptTooLong, match="shorten"):
        llm.generate("word " * 9000)
    assert not llm.engine.busy
    assert llm.generate("Hello", max_tokens=2, seed=0).token_ids
