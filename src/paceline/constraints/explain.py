"""Errors of llguidance in the user's terms."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from paceline.constraints.json_schema import parts

MAX_CHARACTERS: Final = 400  # characters of an explanation
_LONG_WORD: Final = re.compile(r"\S{61,}")
_POSITION: Final = re.compile(r"^(at )?\d+\(\d+\): ")
_KEYS: Final = re.compile(r"Unimplemented keys: (\[.*?\])")
# Patterns of the engine's messages, and the keyword of JSON Schema each is about.
_KEYWORDS: Final = (
    (re.compile(r"Unknown format: "), "format"),
    (re.compile(r"oneOf constraints"), "oneOf"),
    (re.compile(r"Invalid type: "), "type"),
    (
        re.compile(r"Resource '.*' is not present|Pointer '.*' does not exist|[Ff]ailed to resolve|\$ref"),
        "$ref",
    ),
    (re.compile(r"[Rr]egex|pattern"), "pattern"),
)
_HINTS: Final = {
    "oneOf": "its alternatives cannot be distinguished at once; anyOf is supported",
    "$ref": "only references inside the schema are followed",
    "format": "leave it out, or say it with pattern",
}


def explain(message: str, schema: Any = None) -> str:
    """One line: the unsupported feature, its JSON pointer in the schema, what to do."""
    return _cut(_explained(message, schema))


def _cut(line: str) -> str:
    """A message may quote a pattern or a name of any length."""
    line = _LONG_WORD.sub(lambda word: f"{word[0][:57]}...", line)
    return line if len(line) <= MAX_CHARACTERS else f"{line[:MAX_CHARACTERS]}..."


def _explained(message: str, schema: Any) -> str:
    reason, keywords = _reason(message)
    if schema is None or not keywords:
        return reason
    where = ", ".join(f"{word} at {pointer}" for word in keywords if (pointer := _find(schema, word, reason)))
    hint = next((_HINTS[word] for word in keywords if word in _HINTS), "")
    return f"{reason}{f' ({where})' if where else ''}{f': {hint}' if hint else ''}"


def _reason(message: str) -> tuple[str, list[str]]:
    """The first line without its position in the grammar, and the keywords it is about."""
    line = _POSITION.sub("", message.strip().splitlines()[0] if message.strip() else "no reason was given")
    line = line.removeprefix("failed to compile JSON schema: ").strip()
    if found := _KEYS.search(line):
        words = _loads(found[1])
        return f"{', '.join(words)} {'is' if len(words) == 1 else 'are'} not supported", words
    keywords = [word for pattern, word in _KEYWORDS if pattern.search(line)][:1]
    detail = [other.removeprefix("error: ") for other in message.splitlines() if other.startswith("error: ")]
    if line.endswith(":") and detail:
        return f"{line} {detail[0]}", keywords
    if "NoExtension" in line:
        return "no text fits: it refers to itself without end, or contradicts itself", ["$ref"]
    return line.split(". Enable ")[0], keywords


def _loads(text: str) -> list[str]:
    try:
        return [str(word) for word in json.loads(text)]
    except ValueError:
        return [text]


def _find(schema: Any, keyword: str, reason: str) -> str | None:
    """The JSON pointer of a keyword: the one whose value the reason names, if it names one."""
    matches = list(_pointers(schema, keyword, "#"))
    named = [pointer for pointer, value in matches if isinstance(value, str) and value and value in reason]
    return next(iter(named or [pointer for pointer, _ in matches]), None)


def _pointers(schema: Any, keyword: str, pointer: str) -> Iterator[tuple[str, Any]]:
    if isinstance(schema, Mapping) and keyword in schema:
        yield f"{pointer}/{keyword}", schema[keyword]
    for key, name, part in parts(schema):
        yield from _pointers(part, keyword, f"{pointer}/{key}" if name is None else f"{pointer}/{key}/{name}")
