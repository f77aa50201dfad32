"""Calls, prose and nonsense for the tests of tool calls."""

import itertools
from dataclasses import dataclass, field

from hypothesis import strategies as st

from paceline.text import FORMATS, CallDelta, Delta, ToolCall, ToolFormat, ToolStream

# Strings that look like the syntax around them, and every kind of character JSON must escape.
_awkward = st.sampled_from(
    [
        "}",
        "{",
        '"',
        "\\",
        "]",
        "</tool_call>",
        "<tool_call>",
        '"}',
        "[TOOL_CALLS]",
        "; ",
        "\n",
        "\x00",
        "ü☃👍🏽",
        "\\u",
    ]
)
_strings = st.lists(_awkward | st.text(max_size=4), max_size=4).map("".join)
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_strings, inner, max_size=3),
    max_leaves=6,
)
_names = st.text("abcxyz_-.09", min_size=1, max_size=8) | st.text(min_size=1, max_size=4)
calls = st.lists(
    st.builds(ToolCall, _names, st.dictionaries(_strings, _values, max_size=3)), min_size=1, max_size=3
)
# Calls within text; the format whose answers are messages is that of test_harmony.py.
IN_TEXT = {name: form for name, form in FORMATS.items() if not form.channels}
formats = st.sampled_from(sorted(IN_TEXT.values(), key=lambda f: f.name))

_prose_parts = st.sampled_from(
    [
        "\n",
        " ",
        "a",
        "word",
        "<",
        "<tool",
        "<tool_call",
        "[TOOL_",
        "[",
        '{"name',
        "{",
        "}",
        "]",
        "</tool_call>",
        "é",
    ]
)


def _is_prose(text: str) -> bool:
    marks = ("<tool_call>", "[TOOL_CALLS]", '{"name": "')
    return not any(mark in text for mark in marks)


prose = st.lists(_prose_parts | st.text(max_size=3), max_size=8).map("".join).filter(_is_prose)

# The only keys are the call's own: other members of a call's object are passed over, and these are not.
LETTERS = "αβγδεζηθ"
_CALL_PARTS = ('{"name": "', "f", '", "arguments": ', "{", '"name": "', "α", '"', "}", "}")
_SYNTAX = (*_CALL_PARTS, "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
_BITS = (*LETTERS, '", "parameters": ', '"arguments": {', "[", "]", ",", ";", "\\", "\n", " ", "1")
_any_part = st.sampled_from((*_SYNTAX, *_BITS))


@st.composite
def _spoiled_calls(draw: st.DrawFn) -> str:
    """Calls as some family writes them, with parts taken away, put in and doubled."""
    format = draw(formats)
    parts: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        parts += [
            format.begin,
            *_CALL_PARTS,
            format.end,
            draw(st.sampled_from(["\n", ", ", "; ", " β ", ""])),
        ]
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(parts) - 1))
        parts[at : at + 1] = draw(st.sampled_from([[], [parts[at]] * 2, [draw(_any_part), parts[at]]]))
    return "".join(parts)


garbage = _spoiled_calls() | st.lists(_any_part, max_size=14).map("".join)

cuts = st.lists(st.integers(0, 400), max_size=25)


def pieces(text: str, cuts: list[int]) -> list[str]:
    ends = sorted(c % (len(text) + 1) for c in cuts)
    return [text[a:b] for a, b in itertools.pairwise([0, *ends, len(text)])]


@dataclass
class Received:
    """The deltas as a client joins them."""

    content: str = ""
    calls: list[list[str]] = field(default_factory=list)  # name, arguments

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if not isinstance(delta, CallDelta):
                assert delta.text
                self.content += delta.text
            elif delta.name is not None:
                assert delta.index == len(self.calls)
                self.calls.append([delta.name, delta.arguments])
            else:
                assert delta.index == len(self.calls) - 1
                assert delta.arguments
                self.calls[-1][1] += delta.arguments


def received(parts: list[str], format: ToolFormat) -> Received:
    stream, client = ToolStream(format), Received()
    for part in parts:
        client.take(stream.push(part))
    client.take(stream.flush())
    return client
