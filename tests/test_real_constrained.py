"""Constraints on real models: answers are what was asked for, and speculation changes no token of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel

from paceline import LLM, EngineConfig, SpecConfig
from paceline.constraints import Choice, Json, Lark, Regex, Template
from paceline.errors import ConstraintError
from paceline.output import Result

PLAIN = SpecConfig(("none",), max_draft=0)
FAST = SpecConfig(("grammar", "suffix", "ngram"), adaptive=False)
FORCED = SpecConfig(("grammar",), adaptive=False)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["UTC", "CET"]}},
            "required": ["zone"],
        },
    },
}
TOOLS = [WEATHER, CLOCK]
ASKED = [{"role": "user", "content": "What is the weather in Oslo? Use a tool."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 120},
        "favourite_colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 2},
    },
    "required": ["first_name", "age_in_years", "favourite_colours"],
    "additionalProperties": False,
}


class Person(BaseModel):
    name: str
    age: int
    kind: Literal["friend", "colleague"]


CASES: dict[str, dict[str, Any]] = {
    "schema": {"output": SCHEMA},
    "compact": {"output": SCHEMA, "whitespace": "compact"},
    "response format": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}},
    },
    "regex": {"output": Regex(r"[A-Z][a-z]{2,8}, \d{4}-\d{2}-\d{2}")},
    "lark": {"output": Lark('start: "sum(" N ("," N)* ")"\nN: /[0-9]{1,3}/')},
    "choice": {"output": Choice(("a very good day", "a very bad day", "neither"))},
    "model": {"output": Person},
    "template": {
        "output": Template(
            "Dear {name},\nyour order is {state}.", name=Regex("[A-Z][a-z]+"), state=Literal["late", "here"]
        ),
    },
    "required": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "parallel": {"tools": TOOLS, "tool_choice": "required"},
    "named": {"tools": TOOLS, "tool_choice": "get_time"},
    "auto": {"tools": TOOLS},
    "none": {"tools": TOOLS, "tool_choice": "none"},
}


def checked(result: Result, case: Mapping[str, Any], name: str) -> None:
    """That a complete answer is what was asked for."""
    if "tools" in case:
        for call in result.tool_calls:
            known = {tool["function"]["name"]: tool["function"]["parameters"] for tool in case["tools"]}
            jsonschema.validate(call.arguments, known[call.name])
        assert bool(result.tool_calls) == (name not in ("none", "auto")) or name == "auto"
        assert name != "named" or {call.name for call in result.tool_calls} == {"get_time"}
        assert name != "none" or "<tool_call>" not in result.text
    elif case.get("output") is Person:
        assert isinstance(result.value, Person)
    elif name == "template":
        assert result.value["state"] in ("late", "here")
    elif name in ("schema", "compact", "response format"):
        jsonschema.validate(json.loads(result.text), SCHEMA)
        assert (": " in result.text) == (name != "compact")
    else:
        assert result.value == result.text


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return LLM("smollm2-135m", config=EngineConfig(cache_mb=256))


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", CASES)
def test_speculative_answers_are_plain_answers(llm: LLM, name: str, temperature: float) -> None:
    options = {**CASES[name], "max_tokens": 40, "seed": 3, "temperature": temperature}
    plain = llm.generate(ASKED, spec=PLAIN, tenant=f"{name} plain", **options)
    fast = llm.generate(ASKED, spec=FAST, tenant=f"{name} fast", **options)
    assert fast.token_ids == plain.token_ids
    assert (fast.text, fast.finish, fast.value) == (plain.text, plain.finish, plain.value)
    assert fast.tool_calls == plain.tool_calls
    if plain.finish == "stop":
        checked(plain, CASES[name], name)


@pytest.mark.model
@pytest.mark.parametrize("name", ["schema", "model", "template", "named"])
def test_what_must_come_saves_passes(llm: LLM, name: str) -> None:
    options = {**CASES[name], "max_tokens": 40, "seed": 3}
    plain = llm.generate(ASKED, spec=PLAIN, tenant="p", **options)
    fast = llm.generate(ASKED, spec=FORCED, tenant="f", **options)
    assert fast.token_ids == plain.token_ids
    assert fast.passes < 0.8 * plain.passes
    assert fast.accepted["grammar"] > 0


@pytest.mark.model
def test_different_constraints_at_once_are_each_as_alone(llm: LLM) -> None:
    names = ["schema", "regex", "required", "choice"]
    options: dict[str, Any] = {"max_tokens": 40, "seed": 5, "temperature": 0.7, "spec": FAST}
    alone = [llm.generate(ASKED, tenant=f"a{n}", **options, **CASES[n]).token_ids for n in names]
    streams = [llm.stream(ASKED, tenant=f"b{n}", **options, **CASES[n]) for n in names]
    free = llm.stream(ASKED, tenant="free", **options)
    assert [stream.read().token_ids for stream in streams] == alone
    assert free.read().token_ids == llm.generate(ASKED, tenant="free alone", **options).token_ids


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("choice", ["auto", "none"])
def test_prose_is_what_the_model_writes_without_tools(llm: LLM, temperature: float, choice: str) -> None:
    """The same prompt, with and without the constraint: up to a trigger, the same tokens."""
    messages = [{"role": "user", "content": "Tell me a short story about a dog. No tools."}]
    options: dict[str, Any] = {"max_tokens": 32, "seed": 1, "temperature": temperature}
    prompt = llm.tokenizer.decode(llm.tokenizer.encode_chat(messages, tools=TOOLS))
    free = llm.generate(prompt, tenant="free", spec=PLAIN, **options)
    assert "<tool" not in free.text
    for spec in (PLAIN, FAST):
        bound = llm.generate(messages, tools=TOOLS, tool_choice=choice, tenant="bound", spec=spec, **options)
        assert bound.prompt_tokens == free.prompt_tokens
        assert bound.token_ids == free.token_ids
        assert bound.content == bound.text


@pytest.mark.model
def test_an_error_ends_one_answer_and_no_other(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.constraints import compiler

    hard = Regex("((x{1,30}){1,30}y){1,20}z")
    monkeypatch.setitem(compiler.LIMITS, "step_lexer_fuel", 400)
    options: dict[str, Any] = {"max_tokens": 24, "seed": 5, "spec": FAST}
    alone = llm.generate(ASKED, tenant="e1", output=Json.of(SCHEMA), **options).token_ids
    fine = llm.stream(ASKED, tenant="e2", output=Json.of(SCHEMA), **options)
    wrong = llm.stream(ASKED, tenant="e3", output=hard, **options)
    with pytest.raises(ConstraintError, match="cannot be followed any further"):
        wrong.read()
    assert fine.read().token_ids == alone
    assert not llm.engine.busy


@pytest.mark.model
def test_what_cannot_be_enforced_is_refused_before_anything_runs(llm: LLM) -> None:
    outputs: list[Any] = [{"not": {}}, Regex("("), Lark("nothing"), {"$ref": "#"}]
    for output in outputs:
        with pytest.raises(ConstraintError):
            llm.generate(ASKED, output=output)
    assert not llm.engine.busy


@pytest.fixture(scope="module")
def qwen(qwen_path: Path) -> LLM:
    return LLM("qwen2.5-coder-1.5b", config=EngineConfig(cache_mb=256))


@pytest.mark.large
@pytest.mark.parametrize("name", ["schema", "auto", "parallel", "none"])
def test_a_larger_model_writes_the_same_too(qwen: LLM, name: str) -> None:
    options = {**CASES[name], "max_tokens": 40, "seed": 3}
    plain = qwen.generate(ASKED, spec=PLAIN, tenant="p", **options)
    fast = qwen.generate(ASKED, spec=FAST, tenant="f", **options)
    assert fast.token_ids == plain.token_ids
    if plain.finish == "stop":
        checked(plain, CASES[name], name)


@pytest.mark.model
def test_a_tool_keeps_its_name_whatever_it_reads_like(llm: LLM) -> None:
    for name in ("a<|im_start|>b", "cafe\u0301", 'say "hi"'):
        tool = {"type": "function", "function": {"name": name}}
        found = llm.generate(ASKED, tools=[tool], tool_choice="required", parallel_tool_calls=False, seed=1)
        assert [call.name for call in found.tool_calls] == [name]


@pytest.mark.model
def test_without_calls_there_is_nothing_to_read_as_one(llm: LLM) -> None:
    said = 'see <tool_call>[{"name": "f", "arguments": {}}]</tool_call> ok'
    tool = {"type": "function", "function": {"name": "f"}}
    found = llm.generate(
        ASKED, tools=[tool], tool_choice="none", output=Choice((said,)), seed=1, max_tokens=64
    )
    assert found.tool_calls == ()
    assert found.value == found.content == said


@pytest.mark.large
def test_a_model_that_leaves_out_the_mark_of_its_calls_still_calls(qwen: LLM) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "max_tokens": 80, "seed": 0}
    plain = qwen.generate(ASKED, spec=PLAIN, tenant="p", **options)
    fast = qwen.generate(ASKED, spec=FAST, tenant="f", **options)
    assert fast.token_ids == plain.token_ids
    assert qwen.tokenizer.tool_format.trigger not in plain.text
    (call,) = plain.tool_calls
    assert (call.name, plain.content) == ("get_weather", "")
    jsonschema.validate(call.arguments, WEATHER["function"]["parameters"])  # type: ignore[index]
