"""What a request says becomes the one constraint it means."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from paceline.constraints import Choice, Compiler, Json, Lark, OutputSpec, Regex, StructuralTag, compiler
from paceline.constraints.grammars import RequestPart
from paceline.constraints.request import Alternatives
from paceline.constraints.text_matcher import fits
from paceline.errors import ConstraintError
from paceline.text.tool_calls.formats import FORMATS
from support.cursors import after, tokenizer_with

HERMES = FORMATS["hermes"]
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
SCHEMA = {"type": "integer"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


def test_an_empty_request_is_no_constraint() -> None:
    assert OutputSpec().constraint(HERMES) is None
    assert OutputSpec(response_format={"type": "text"}).constraint(HERMES) is None
    assert OutputSpec().parser() is None


def test_a_response_format_and_an_output_mean_the_same() -> None:
    param = "response_format.json_schema.schema"
    assert OutputSpec(response_format=FORMAT).constraint(HERMES) == RequestPart(param, Json.of(SCHEMA))
    assert OutputSpec(output=SCHEMA).constraint(HERMES) == RequestPart("output", Json.of(SCHEMA))
    compact = OutputSpec(output=SCHEMA, whitespace="compact", output_param="json").constraint(HERMES)
    assert compact == RequestPart("json", Json.of(SCHEMA, "compact"))
    with pytest.raises(ConstraintError, match="give one of them"):
        OutputSpec(output=SCHEMA, response_format=FORMAT).constraint(HERMES)


@pytest.mark.parametrize("choice", ["required", "f", {"name": "f"}])
def test_a_choice_of_tools_needs_tools(choice: Any) -> None:
    with pytest.raises(ConstraintError, match="give at least one"):
        OutputSpec(tool_choice=choice).constraint(HERMES)


def test_with_tools_and_a_format_an_answer_is_a_call_or_the_format() -> None:
    made = OutputSpec((TOOL,), output=SCHEMA).constraint(HERMES)
    assert isinstance(made, Alternatives)
    assert fits(made, CALL)
    assert fits(made, "12")
    assert not fits(made, "so: " + CALL)
    none = OutputSpec((TOOL,), "none", output=SCHEMA).constraint(HERMES)
    assert none == RequestPart("output", Json.of(SCHEMA))
    required = OutputSpec((TOOL,), "required", output=SCHEMA).constraint(HERMES)
    assert not isinstance(required, StructuralTag)
    assert required is not None
    assert fits(required, CALL)
    assert not fits(required, "12")


@pytest.mark.parametrize("prompt", ["<think>", "x\n<think>\n", "<think></think><think>"])
def test_reasoning_that_the_prompt_opens_is_free(prompt: str) -> None:
    made = OutputSpec(output=Choice(("yes", "no"))).constraint(HERMES, prompt)
    assert isinstance(made, StructuralTag)
    tokenizer = tokenizer_with()
    compiler = Compiler(tokenizer, tokenizer.vocab_size)
    cursor = after(compiler, made, list(b"let me see: no. </think>\n\nyes"))
    assert cursor.finished


@pytest.mark.parametrize("prompt", ["", "think", "<think></think>", "<think>\n\n</think>\n\n"])
def test_without_open_reasoning_the_constraint_holds_at_once(prompt: str) -> None:
    assert OutputSpec(output=Regex("a")).constraint(HERMES, prompt) == RequestPart("output", Regex("a"))


def test_required_calls_come_after_reasoning_too() -> None:
    made = OutputSpec((TOOL,), "required").constraint(HERMES, "<think>")
    assert isinstance(made, StructuralTag)
    assert made.trigger == "</think>"
    auto = OutputSpec((TOOL,), "auto").constraint(HERMES, "<think>")
    assert isinstance(auto, StructuralTag)
    assert auto.trigger == "<tool_call>"


def test_values_are_parsed_by_their_constraint() -> None:
    parse = OutputSpec(output=list[int]).parser()
    assert parse is not None
    assert parse("[1, 2]") == [1, 2]


BAD = {"type": "string", "format": "weird"}


def tool(name: str, arguments: Any, key: str = "function") -> dict[str, Any]:
    function = {"name": name, "parameters": {"type": "object", "properties": {"a": arguments}}}
    return {"type": "function", key: function} if key else function


@pytest.mark.parametrize(
    ("spec", "param"),
    [
        (lambda: OutputSpec((tool("f", {}), tool("g", BAD))), "tools[1].function.parameters"),
        (lambda: OutputSpec((tool("f", {}), tool("g", BAD, ""))), "tools[1].parameters"),
        (lambda: OutputSpec((tool("f", BAD), tool("g", {})), "required"), "tools[0].function.parameters"),
        (lambda: OutputSpec((tool("f", {}), tool("", {}))), "tools[1]"),
        (lambda: OutputSpec((tool("f", {}), {"function": {"name": "g", "parameters": 5}})), "tools[1]"),
        (lambda: OutputSpec((tool("f", {}), tool("f", {}))), "tools"),
        (lambda: OutputSpec((tool("f", {}),), "maybe"), "tool_choice"),
        (lambda: OutputSpec(tool_choice="required"), "tool_choice"),
        (lambda: OutputSpec(whitespace="wide"), "whitespace"),  # type: ignore[arg-type]
        (lambda: OutputSpec(response_format={"type": "xml"}), "response_format"),
        (lambda: OutputSpec(response_format={"type": "json_schema"}), "response_format"),
        (lambda: OutputSpec(response_format=form(BAD)), "response_format.json_schema.schema"),
        (lambda: OutputSpec(response_format=form(5)), "response_format.json_schema.schema"),
        (
            lambda: OutputSpec((tool("f", {}),), response_format=form(BAD)),
            "response_format.json_schema.schema",
        ),
        (lambda: OutputSpec((tool("f", BAD),), response_format=form({})), "tools[0].function.parameters"),
        (lambda: OutputSpec(output=Regex("(")), "output"),
        (lambda: OutputSpec(output=Regex("")), "output"),
        (lambda: OutputSpec(output=str), "output"),
        (lambda: OutputSpec(output=Lark("start: ("), output_param="grammar"), "grammar"),
        (lambda: OutputSpec(output=Lark('begin: "a"')), "output"),  # an error without a line
        (lambda: OutputSpec((tool("f", {}),), output=Lark("start: (\n")), "output"),
    ],
)
def test_an_error_names_the_part_of_the_request_after_one_compilation(
    monkeypatch: pytest.MonkeyPatch, spec: Callable[[], OutputSpec], param: str
) -> None:
    compilations: list[str] = []
    real = compiler.compile_grammar

    def counted(grammar: str, *given: Any) -> Any:
        compilations.append(grammar)
        return real(grammar, *given)

    monkeypatch.setattr(compiler, "compile_grammar", counted)
    with pytest.raises(ConstraintError) as caught:
        compile_spec(spec)
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)
    assert str(caught.value) == f"{caught.value.param}: {caught.value.reason}"
    assert len(compilations) <= 1


def compile_spec(spec: Callable[[], OutputSpec]) -> None:
    tokenizer, constraint = tokenizer_with(), spec().constraint(HERMES)
    assert constraint is not None
    Compiler(tokenizer, tokenizer.vocab_size).cursor(constraint)


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


def test_an_error_in_one_tool_says_where_in_its_schema() -> None:
    with pytest.raises(ConstraintError, match="format at #/properties/a/format"):
        compile_spec(lambda: OutputSpec((tool("f", {}), tool("g", BAD))))


def test_errors_survive_a_process_boundary() -> None:
    error = pickle.loads(pickle.dumps(ConstraintError("no", "tools[1]")))
    assert (error.reason, error.param, str(error)) == ("no", "tools[1]", "tools[1]: no")
    assert error.within("tools") is error
    assert ConstraintError("no").within("tools").param == "tools"


def test_allowed_tools_are_looked_up_and_not_searched() -> None:
    compared = 0

    class Name(str):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return super().__eq__(other)

        __hash__ = str.__hash__

    names = [Name(f"tool{i}") for i in range(200)]
    tools = [{"name": name} for name in names]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "tool199"}] * 200}
    assert list(OutputSpec(tools=tools, tool_choice=choice)._tools) == ["tool199"]
    assert compared < 2000
