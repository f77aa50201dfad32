"""Why a grammar cannot be enforced, in the user's terms."""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

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
    reason = _reason(message)
    keywords = _named(reason)
    if schema is None or not keywords:
        return reason
    where = ", ".join(f"{word} at {place}" for word in keywords if (place := _find(schema, word)) is not None)
    hint = next((_HINTS[word] for word in keywords if word in _HINTS), "")
    return f"{reason}{f' ({where})' if where else ''}{f': {hint}' if hint else ''}"


def _reason(message: str) -> str:
    """The first line that says something, without where the engine was."""
    line = _POSITION.sub("", message.strip().splitlines()[0] if message.strip() else "no reason was given")
    line = line.removeprefix("failed to compile JSON schema: ").strip()
    detail = [other.removeprefix("error: ") for other in message.splitlines() if other.startswith("error: ")]
    if line.endswith(":") and detail:
        return f"{line} {detail[0]}"
    found = _KEYS.search(line)
    if found:
        words = _loads(found[1])
        return f"{', '.join(words)} {'is' if len(words) == 1 else 'are'} not supported"
    return line.split(". Enable ")[0]


def _named(reason: str) -> list[str]:
    if reason.endswith("not supported") and "constraints" not in reason:
        return reason.rsplit(" ", 3)[0].split(", ")
    return [word for pattern, word in _KEYWORDS if pattern.search(reason)][:1]


def _loads(text: str) -> list[str]:
    try:
        return [str(word) for word in json.loads(text)]
    except ValueError:
        return [text]


def _find(schema: Any, keyword: str) -> str | None:
    """Where a keyword stands, as a JSON pointer: the first of several."""
    return next((f"#/{place}" for place in _places(schema, keyword)), None)


def _places(value: Any, keyword: str, path: str = "") -> Iterator[str]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        here = f"{path}{key}"
        if key == keyword:
            yield here
        yield from _places(inner, keyword, here + "/")
