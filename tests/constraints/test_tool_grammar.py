"""Tool calls that can be made, in each family's own format."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.constraints import Constraint, StructuralTag, tool_calls
from paceline.constraints.json_schema import closed
from paceline.constraints.text_matcher import fits
from paceline.errors import ConstraintError
from paceline.text import ToolCall, parse_tool_calls, render_calls
from paceline.text.tool_calls.formats import FORMATS, ToolFormat
from support import examples
from support.legal_walks import legal_texts
from support.tools import IN_TEXT

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
PING = {"type": "function", "function": {"name": "ping"}}
TOOLS = [WEATHER, PING]
CALLS = [ToolCall("get_weather", {"city": "Oslo", "days": 3}), ToolCall("ping", {}), ToolCall("ping", {})]


def enforced(made: Constraint | StructuralTag) -> Constraint:
    inner = made.then if isinstance(made, StructuralTag) else made
    assert inner is not None
    return inner


@pytest.fixture(params=list(IN_TEXT.values()), ids=list(IN_TEXT))
def form(request: pytest.FixtureRequest) -> ToolFormat:
    found: ToolFormat = request.param
    return found


def test_calls_as_the_family_writes_them_are_allowed(form: ToolFormat) -> None:
    for calls in (CALLS[:1], CALLS[1:2]):
        for choice in ("auto", "required", calls[0].name):
            assert fits(enforced(tool_calls(TOOLS, choice, form)), render_calls(calls, form))
    assert fits(enforced(tool_calls(TOOLS, "required", form)), render_calls(CALLS, form))
    assert not fits(enforced(tool_calls(TOOLS, "required", form, parallel=False)), render_calls(CALLS, form))


def test_a_named_tool_is_the_only_one(form: ToolFormat) -> None:
    for choice in ("ping", {"type": "function", "function": {"name": "ping"}}, {"name": "ping"}):
        made = enforced(tool_calls(TOOLS, choice, form))
        assert fits(made, render_calls(CALLS[1:2], form))
        assert not fits(made, render_calls(CALLS[:1], form))


@pytest.mark.parametrize(
    "arguments", [{}, {"days": 3}, {"city": "Oslo", "days": "3"}, {"city": 1}, {"city": "Oslo", "more": 1}]
)
def test_arguments_that_the_schema_refuses_are_refused(form: ToolFormat, arguments: dict[str, Any]) -> None:
    made = enforced(tool_calls(TOOLS, "required", form))
    assert not fits(made, render_calls([ToolCall("get_weather", arguments)], form))
    assert not fits(made, render_calls([ToolCall("nobody", {"city": "Oslo"})], form))


def test_every_legal_text_is_read_back(form: ToolFormat) -> None:
    texts = list(legal_texts(enforced(tool_calls(TOOLS, "required", form)), 12, 300))
    assert len(texts) >= 4
    for text in texts:
        content, calls, problems = parse_tool_calls(text, form)
        assert not content.strip()
        assert not problems
        assert calls
        assert all(call.name in ("get_weather", "ping") for call in calls)


def test_auto_waits_for_the_trigger_and_none_forbids_it(form: ToolFormat) -> None:
    auto, none = tool_calls(TOOLS, "auto", form), tool_calls(TOOLS, "none", form)
    assert isinstance(auto, StructuralTag)
    assert isinstance(none, StructuralTag)
    assert (auto.trigger, auto.anywhere, auto.again) == (form.trigger, form.anywhere, True)
    assert (none.trigger, none.then) == (form.trigger, None)
    once = tool_calls(TOOLS, "auto", form, parallel=False)
    assert isinstance(once, StructuralTag)
    assert not once.again


def test_names_that_need_escaping_are_escaped(form: ToolFormat) -> None:
    odd = {"name": 'a"b\\c', "parameters": {}}
    assert fits(enforced(tool_calls([odd], "required", form)), render_calls([ToolCall('a"b\\c', {})], form))


def test_a_name_that_no_header_can_hold_is_refused() -> None:
    with pytest.raises(ConstraintError, match="letters, digits"):
        tool_calls([{"name": "two words", "parameters": {}}], "auto", FORMATS["harmony"])
    tool_calls([{"name": "one-word_2.x", "parameters": {}}], "auto", FORMATS["harmony"])


@pytest.mark.parametrize(
    ("tools", "choice", "reason"),
    [
        ([], "required", "give at least one"),
        ([], "auto", "give at least one"),
        ([PING], "pong", "expected auto, required, none or one of ping"),
        ([PING], {"function": {}}, "is unknown"),
        ([PING], {"function": 3}, "is unknown"),
        ([{}], "auto", "a tool needs"),
        ([{"function": {"name": ""}}], "auto", "a tool needs"),
        (["ping"], "auto", "a tool needs"),
        ([{"name": "f", "parameters": [1]}], "auto", "are no schema"),
    ],
)
def test_what_is_no_tool_is_refused(tools: Any, choice: Any, reason: str) -> None:
    with pytest.raises(ConstraintError, match=reason):
        tool_calls(tools, choice, FORMATS["hermes"])


def test_closed_schemas_list_all_there_is() -> None:
    inner = {"type": "object", "properties": {"x": {"type": "null"}}}
    schema = {"type": "object", "properties": {"a": inner, "b": {"type": "array", "items": inner}}}
    made = closed(schema)
    assert made["additionalProperties"] is False
    assert made["properties"]["a"]["additionalProperties"] is False
    assert made["properties"]["b"]["items"]["additionalProperties"] is False
    kept = {"type": "object", "properties": {}, "additionalProperties": {"type": "null"}}
    assert closed(kept) == kept
    composed: dict[str, Any] = {"properties": {}, "anyOf": [{"properties": {}}]}
    assert "additionalProperties" not in closed(composed)


@settings(max_examples=examples(30))
@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=6),
        min_size=1,
        max_size=3,
        unique=True,
    )
)
def test_tools_of_any_names(names: list[str]) -> None:
    tools = [{"name": name, "parameters": {"properties": {name: {"const": name}}}} for name in names]
    for form in IN_TEXT.values():
        made = enforced(tool_calls(tools, "required", form, parallel=False))
        for name in names:
            assert fits(made, render_calls([ToolCall(name, {name: name})], form))
            assert not fits(made, render_calls([ToolCall(name + "x", {name: json.dumps(name)})], form))
