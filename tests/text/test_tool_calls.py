"""Reading tool calls out of what models write."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.text import ToolCall, parse_tool_calls

ADD = ToolCall("add", {"a": 1, "b": [2, "x"]})
WRITTEN = '{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}'


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{WRITTEN}\n</tool_call>",
        f"<tool_call>[{WRITTEN}]</tool_call>",
        f"<tool_call>[\n{WRITTEN}\n]</tool_call>",
        f"<tool_call>{WRITTEN}",
        f"<tool_call>\n{{{WRITTEN}}}\n</tool_call>",
        WRITTEN,
        f"  [{WRITTEN}]\n",
        f"```json\n{WRITTEN}\n```",
        '{"name": "add", "parameters": {"a": 1, "b": [2, "x"]}}',
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": [2, \\"x\\"]}"}</tool_call>',
    ],
)
def test_one_call_in_each_form(text: str) -> None:
    assert parse_tool_calls(text) == ("", [ADD], [])


def test_several_calls_with_text_around() -> None:
    text = f"First.\n<tool_call>{WRITTEN}</tool_call>\n<tool_call>[{WRITTEN}, {WRITTEN}]</tool_call>\nDone."
    assert parse_tool_calls(text) == ("First.\nDone.", [ADD, ADD, ADD], [])


def test_an_empty_list_is_no_call() -> None:
    assert parse_tool_calls("<tool_call>[]</tool_call>") == ("", [], [])


@pytest.mark.parametrize(
    "text", ["", "Hello.", "{}", "[]", '{"name": "x"}', "[1, 2]", f"See {WRITTEN}", '"name"']
)
def test_other_text_stays_text(text: str) -> None:
    assert parse_tool_calls(text) == (text, [], [])


def test_line_breaks_inside_a_string_are_read() -> None:
    _, calls, errors = parse_tool_calls('<tool_call>{"name": "w", "arguments": {"t": "a\nb"}}</tool_call>')
    assert (calls, errors) == ([ToolCall("w", {"t": "a\nb"})], [])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('{"name": "add", "arguments": {', "not valid JSON"),
        ("add(1, 2)", "not valid JSON"),
        ("", "not valid JSON"),
        ('{"arguments": {}}', '"name"'),
        ('{"name": "add"}', '"arguments"'),
        ('{"name": 1, "arguments": {}}', '"name"'),
        ('{"name": "add", "arguments": [1]}', '"arguments"'),
        ("[1]", '"name"'),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_call_that_cannot_be_read_is_explained_in_one_line(body: str, says: str) -> None:
    unreadable = f"Hm.<tool_call>{body}</tool_call>"
    text, calls, errors = parse_tool_calls(f"{unreadable}<tool_call>{WRITTEN}</tool_call>")
    assert (text, calls) == (unreadable, [ADD])
    assert len(errors) == 1
    assert "at character 3 " in errors[0]
    assert says in errors[0]
    assert "\n" not in errors[0]
    assert len(errors[0]) < 300


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_characters="<"), max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=8,
)


@given(arguments=st.dictionaries(st.text("xyz", max_size=3), values, max_size=4), listed=st.booleans())
def test_what_is_written_is_read_back(arguments: dict[str, Any], listed: bool) -> None:
    call = {"name": "f", "arguments": arguments}
    body = json.dumps([call] if listed else call, ensure_ascii=False)
    assert parse_tool_calls(f"<tool_call>{body}</tool_call>") == ("", [ToolCall("f", arguments)], [])


@given(text=st.text(st.sampled_from('<tool_call>/{}[]":name,arguments 1\n')))
def test_no_text_breaks_the_parser(text: str) -> None:
    parse_tool_calls(text)
