"""The harmony format of gpt-oss. Texts and token ids are those of github.com/openai/harmony, if not said."""

from typing import Any

import pytest

from paceline.text import (
    FORMATS,
    CallDelta,
    ContentDelta,
    Delta,
    Detokenizer,
    ReasoningDelta,
    ToolCall,
    ToolStream,
    parse_tool_calls,
    render_calls,
    tool_format,
)

HARMONY = FORMATS["harmony"]
SUM = (
    '<|channel|>analysis<|message|>User asks: "What is 2 + 2?" Simple arithmetic. Provide answer.<|end|>'
    "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>"
)
WEATHER = (
    "<|channel|>analysis<|message|>Need to use function get_weather.<|end|><|start|>assistant<|channel|>"
    'commentary to=functions.get_weather <|constrain|>json<|message|>{"location":"San Francisco"}<|call|>'
)
PREAMBLE = (
    "<|channel|>analysis<|message|>{long chain of thought}<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>**Action plan**:\n1. Generate an HTML file\n---\nWill start<|end|><|start|>assistant<|channel"
    '|>commentary to=functions.generate_file<|constrain|>json<|message|>{"template": "basic_html"}<|call|>'
)
SEARCH = (
    "<|channel|>analysis<|message|>Let's browse to confirm.<|end|><|start|>assistant<|channel|>commentary "
    'to=browser.search code<|message|>{"query": "current US president July 2025"}<|call|>'
)
ROLE_FIRST = (
    "<|start|>assistant to=functions.get_weather<|channel|>commentary<|constrain|>json<|message|>"
    '{"location": "Tokyo"}<|end|>'
)


def read(pieces: Any, calls: bool = True, within: bool = False) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content and calls of a stream."""
    stream, deltas = ToolStream(HARMONY, calls=calls, within=within), list[Delta]()
    for piece in pieces:
        deltas += stream.push(piece)
    deltas += stream.flush()
    made: dict[int, tuple[str, str]] = {}
    for delta in deltas:
        if isinstance(delta, CallDelta):
            name, arguments = made.get(delta.index, ("", ""))
            made[delta.index] = (name or delta.name or "", arguments + delta.arguments)
    thought = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    return thought, content, [made[i] for i in sorted(made)]


SUM_THOUGHT = 'User asks: "What is 2 + 2?" Simple arithmetic. Provide answer.'
CASES: list[tuple[str, tuple[str, str, list[tuple[str, str]]]]] = [
    (SUM, (SUM_THOUGHT, "2 + 2 = 4.", [])),
    (
        WEATHER,
        ("Need to use function get_weather.", "", [("get_weather", '{"location":"San Francisco"}')]),
    ),
    (
        PREAMBLE,
        (
            "{long chain of thought}",
            "**Action plan**:\n1. Generate an HTML file\n---\nWill start",
            [("generate_file", '{"template": "basic_html"}')],
        ),
    ),
    (SEARCH, ('Let\'s browse to confirm.{"query": "current US president July 2025"}', "", [])),
    (ROLE_FIRST, ("", "", [("get_weather", '{"location": "Tokyo"}')])),
    ("<|channel|>commentary Hello<|end|>", ("", "Hello", [])),
    # Not of the library: what a model may write all the same.
    (" to=functions.now<|channel|>commentary json<|message|><|call|>", ("", "", [("now", "{}")])),
    ("No header at all.", ("", "No header at all.", [])),
    ("<|channel|>analysis<|message|>a <b> <| c<|channel|>final<|message|>d", ("a <b> <| c", "d", [])),
    ("<|channel|>final<|message|>x<|end|>\n<|start|>assistant<|channel|>final<|message|>y", ("", "xy", [])),
    (
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "b\n<|x"} \n<|call|>',
        ("", "", [("f", '{"a": "b\\n<|x"}')]),
    ),
    ("<|channel|>analysis<|message|>cut", ("cut", "", [])),
    ("<|channel|>fin", ("", "", [])),
    ("\n to=functions.f<|channel|>commentary<|message|>{}", ("", "", [("f", "{}")])),
    ("\n<|message|>hi", ("", "hi", [])),
    ("<|end|>\n<|end|> hi<|end|>", ("", "hi", [])),
    (" \n hi", ("", "hi", [])),
    ("to=5 \n", ("", "to=5 \n", [])),
    (" \nto=5", ("", "to=5", [])),
    ("<|channel|>analysis<|channel|>final<|message|>42", ("", "42", [])),
    ("<|channel|>analysis<|channel|>final 42<|end|>", ("", "42", [])),
    # Headers have at most 400 characters, blanks before them not counted.
    (f"\n<|channel|>{'x' * 378}<|message|>hi", ("", "hi", [])),
    (f"<|channel|>{'x' * 379}<|message|>hi", ("", f"<|channel|>{'x' * 379}<|message|>hi", [])),
    (f" to={'x' * 500}<|end|>hi", ("", f"to={'x' * 500}hi", [])),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_channels_become_reasoning_content_and_calls(
    text: str, expected: tuple[str, str, list[tuple[str, str]]]
) -> None:
    assert read([text]) == expected
    assert read(text) == expected  # one character at a time
    for cut in range(1, len(text)):
        assert read([text[:cut], text[cut:]]) == expected
    content, calls, errors = parse_tool_calls(text, HARMONY)
    assert (content, [(call.name, call.text) for call in calls], errors) == (expected[1], expected[2], [])


@pytest.mark.parametrize(
    ("arguments", "problem"), [('{"a": 1', "it has no end"), ("[1]", "no JSON object"), ("a=1", "no JSON")]
)
def test_a_call_whose_arguments_are_no_object_stays_in_the_text(arguments: str, problem: str) -> None:
    text = f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{arguments}"
    content, calls, errors = parse_tool_calls(f"{text}<|call|>", HARMONY)
    assert (content, calls) == (text, [])
    assert problem in errors[0]


def test_without_tools_a_call_is_reasoning() -> None:
    assert read([WEATHER], calls=False) == (
        'Need to use function get_weather.{"location":"San Francisco"}',
        "",
        [],
    )


def test_an_answer_may_continue_a_message_of_the_prompt() -> None:
    text = " and more.<|end|><|start|>assistant<|channel|>analysis<|message|>Hm."
    assert read([text], within=True) == ("Hm.", " and more.", [])


@pytest.mark.parametrize("blank", ["", " \n"])
def test_a_call_cut_off_before_its_arguments_is_none(blank: str) -> None:
    text = f"Yes.<|start|>assistant<|channel|>commentary to=functions.delete_all<|message|>{blank}"
    stream = ToolStream(HARMONY)
    assert [*stream.push(text), *stream.flush(cut_off=True)] == [ContentDelta("Yes.")]
    assert stream.rejected == ("cut",)
    content, calls, errors = parse_tool_calls(text, HARMONY, cut_off=True)
    assert (content, calls) == ("Yes.", [])
    assert "it has no end" in errors[0]
    ended = f"{text}<|call|>"
    assert parse_tool_calls(ended, HARMONY, cut_off=True)[1] == [ToolCall("delete_all", {})]


# The example of the library's streaming parser (docs/format.md), token by token.
TOKENS = [200005, 35644, 200008, 1844, 31064, 25, 392, 4827, 382, 220, 17, 659, 220, 17, 16842, 12295, 81645]
TOKENS += [13, 51441, 6052, 13, 200007, 200006, 173781, 200005, 17196, 200008, 17, 659, 220, 17, 314, 220, 19]
TOKENS += [13, 200002]
PIECES = (
    '<|channel|>|analysis|<|message|>|User| asks|:| "|What| is| |2| +| |2|?"| Simple| arithmetic|.| Provide'
)
PIECES += "| answer|.|<|end|>|<|start|>|assistant|<|channel|>|final|<|message|>|2| +| |2| =| |4|.|<|return|>"


class Harmony:
    """The tokens of the example, of a vocabulary of 201,088."""

    strips_first_space = False

    def __init__(self) -> None:
        marks = {"<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|return|>"}
        hidden = PIECES.replace("<|", "<\0").replace("|>", "\0>").split("|")
        self._pieces = dict(zip(TOKENS, (piece.replace("\0", "|") for piece in hidden), strict=True))
        self.control = {token for token, piece in self._pieces.items() if piece in marks}

    def shown(self, token: int, skip_special: bool) -> bytes:
        return b"" if skip_special and token in self.control else self._pieces[token].encode()


def test_the_example_of_the_streaming_parser() -> None:
    tokenizer = Harmony()
    shown = Detokenizer(tokenizer, keep=frozenset(tokenizer.control))
    assert read([*map(shown.push, TOKENS), shown.flush()]) == (SUM_THOUGHT, "2 + 2 = 4.", [])


def test_the_format_is_that_of_the_template_and_writes_what_it_reads() -> None:
    assert tool_format('{{ "<|start|>assistant<|channel|>final<|message|>" }}{{ tools }}') is HARMONY
    call = ToolCall("get_weather", {"location": "San Francisco"})
    assert parse_tool_calls(render_calls([call, call], HARMONY), HARMONY) == ("", [call, call], [])
