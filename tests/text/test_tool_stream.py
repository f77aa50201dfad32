"""Streaming tool calls: however the text is cut, the deltas are what the whole text says."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.text import (
    FORMATS,
    CallDelta,
    ContentDelta,
    ToolCall,
    ToolFormat,
    ToolStream,
    call_id,
    parse_tool_calls,
    render_calls,
)
from support import examples
from support.tools import IN_TEXT, LETTERS, Received, calls, cuts, formats, garbage, pieces, prose, received

HERMES = FORMATS["hermes"]
EMPTY_LIST = re.compile(r"\[\s*\]")  # of calls: it is read, and tells nothing
families = pytest.mark.parametrize("format", IN_TEXT.values(), ids=IN_TEXT)


@settings(max_examples=examples(400))
@given(format=formats, wanted=calls, before=prose, after=prose, where=cuts)
def test_calls_are_read_back_from_any_cut(
    format: ToolFormat, wanted: list[ToolCall], before: str, after: str, where: list[int]
) -> None:
    before = f"{before}\n" if before and format.anywhere else ""
    text = before + render_calls(wanted, format) + after
    client = received(pieces(text, where), format)
    content, found, errors = parse_tool_calls(text, format)

    blanks = " \t\r\n"
    around = before[:-1] if before.strip(blanks) else ""
    assert content == around + (after if after.strip(blanks) else "")
    assert (found, errors) == (wanted, [])
    assert [call.text for call in found] == [json.dumps(c.arguments, ensure_ascii=False) for c in wanted]
    assert client.content == content
    assert client.calls == [[call.name, call.text] for call in found]


@settings(max_examples=examples(200))
@given(format=formats, wanted=calls, where=cuts, separators=st.sampled_from([(",", ":"), (" ,\n", " : ")]))
def test_arguments_are_the_very_text(
    format: ToolFormat, wanted: list[ToolCall], where: list[int], separators: tuple[str, str]
) -> None:
    """Spacing and escapes stay as the model wrote them."""
    before, middle, after = format.call
    written = [json.dumps(c.arguments, separators=separators) for c in wanted]
    each = [
        f"{before}{json.dumps(c.name)[1:-1]}{middle}{text}{after}"
        for c, text in zip(wanted, written, strict=True)
    ]
    each = [f"{format.begin}{c}{format.end}" for c in each] if format.wraps_each else each
    text = format.between.join(each)
    text = text if format.wraps_each else f"{format.begin}{text}{format.end}"
    assert received(pieces(text, where), format).calls == [
        [c.name, t] for c, t in zip(wanted, written, strict=True)
    ]
    assert [c.text for c in parse_tool_calls(text, format)[1]] == written


@settings(max_examples=examples(300))
@given(format=formats, text=prose, where=cuts)
def test_prose_comes_through_unchanged(format: ToolFormat, text: str, where: list[int]) -> None:
    assert received(pieces(text, where), format) == Received(text)
    assert parse_tool_calls(text, format) == (text, [], [])


def letters(text: str) -> list[str]:
    return sorted(c for c in text if c in LETTERS)


@settings(max_examples=examples(1500))
@given(format=formats, text=garbage, where=cuts)
def test_garbage_loses_nothing(format: ToolFormat, text: str, where: list[int]) -> None:
    client = received(pieces(text, where), format)
    assert client == received([text], format)
    told = client.content + "".join(part for call in client.calls for part in call)
    assert letters(told) == letters(text)

    content, found, errors = parse_tool_calls(text, format)
    assert letters(content + "".join(call.name + call.text for call in found)) == letters(text)
    assert [json.loads(call.text) for call in found] == [call.arguments for call in found]
    if not found and not EMPTY_LIST.search(text):
        assert content == text
    if not errors:
        assert client == Received(content, [[call.name, call.text] for call in found])


@settings(max_examples=examples(300))
@given(format=formats, text=st.text(max_size=40), wanted=calls, where=cuts)
def test_any_text_in_the_midst_of_calls_breaks_nothing(
    format: ToolFormat, text: str, wanted: list[ToolCall], where: list[int]
) -> None:
    written = render_calls(wanted, format)
    at = sum(where) % (len(written) + 1)
    spoiled = written[:at] + text + written[at:]
    assert received(pieces(spoiled, where), format) == received([spoiled], format)
    parse_tool_calls(spoiled, format)
    parse_tool_calls(spoiled)


@families
def test_arguments_are_sent_as_they_come(format: ToolFormat) -> None:
    arguments = r'{"a": "x\"}", "b": [{"c": 1.5}, null]}'
    before, middle, after = format.call
    stream, client = ToolStream(format), Received()
    client.take(stream.push(f"{format.begin}{before}f{middle}"))
    for end, character in enumerate(arguments, start=1):
        client.take(stream.push(character))
        assert client.calls == [["f", arguments[:end]]]
    assert stream.push(after + format.end) == []
    assert stream.flush() == []


@families
def test_only_what_may_begin_a_trigger_is_held_back(format: ToolFormat) -> None:
    text = "So.\n\n< <tool <tool_call [TOOL_C [TOOL_CALLS {\n<tool_cal"
    stream, shown = ToolStream(format), Received()
    for end, character in enumerate(text, start=1):
        shown.take(stream.push(character))
        held = text[len(shown.content) : end]
        assert not held or format.anywhere
        assert f"\n{format.trigger}".startswith(held) or format.trigger.startswith(held)


def test_no_part_of_a_trigger_gets_out() -> None:
    stream, sent = ToolStream(HERMES), []
    for character in 'Hi\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n':
        sent += stream.push(character)
    assert sent == [
        ContentDelta("H"),
        ContentDelta("i"),
        CallDelta(0, "f", "{"),
        CallDelta(0, None, "}"),
    ]
    assert stream.flush() == []


def test_a_call_in_one_piece_is_one_delta() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert ToolStream(HERMES).push(f"Go.\n{text}\n{text}") == [
        ContentDelta("Go."),
        CallDelta(0, "f", '{"a": 1}'),
        CallDelta(1, "f", '{"a": 1}'),
    ]


def test_a_call_cut_off_stays_a_call_in_the_stream_and_text_in_the_whole() -> None:
    text = 'Go.\n<tool_call>\n{"name": "f", "arguments": {"a": "b'
    assert received([text], HERMES) == Received("Go.", [["f", '{"a": "b']])
    content, found, errors = parse_tool_calls(text, HERMES)
    assert (content, found) == (text, [])
    assert errors[0].startswith("the tool call at character 3 is not valid JSON: it has no end")


@families
def test_a_call_that_a_limit_cuts_is_no_text(format: ToolFormat) -> None:
    """Wherever it is cut: before its name is complete nothing of it is told, and then a part of it."""
    before = "Go." if format.anywhere else ""
    text = render_calls([ToolCall("find", {"a": "b"})], format)
    mark = max(len(format.trigger), 1)
    for end in range(mark, len(text) + 1):
        stream = ToolStream(format)
        deltas = [*stream.push(before + text[:end]), *stream.flush(cut_off=True)]
        assert "".join(d.text for d in deltas if isinstance(d, ContentDelta)) == before
        sent = "".join(d.arguments for d in deltas if isinstance(d, CallDelta))
        assert '{"a": "b"}'.startswith(sent)
    assert sent == '{"a": "b"}'


def test_a_call_that_breaks_off_does_not_hide_the_next() -> None:
    good = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    text = f'<tool_call>\n{{"name": "f", "arguments": {{"a": True}}}}\n</tool_call>\n{good}'
    assert received([text], HERMES) == Received("True}}\n</tool_call>", [["f", '{"a": '], ["g", "{}"]])
    content, found, errors = parse_tool_calls(text, HERMES)
    assert (content, found, len(errors)) == (text.removesuffix(f"\n{good}"), [ToolCall("g", {})], 1)


def test_control_characters_in_strings_are_escaped() -> None:
    """Models write them bare, which no client's JSON parser accepts."""
    text = '<tool_call>{"name": "w", "arguments": {\n"t": "a\n\tb"}}</tool_call>'
    assert received(list(text), HERMES).calls == [["w", '{\n"t": "a\\n\\tb"}']]
    text = '<tool_call>{"arguments": {"t": "a\nb"}, "name": "w"}</tool_call>'
    assert received(list(text), HERMES).calls == [["w", '{"t": "a\\nb"}']]


def test_ids_are_stable_and_differ() -> None:
    for form in IN_TEXT.values():
        ids = [call_id(seed, index, form) for seed in ("a", "b") for index in range(20)]
        assert len(set(ids)) == 40
        assert call_id("a", 0, form) == ids[0]
    ids = [call_id("a", index, HERMES) for index in range(20)]
    assert all(i.startswith("call_") and len(i) == 29 and i[5:].isalnum() and i.islower() for i in ids)
