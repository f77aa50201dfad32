"""Calls in the forms that models fall back to: those that count, those that stay text, whole and streamed."""

import json
from collections.abc import Collection, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from paceline.text import FORMATS, OfferedTools, ToolCall, ToolFormat, ToolStream, parse_tool_calls
from paceline.text.tool_calls import detector
from paceline.text.tool_calls.detector import CallDetector
from paceline.text.tool_calls.parser import CallBegin, Event, TextEvent
from support import examples
from support.tools import Received, cuts, pieces

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}


class Offered(OfferedTools):
    def __init__(self, enforced: bool = False) -> None:
        self._enforced = enforced

    @property
    def names(self) -> Collection[str]:
        return SCHEMAS

    @property
    def enforced(self) -> bool:
        return self._enforced

    def fits(self, name: str, arguments: Mapping[str, Any]) -> bool:
        return bool(Draft202012Validator(SCHEMAS[name]).is_valid(arguments))

    def typed(self, name: str, texts: Mapping[str, str]) -> dict[str, Any]:
        kinds = SCHEMAS[name]["properties"]
        return {k: t if kinds.get(k) == {"type": "string"} else json.loads(t) for k, t in texts.items()}


OFFERED = Offered()
ENFORCED = Offered(enforced=True)
ALL = FORMATS["smollm2"]  # falls back to every form
HERMES = FORMATS["hermes"]
PARIS = ToolCall("get_weather", {"city": "Paris"})
WEEK = ToolCall("get_weather", {"city": "Paris", "days": 7})
NOW = ToolCall("now", {})
JSON = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
PRETTY = json.dumps({"name": "get_weather", "arguments": {"city": "Paris", "days": 7}}, indent=4)
EMPTY = '{"name": "now", "arguments": {}}'
QWEN3 = """<function=get_weather>
<parameter=city>
Paris
</parameter>
<parameter=days>
7
</parameter>
</function>"""


def read(
    parts: list[str], format: ToolFormat = ALL, parallel: bool = True, offered: Offered = OFFERED
) -> tuple[Received, list[str]]:
    stream, client = ToolStream(format, offered, parallel), Received()
    for part in parts:
        client.take(stream.push(part))
    client.take(stream.flush())
    return client, list(stream.rejected)


def whole(
    text: str, format: ToolFormat = ALL, parallel: bool = True, offered: Offered = OFFERED
) -> tuple[str, list[ToolCall]]:
    """Of the whole text, and the same of single characters."""
    content, calls, _ = parse_tool_calls(text, format, offered, parallel)
    client, _ = read(list(text), format, parallel, offered)
    assert client == Received(content, [[call.name, call.text] for call in calls])
    return content, calls


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextEvent))


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (JSON, [PARIS]),
        (f"\n\n  {JSON}\n", [PARIS]),
        (PRETTY, [WEEK]),
        (f"[{JSON}, {EMPTY}]", [PARIS, NOW]),
        (f"[\n  {JSON},\n  {EMPTY}\n]", [PARIS, NOW]),
        (f"{JSON}\n{EMPTY}", [PARIS, NOW]),
        (f"{JSON}; {EMPTY}", [PARIS, NOW]),
        ('{"arguments": {"city": "Paris"}, "name": "get_weather"}', [PARIS]),
        ('{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
        ('{"type": "function", "id": "c1", "name": "get_weather", "arguments": {"city": "Paris"}}', [PARIS]),
        ('{"type": "function", "function": {"name": "now", "arguments": {}}}', [NOW]),
        ('{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}', [PARIS]),
        ('{{"name": "get_weather", "arguments": {"city": "Paris"}}}', [PARIS]),
        (f"```json\n{JSON}\n```", [PARIS]),
        (f"```\n{PRETTY}\n```\n", [WEEK]),
        (f"``` json\n[{JSON},\n{EMPTY}]```", [PARIS, NOW]),
        (f"```json\n{JSON}\n```\n\n```json\n{EMPTY}\n```", [PARIS, NOW]),
        (f"```json\n{JSON}\n{EMPTY}\n```", [PARIS, NOW]),
        ('[get_weather(city="Paris")]', [PARIS]),
        ("[get_weather(city='Paris', days=7), now()]", [WEEK, NOW]),
        ("```python\n[get_weather(city='Paris')]\n```", [PARIS]),
        ('<function=get_weather>{"city": "Paris"}</function>', [PARIS]),
        (QWEN3, [WEEK]),
        (f"<tool_call>\n{QWEN3}\n</tool_call>", [WEEK]),
        (f"<tools>\n{JSON}\n</tools>", [PARIS]),
        ("<function=now>\n</function>", [NOW]),
        (f"```xml\n<function_call>{JSON}</function_call>\n```", [PARIS]),
    ],
)
def test_an_answer_that_is_nothing_but_calls_is_calls(text: str, calls: list[ToolCall]) -> None:
    assert whole(text) == ("", calls)


@pytest.mark.parametrize("written", [JSON, f"```json\n{JSON}\n```", '[get_weather(city="Paris")]'])
@pytest.mark.parametrize("before", ["I will look it up.", "One.\n\nTwo: {x}, `y`", "```js\n{\n}\n```", "<b>"])
def test_calls_at_the_end_leave_the_prose_before_them(before: str, written: str) -> None:
    assert whole(f"{before}\n{written}") == (before, [PARIS])
    assert whole(f"{before}\n\n{written}\n") == (f"{before}\n", [PARIS])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"Call it like this:\n```json\n{JSON}\n```\nand wait.", "followed_by_text"),
        (f"{JSON}\nThis asks for the weather.", "followed_by_text"),
        (f"{JSON}\n\nThen:\n{EMPTY}", "followed_by_text"),
        (f"```json\n{JSON}\n```\nThen:\n```json\n{EMPTY}\n```", "followed_by_text"),
        (f"```json\n{JSON}\nThat is it.\n```", "followed_by_text"),
        ('{"name": "get_time", "arguments": {}}', "unknown_tool"),
        (f'[{JSON}, {{"name": "get_time", "arguments": {{}}}}]', "unknown_tool"),
        ("<function=get_time></function>", "unknown_tool"),
        ('{"name": "get_weather", "arguments": {"town": "Paris"}}', "arguments"),
        ('{"name": "get_weather", "arguments": {}}', "arguments"),
        ('{"name": "get_weather", "parameters": {"type": "object", "properties": {}}}', "arguments"),
        ("[get_weather(city='Paris', days='7')]", "arguments"),
        ('<function=get_weather>{"city": 1}</function>', "arguments"),
        ("[get_weather('Paris')]", "syntax"),
        ("[get_weather(city=open('x'))]", "syntax"),
        ("[get_weather(city=Paris)]", "syntax"),
        ('{"name": "get_weather", "arguments": {"city": }}', "syntax"),
        ('{"name": "get_weather", "arguments": [1]}', "syntax"),
        (JSON[:-1], "cut"),
        (f"[{JSON}", "cut"),
        (f"```json\n{JSON}\n", "cut"),
        ("[get_weather(city='Par", "cut"),
        ("<function=get_weather>\n<parameter=city>\nParis", "cut"),
    ],
)
def test_what_looks_like_a_call_and_is_none_is_text_and_counted(text: str, reason: str) -> None:
    assert whole(text) == (text, [])
    assert read([text]) == (Received(text), [reason])


@pytest.mark.parametrize(
    "text",
    [
        f"Use {JSON}",
        f"- {JSON}",
        f"> {JSON}",
        f'He wrote "{JSON}"',
        f"```js\n{JSON}\n```",
        f"```\nfirst\n{JSON}\n```",
        f"```\n// {JSON}\n```",
        '{"city": "Paris"}',
        '{"name": "Ada", "born": 1815}',
        '{"name": "get_weather"}',
        '{"name": "get_weather", "description": "w", "parameters": {}}',
        "[1] A note.",
        "[link](https://example.org)",
        "[x] done (all of it)",
        "[print(1)]",
        "[]",
        "{}",
        "",
        "```json\n```",
        "``` json",
        "`now()`",
        "<tool>",
        "<function>now</function>",
        "<tools>[]</tools>",
        "now()",
    ],
)
def test_other_text_is_text_and_not_counted(text: str) -> None:
    assert whole(text) == (text, [])
    assert read([text])[1] == []


def test_a_family_has_its_own_forms() -> None:
    python = "[now()]"
    assert whole(python, FORMATS["llama3"]) == ("", [NOW])
    for name in ("hermes", "mistral"):
        assert whole(python, FORMATS[name]) == (python, [])
        assert whole(JSON, FORMATS[name]) == ("", [PARIS])
    assert whole(QWEN3, HERMES) == ("", [WEEK])
    assert whole(QWEN3, FORMATS["mistral"]) == (QWEN3, [])


def test_a_call_in_the_declared_format_is_all_that_counts() -> None:
    declared = f"<tool_call>\n{EMPTY}\n</tool_call>"
    assert whole(f"{JSON}\n{declared}", HERMES) == (JSON, [NOW])
    assert whole(f"{declared}\n{JSON}", HERMES) == (f"\n{JSON}", [NOW])
    assert whole(f"```json\n{declared}\n```", HERMES)[1] == [NOW]


def test_several_calls_are_none_where_one_is_allowed() -> None:
    assert whole(JSON, parallel=False) == ("", [PARIS])
    text = f"[{JSON}, {EMPTY}]"
    assert whole(text, parallel=False) == (text, [])
    assert read([text], parallel=False)[1] == ["several"]


def test_without_the_tools_nothing_is_looked_for() -> None:
    assert parse_tool_calls(JSON, HERMES) == (JSON, [], [])


def test_arguments_are_the_text_the_model_wrote() -> None:
    (call,) = parse_tool_calls(f"```json\n{PRETTY}\n```", HERMES, OFFERED)[1]
    assert call.text == '{\n        "city": "Paris",\n        "days": 7\n    }'
    (call,) = parse_tool_calls('<function=get_weather>{"city":\n"a\tb"}</function>', HERMES, OFFERED)[1]
    assert json.loads(call.text) == {"city": "a\tb"}


@pytest.mark.parametrize(
    "text",
    [
        "Hello there.",
        "a { b [ c < d ` e",
        '{"city": "Paris"}',
        "[1, 2]",
        "[note] x",
        "<div>x</div>",
        "`x` y",
        "```js\nlet x = {\n};\n```",
        '{"name": "Ada", "born": 1815}',
        "{ x }\n[ y ]\n< z >",
    ],
)
def test_prose_is_released_at_the_first_character_that_no_call_has(text: str) -> None:
    """All that is ever held back is the line's beginning, while it may still be a call's."""
    made = CallDetector(OFFERED, ALL.alternatives)
    released = ""
    for end, character in enumerate(text, start=1):
        released += text_of(made.push(character))
        held = text[len(released) : end]
        starts = ("\n", "`", "{", "[", "<")
        assert not held or held.startswith(starts)
        assert len(held) <= len('{"name": "Ada", "')
    assert released + text_of(made.flush()) == text


def test_the_held_back_text_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detector, "MAX_HELD", 40)
    assert whole(EMPTY) == ("", [NOW])
    assert whole(JSON) == (JSON, [])
    assert read([JSON])[1] == ["too_long"]
    made = CallDetector(OFFERED, ALL.alternatives)
    assert text_of(made.push(JSON)) == JSON
    deep = "[get_weather(city=" + "[" * 5_000
    assert whole(deep) == (deep, [])


@pytest.mark.parametrize(
    "opening", ["[get_weather(city=" + "[" * 200, "[now(" + "(" * 60, "[now(a=" + "-" * 9000]
)
def test_hostile_nesting_is_text(opening: str) -> None:
    text = opening + "1" + "]" * 300
    assert whole(text) == (text, [])
    assert read([f"[get_weather(city='x', days={'9' * 5000})]"])[1] != []


_parts = st.sampled_from(
    [
        JSON,
        PRETTY,
        EMPTY,
        QWEN3,
        "[now()]",
        "[get_weather(city='Paris')]",
        f"```json\n{JSON}\n```",
        "```json\n",
        "\n```",
        "```",
        "```js\n",
        "<tool_call>",
        "</tool_call>",
        "<tools>",
        "</tools>",
        f"<tool_call>\n{EMPTY}\n</tool_call>",
        "[",
        "]",
        "{",
        "}",
        ",",
        "; ",
        "\n",
        "\n\n",
        " ",
        "word",
        "\\",
        '"',
        "é",
        '{"name": "get_weather", ',
        '"arguments": {"city": "x"}}',
    ]
)
_texts = st.lists(_parts | st.text(max_size=3), max_size=8).map("".join)
_formats = st.sampled_from(sorted(FORMATS.values(), key=lambda f: f.name))


_offers = st.sampled_from([OFFERED, ENFORCED])


@settings(max_examples=examples(800))
@given(format=_formats, text=_texts, where=cuts, parallel=st.booleans(), offered=_offers)
def test_streamed_and_whole_are_the_same_however_the_text_is_cut(
    format: ToolFormat, text: str, where: list[int], parallel: bool, offered: Offered
) -> None:
    client, rejected = read(pieces(text, where), format, parallel, offered)
    assert (client, rejected) == read([text], format, parallel, offered)
    content, calls, errors = parse_tool_calls(text, format, offered, parallel)
    if not errors:
        assert client == Received(content, [[call.name, call.text] for call in calls])


@settings(max_examples=examples(300))
@given(text=_texts, offered=_offers)
def test_text_without_an_accepted_call_comes_through_unchanged(text: str, offered: Offered) -> None:
    made = CallDetector(offered, ALL.alternatives)
    content, events = made.push(text), made.flush()
    if not any(isinstance(event, CallBegin) for event in content + events):
        assert text_of(content + events) == text
    elif not offered.enforced:
        assert text.startswith(text_of(content))
        assert text_of(events) == ""


BEGINS = pytest.mark.parametrize(
    "before", ["", "\n ", "```json\n", "```\n", "``` json \n\n", "[", "```json\n[\n"]
)


@BEGINS
@pytest.mark.parametrize("format", [ALL, HERMES])
def test_an_enforced_call_that_begins_the_answer_is_sent_as_it_is_written(
    before: str, format: ToolFormat
) -> None:
    head, _, arguments = JSON[:-1].partition('"arguments": ')
    stream, client = ToolStream(format, ENFORCED), Received()
    client.take(stream.push(f'{before}{head}"arguments": '))
    assert client == Received()
    for end, character in enumerate(arguments, start=1):
        client.take(stream.push(character))
        assert client == Received("", [["get_weather", arguments[:end]]])
    closing = "\n```" if "`" in before else ""
    assert stream.push("}" + ("]" if "[" in before else "") + closing) == []
    assert stream.flush() == []
    assert (stream.undeclared, stream.rejected) == (1, ())


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"[{JSON}, {EMPTY}]", "", [PARIS, NOW]),
        (f"{JSON}\n{EMPTY}", "", [PARIS, NOW]),
        (f"```json\n{JSON}\n```\n\n```json\n{EMPTY}\n```", "", [PARIS, NOW]),
        (f"```json\n{JSON}\n``` {EMPTY}", "", [PARIS, NOW]),
        (f"```json\n{JSON}", "", [PARIS]),
        (f"```json\n{JSON}\n``", "", [PARIS]),
        (f"[{JSON}", "", [PARIS]),
        (f"```json\n{JSON}\n```\nThis asks for it.", "\nThis asks for it.", [PARIS]),
        (f"{JSON}\nThen:\n{EMPTY}", f"\nThen:\n{EMPTY}", [PARIS]),
        (f"{JSON}\n[now()]", "\n[now()]", [PARIS]),
        (f"{JSON}\n{QWEN3}", f"\n{QWEN3}", [PARIS]),
        (f'{JSON}\n{{"arguments": {{}}, "name": "now"}}', "", [PARIS, NOW]),
        (
            f'{JSON}, {{"name": "get_time", "arguments": {{}}}}',
            ', {"name": "get_time", "arguments": {}}',
            [PARIS],
        ),
        (f"{JSON}\n<tool_call>\n{EMPTY}\n</tool_call>", "", [PARIS, NOW]),
        (f"I look.\n{JSON}\nThis asks for it.", f"I look.\n{JSON}\nThis asks for it.", []),
        (f'{{"arguments": {{}}, "name": "now"}}\n{JSON}\nSo.', None, []),
        (f"{QWEN3}\n{JSON}\nSo.", None, []),
        (f"<tools>\n{JSON}\n</tools>\nSo.", None, []),
        (f"```json\t\n{JSON}\n```\nSo.", None, []),
        (f"{{{JSON}}}\nSo.", None, []),
        ('{"name": "get_time", "arguments": {}}', None, []),
        (r'{"name": "get\u005fweather", "arguments": {"city": "Paris"}} So.', None, []),
    ],
)
def test_text_after_enforced_calls_is_content(text: str, content: str | None, calls: list[ToolCall]) -> None:
    assert whole(text, offered=ENFORCED) == (text if content is None else content, calls)


def test_where_one_enforced_call_is_allowed_the_first_counts() -> None:
    assert whole(f"[{JSON}, {EMPTY}]", HERMES, False, ENFORCED) == (f", {EMPTY}]", [PARIS])


def test_an_enforced_call_that_breaks_off_stays_a_call_in_the_stream_and_text_in_the_whole() -> None:
    text = f"```json\n{JSON[:-4]}"
    assert read(list(text), HERMES, offered=ENFORCED) == (
        Received("", [["get_weather", '{"city": "Pari']]),
        ["cut"],
    )
    content, calls, errors = parse_tool_calls(text, HERMES, ENFORCED)
    assert (content, calls, len(errors)) == (text, [], 1)
    text = f"{JSON}\n{JSON.replace('Paris', 'x').replace(': {', ': {!')} and more"
    assert read([text], HERMES, offered=ENFORCED)[1] == ["syntax"]
    content, calls, errors = parse_tool_calls(text, HERMES, ENFORCED)
    assert (content, calls, len(errors)) == (text.removeprefix(JSON), [PARIS], 1)


def test_long_arguments_are_sent_in_linear_time() -> None:
    long = JSON.replace("Paris", "x" * 300_000)
    client, _ = read([long], HERMES, offered=ENFORCED)
    assert client.calls == [["get_weather", long[len('{"name": "get_weather", "arguments": ') : -1]]]
