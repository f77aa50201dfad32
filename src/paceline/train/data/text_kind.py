"""The kind of text of each token: prose, code, JSON structure or JSON value. Acceptance differs by kind."""

import re
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.text import FORMATS, Tokenizer
from paceline.text.tool_calls.json_scanner import JsonScanner


class TextKind(IntEnum):
    PROSE = 0
    CODE = 1
    JSON_STRUCTURE = 2  # brackets, commas, keys, quotes, and the marks around a tool call
    JSON_VALUE = 3  # inside the quotes of a value; numbers, true, false, null


_TAGS: Final = sorted(
    {
        mark
        for form in FORMATS.values()
        for mark in (form.trigger, form.end, *form.other_triggers, *form.other_marks, "</tool_call>")
        if mark and not mark.startswith(("{", "]", "\n"))
    },
    key=len,
    reverse=True,
)
# A fence that is not closed reaches to the end.
_FENCE: Final = re.compile(r"```[^\n`]*\n(?P<code>.*?)(?:```|\Z)", re.DOTALL)
_JSON: Final = re.compile(r'\{\s*["}]|\[\s*[\[{"]')
_NEXT: Final = re.compile("|".join((*map(re.escape, _TAGS), _JSON.pattern, "```")))
_MIN_JSON: Final = 4  # characters: less is a bracket in prose


def text_kinds(tokenizer: Tokenizer, tokens: Sequence[int]) -> NDArray[np.uint8]:
    """[tokens]: the kind of most bytes of a token; the first of equals."""
    pieces = [tokenizer.piece(token) for token in tokens]
    text = b"".join(pieces).decode("latin-1")  # a character is a byte
    kinds = np.frombuffer(bytes(_kinds(text)), np.uint8)
    made, at = np.zeros(len(pieces), np.uint8), 0
    for i, piece in enumerate(pieces):
        counts = np.bincount(kinds[at : at + len(piece)], minlength=len(TextKind))
        made[i] = _first_of_most(counts, kinds[at : at + len(piece)])
        at += len(piece)
    return made


def _first_of_most(counts: NDArray[np.intp], kinds: NDArray[np.uint8]) -> int:
    most = counts.max()
    return next((int(kind) for kind in kinds if counts[kind] == most), int(TextKind.PROSE))


def _kinds(text: str) -> list[TextKind]:
    """One kind for each character."""
    kinds: list[TextKind] = []
    while len(kinds) < len(text):
        match = _NEXT.search(text, len(kinds))
        end = len(text) if match is None else match.start()
        blank = not text[len(kinds) : end].strip()
        joins = blank and kinds[-1:] == [TextKind.JSON_STRUCTURE]  # a line break between a mark and its call
        kinds += [TextKind.JSON_STRUCTURE if joins else TextKind.PROSE] * (end - len(kinds))
        if match is not None:
            kinds += _region(text, match)
    return kinds


def _region(text: str, match: re.Match[str]) -> Iterator[TextKind]:
    """Kinds of the characters from a mark on that are not prose; at least one."""
    mark, start = match[0], match.start()
    if mark == "```":
        yield from _fenced(text, start)
    elif mark in _TAGS:
        yield from [TextKind.JSON_STRUCTURE] * len(mark)
    else:
        kinds = list(_json(text, start))
        yield from kinds if len(kinds) >= _MIN_JSON else [TextKind.PROSE]


def _fenced(text: str, start: int) -> Iterator[TextKind]:
    fence = _FENCE.match(text, start)
    if fence is None:
        yield from [TextKind.PROSE] * 3
        return
    code = list(_json(text, fence.start("code"))) if _JSON.match(fence["code"].lstrip()) else []
    code = code[: len(fence["code"])]
    before = fence.start("code") - start
    yield from [TextKind.CODE] * before
    yield from code
    yield from [TextKind.CODE] * (len(fence[0]) - before - len(code))


def _json(text: str, start: int) -> Iterator[TextKind]:
    """Kinds of one JSON value, or of as much as is valid."""
    scanner = JsonScanner()
    for at in range(start, len(text)):
        inside = scanner.in_value
        if not scanner.feed(text[at]):
            return
        opens = text[at] == '"' and not inside
        yield TextKind.JSON_VALUE if scanner.in_value and not opens else TextKind.JSON_STRUCTURE
        if not scanner.depth and text[at] in "]}":
            return
