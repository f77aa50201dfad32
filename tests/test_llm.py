"""The Python API: seeds, memory, and how often a request's conversation is rendered."""

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, EngineConfig, SamplingParams, Seq, Tool
from paceline.constraints import Choice, OutputSpec
from paceline.errors import ConstraintError, PromptTooLong, SettingError
from paceline.target.cost import CostMonitor
from paceline.text.chat_template import ChatTemplate
from paceline.types import Round
from support.servers import toy_chat_model

CHAT = [{"role": "user", "content": "What is the weather in Oslo?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def llm(smollm2_path: object) -> LLM:
    return LLM("smollm2-135m")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path: Path = toy_chat_model(tmp_path_factory.mktemp("toy"))
    return LLM(str(path), config=EngineConfig("cpu", cache_mb=64, max_model_len=512))


def test_a_model_is_freed_once_nobody_holds_it(tmp_path: Path) -> None:
    """Without the garbage collector: a cycle would keep gigabytes, and pages that wait for the disk."""
    model = LLM(str(toy_chat_model(tmp_path)), config=EngineConfig("cpu", cache_mb=64, max_model_len=512))
    model.generate("one two", max_tokens=2, ignore_eos=True)
    engine = weakref.ref(model.engine)
    gc.disable()
    try:
        del model
        assert engine() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("prompt", [None, 7, "", []])
def test_a_prompt_that_is_none_is_a_setting_error(toy: LLM, prompt: Any) -> None:
    with pytest.raises(SettingError, match="expected a text, a list of messages or a list of tokens"):
        toy.generate(prompt)


def test_a_batch_of_one_text_is_an_error(toy: LLM) -> None:
    with pytest.raises(SettingError, match="a list of prompts; for one prompt use generate"):
        toy.batch("abc")


def test_a_closed_stream_has_no_further_piece(toy: LLM) -> None:
    stream = toy.stream("abc", output=Choice(("a b c d e f g h",)))
    next(stream)
    while not stream._queue.pieces:  # a pass accepts several tokens that the grammar forces
        next(stream)
    stream.close()
    assert list(stream) == []


def test_a_context_limited_by_a_setting_is_called_by_its_name(toy: LLM) -> None:
    for prompt in ("a b c d " * 240, [5] * 512):
        with pytest.raises(PromptTooLong, match="max_model_len is 512, one of them for the answer"):
            toy.generate(prompt)


def weather(city: str) -> str:
    """The weather."""
    return city


def test_functions_may_stand_for_tools(toy: LLM) -> None:
    tools: list[Any] = [weather, Tool(weather).schema]
    first, second = (toy.request(CHAT, tools=[tool], tool_choice="required", seed=1) for tool in tools)
    assert first.seq.tokens == second.seq.tokens
    assert toy.prefill(CHAT, tools=[weather]).prompt_tokens > toy.prefill(CHAT).prompt_tokens
    with pytest.raises(ConstraintError, match=r"tools: .* is no tool: expected a function"):
        toy.stream(CHAT, tools=["weather"])  # type: ignore[list-item]


def test_a_request_that_is_prepared_has_not_begun(toy: LLM) -> None:
    assert toy.request("abc", seed=1).seq.prompt_len > 0
    assert not toy.engine.busy


@pytest.mark.model
def test_its_passes_are_compared_with_the_cost_table(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Round] = []
    monkeypatch.setattr(CostMonitor, "round", lambda _, r: compared.append(r))
    tokens = llm.generate("Once upon a time", max_tokens=4).token_ids
    assert [token for r in compared for token in r.tokens] == list(tokens)


@pytest.mark.model
def test_a_request_without_a_seed_draws_one_and_reports_it(llm: LLM) -> None:
    """However its parameters are given."""
    for params, keywords in (
        (SamplingParams(temperature=1.0, max_tokens=8), {}),
        (None, {"temperature": 1.0, "max_tokens": 8}),
        (SamplingParams(temperature=1.0, max_tokens=8, seed=5), {"seed": None}),
    ):
        first, second = (llm.generate("Once upon a time", params, **keywords) for _ in range(2))
        assert first.seed != second.seed
        again = llm.generate("Once upon a time", temperature=1.0, max_tokens=8, seed=second.seed)
        assert again.token_ids == second.token_ids
        assert again.seed == second.seed


@pytest.mark.model
def test_every_answer_of_a_batch_has_a_seed_of_its_own(llm: LLM) -> None:
    results = llm.batch(["Once upon a time"] * 4, SamplingParams(temperature=1.0, max_tokens=8))
    assert len({result.seed for result in results}) == 4
    assert len({result.token_ids for result in results}) > 1


@pytest.mark.model
def test_seed_0_is_a_seed(llm: LLM) -> None:
    for params, keywords in (
        (SamplingParams(seed=0, max_tokens=2), {}),
        (None, {"seed": 0, "max_tokens": 2}),
    ):
        assert llm.generate("Once", params, **keywords).seed == 0


@pytest.mark.model
def test_a_conversation_with_tools_is_rendered_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[Any] = []
    real = ChatTemplate.render

    def counted(self: ChatTemplate, messages: Any, *rest: Any) -> str:
        rendered.append(messages)
        return real(self, messages, *rest)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    for requests in range(1, 4):
        llm.prepare(CHAT, SamplingParams(), output_spec())
        assert rendered.count(CHAT) == requests
    assert len(rendered) == 3 + 2  # two of the probe, once for each kind of request


@pytest.mark.model
def test_a_further_choice_shares_the_prompt_and_has_a_state_of_its_own(llm: LLM) -> None:
    params = SamplingParams(seed=3, stop=("x",))
    first = llm.prepare(CHAT, params, output_spec())
    other = llm.another_choice(first, 1)
    assert other.seq.id != first.seq.id
    assert other.seq.params == SamplingParams(seed=3, stop=("x",), choice=1)
    assert other.seq.tokens == first.seq.tokens
    for mine, theirs in (
        (other.seq.tokens, first.seq.tokens),
        (other.seq.cursor, first.seq.cursor),
        (other.seq.stopped_by, first.seq.stopped_by),
        (other.detokenizer, first.detokenizer),
    ):
        assert mine is not None
        assert mine is not theirs


@pytest.mark.model
def test_a_further_choice_has_a_matcher_of_its_own(llm: LLM) -> None:
    """Where the first mask is slow, those of the choices are computed in several threads."""
    first = llm.prepare(CHAT, SamplingParams(), OutputSpec(output=re.compile("ab+")))
    cursors: list[Any] = [first.seq.cursor, llm.another_choice(first, 1).seq.cursor]
    assert cursors[0]._matcher is not cursors[1]._matcher


def output_spec() -> Any:
    return OutputSpec((TOOL,), "required")


@pytest.mark.model
def test_remember_has_an_old_name(llm: LLM) -> None:
    assert llm.prepare("x", SamplingParams(), remember=False).seq.remember is False
    with pytest.warns(DeprecationWarning, match="learn is now called remember") as warned:
        llm.stream("x", max_tokens=1, learn=False).close()
    assert warned[0].filename == __file__


def test_drafters_may_still_read_the_old_name() -> None:
    with pytest.warns(DeprecationWarning, match="Seq.learn is now called Seq.remember"):
        assert Seq("a", [1], 1, remember=False).learn is False


def test_a_prefill_reads_the_beginning_that_the_next_turn_has(toy: LLM) -> None:
    system = {"role": "system", "content": "Answer with one word, in the language of the question."}
    read = toy.prefill([system], tenant="prefill")
    assert (read.text, read.token_ids, read.finish) == ("", (), "length")
    chat = [system, {"role": "user", "content": "?"}]
    assert toy.generate(chat, tenant="prefill", max_tokens=1).cached_tokens >= read.prompt_tokens > 20
    assert toy.generate(chat, tenant="other", max_tokens=1).cached_tokens == 0
