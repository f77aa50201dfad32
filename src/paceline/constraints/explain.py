"""Why a grammar cannot be enforced, in the user's terms."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from paceline.constraints.json_schema import parts

MAX_CHARACTERS: Final = 400  # characters of an explanation
_LONG_WORD: Final = re.compile(r"\S{61,}")
_POSITION: Final = re.compile(r"^(at )?\d+\(\d+\): ")
_KEYS: Final = re.compile(r"Unimplemented keys: (\[.*?\])")
# What the engine says, and the keyword of JSON Schema that it is about.
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
    "oneOf": "its alternatives are not told apart at once; anyOf is supported",
    "$ref": "only references inside the schema are followed",
    "format": "leave it out, or say it with pattern",
}


def explain(message: str, schema: Any = None) -> str:
    """One line: what is not supported, where it stands in the schema, what to do."""
    return _cut(_explained(message, schema))


def _cut(line: str) -> str:
    """What the engine says may repeat a pattern or a name, however long that is."""
    line = _LONG_WORD.sub(lambda word: f"{word[0][:57]}...", line)
    return line if len(line) <= MAX_CHARACTERS else f"{line[:MAX_CHARACTERS]}..."


def _explained(message: str, schema: Any) -> str:
    reason, keywords = _reason(message)
    if schema is None or not keywords:
        return reason
    where = ", ".join(f"{word} at {place}" for word in keywords if (place := _find(schema, word, reason)))
    hint = next((_HINTS[word] for word in keywords if word in _HINTS), "")
    return f"{reason}{f' ({where})' if where else ''}{f': {hint}' if hint else ''}"


def _reason(message: str) -> tuple[str, list[str]]:
    """The first line that says something, without where the engine was, and the keywords it is about."""
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
    """Where a keyword stands, as a JSON pointer: with the value that the reason names, if it names one."""
    found = [(place, value) for place, value in _places(schema, keyword, "#")]
    named = [place for place, value in found if isinstance(value, str) and value and value in reason]
    return next(iter(named or [place for place, _ in found]), None)


def _places(schema: Any, keyword: str, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(schema, Mapping) and keyword in schema:
        yield f"{place}/{keyword}", schema[keyword]
    for key, name, part in parts(schema):
        yield from _places(part, keyword, f"{place}/{key}" if name is None else f"{place}/{key}/{name}")
