"""Each token of an answer is of the kind of text it stands in."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.text import Tokenizer
from paceline.train.data.text_kind import TextKind, _kinds, text_kinds

MARKS = {"p": TextKind.PROSE, "c": TextKind.CODE, "s": TextKind.JSON_STRUCTURE, "v": TextKind.JSON_VALUE}
CASES = {
    "Just words [1] and {braces}.": "p" * 28,
    '<tool_call>[{"name": "f", "arguments": {"x": -1.5, "y": [true, "a\\"b"]}}]</tool_call>': (
        "s" * 22 + "v" + "s" * 22 + "vvvv" + "s" * 8 + "vvvv" + "sss" + "vvvv" + "s" * 17
    ),
    '<tool_call>\n{"a": 1}\n</tool_call>': "s" * 18 + "v" + "s" * 14,
    'So: {"a": "b c"} done': "pppp" + "s" * 7 + "vvv" + "ss" + "ppppp",
    "Code:\n```python\nx = {1: 2}\n```\nEnd": "p" * 6 + "c" * 24 + "pppp",
    "```\nnever closed": "c" * 16,
    '```json\n{"a": 1}\n```': "c" * 8 + "ssssss" + "v" + "s" + "cccc",
    '{"a": "cut of': "s" * 7 + "v" * 6,
    '{"a": 1, oops} then words': "ssssss" + "v" + "ss" + "p" * 16,
    "": "",
}


@pytest.mark.parametrize("text", CASES)
def test_characters_are_of_the_kind_they_stand_in(text: str) -> None:
    assert _kinds(text) == [MARKS[mark] for mark in CASES[text]]


@given(st.text(alphabet='{}[]":,`\n ab1\\<tool_call>/', max_size=60))
def test_any_text_has_a_kind_for_each_character(text: str) -> None:
    assert len(_kinds(text)) == len(text)


@pytest.mark.model
def test_tokens_follow_their_characters(smollm2_path: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_path)
    text = 'Let me see: é\n<tool_call>[{"name": "weather", "arguments": {"town": "Tromsø"}}]</tool_call>'
    tokens = tokenizer.encode(text, special=False)
    found = text_kinds(tokenizer, tokens)
    assert len(found) == len(tokens)
    value = b"".join(
        tokenizer.piece(t) for t, b in zip(tokens, found, strict=True) if b == TextKind.JSON_VALUE
    )
    assert value.decode() == "weatherTromsø"
    prose = b"".join(tokenizer.piece(t) for t, b in zip(tokens, found, strict=True) if b == TextKind.PROSE)
    assert prose.decode().startswith("Let me see: é")
    assert "name" not in prose.decode()
