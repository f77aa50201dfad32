"""What a request says becomes the one constraint it means."""

from typing import Any

import pytest

from paceline.constraints import Choice, Compiler, Json, OutputSpec, Regex, Triggered
from paceline.constraints.match import fits
from paceline.constraints.request import Either
from paceline.errors import ConstraintError
from paceline.text.tool_calls.formats import FORMATS
from support.cursors import after, tokenizer_with

HERMES = FORMATS["hermes"]
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
SCHEMA = {"type": "integer"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


def test_nothing_asked_for_is_no_constraint() -> None:
    assert OutputSpec().constraint(HERMES) is None
    assert OutputSpec(response_format={"type": "text"}).constraint(HERMES) is None
    assert OutputSpec().parser() is None


def test_a_response_format_and_an_output_mean_the_same() -> None:
    assert OutputSpec(response_format=FORMAT).constraint(HERMES) == Json.of(SCHEMA)
    assert OutputSpec(output=SCHEMA).constraint(HERMES) == Json.of(SCHEMA)
    assert OutputSpec(output=SCHEMA, whitespace="compact").constraint(HERMES) == Json.of(SCHEMA, "compact")
    with pytest.raises(ConstraintError, match="give one of them"):
        OutputSpec(output=SCHEMA, response_format=FORMAT).constraint(HERMES)


@pytest.mark.parametrize("choice", ["required", "f", {"name": "f"}])
def test_a_choice_of_tools_needs_tools(choice: Any) -> None:
    with pytest.raises(ConstraintError, match="give at least one"):
        OutputSpec(tool_choice=choice).constraint(HERMES)


def test_with_tools_and_a_format_an_answer_is_a_call_or_the_format() -> None:
    made = OutputSpec((TOOL,), output=SCHEMA).constraint(HERMES)
    assert isinstance(made, Either)
    assert fits(made, CALL)
    assert fits(made, "12")
    assert not fits(made, "so: " + CALL)
    assert OutputSpec((TOOL,), "none", output=SCHEMA).constraint(HERMES) == Json.of(SCHEMA)
    required = OutputSpec((TOOL,), "required", output=SCHEMA).constraint(HERMES)
    assert not isinstance(required, Triggered)
    assert required is not None
    assert fits(required, CALL)
    assert not fits(required, "12")


@pytest.mark.parametrize("prompt", ["<think>", "x\n<think>\n", "<think></think><think>"])
def test_reasoning_that_the_prompt_opens_is_free(prompt: str) -> None:
    made = OutputSpec(output=Choice(("yes", "no"))).constraint(HERMES, prompt)
    assert isinstance(made, Triggered)
    tokenizer = tokenizer_with()
    compiler = Compiler(tokenizer, tokenizer.vocab_size)
    cursor = after(compiler, made, list(b"let me see: no. </think>\n\nyes"))
    assert cursor.finished


@pytest.mark.parametrize("prompt", ["", "think", "<think></think>", "<think>\n\n</think>\n\n"])
def test_without_open_reasoning_the_constraint_holds_at_once(prompt: str) -> None:
    assert OutputSpec(output=Regex("a")).constraint(HERMES, prompt) == Regex("a")


def test_required_calls_come_after_reasoning_too() -> None:
    made = OutputSpec((TOOL,), "required").constraint(HERMES, "<think>")
    assert isinstance(made, Triggered)
    assert made.trigger == "</think>"
    auto = OutputSpec((TOOL,), "auto").constraint(HERMES, "<think>")
    assert isinstance(auto, Triggered)
    assert auto.trigger == "<tool_call>"


def test_values_are_read_by_what_was_asked_for() -> None:
    parse = OutputSpec(output=list[int]).parser()
    assert parse is not None
    assert parse("[1, 2]") == [1, 2]
