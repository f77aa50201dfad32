"""The JSON of one tool call: its name, and its arguments exactly as written."""

import json
import re
from typing import Any, Final

_STRING: Final = r'"(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"'
_GAP: Final = r"[ \t\r\n]*"
CALL_HEAD: Final = re.compile(  # a call up to its arguments, in the usual order; group 1 is the name
    rf'\{{{_GAP}(?:"(?:type|id)"{_GAP}:{_GAP}"[^"\\]*"{_GAP},{_GAP})*"name"{_GAP}:{_GAP}({_STRING}){_GAP},'
    rf'{_GAP}"(?:arguments|parameters)"{_GAP}:{_GAP}'
)
_KEY: Final = re.compile(rf"{_GAP},?{_GAP}({_STRING}){_GAP}:{_GAP}")
_DECODER: Final = json.JSONDecoder(strict=False)


def decoded_name(written: str) -> str | None:
    name = json.loads(written, strict=False)
    return name if isinstance(name, str) and _is_unicode(name) else None


def _is_unicode(text: str) -> bool:
    """No lone surrogate, such as \\ud800 in JSON: it cannot be encoded as UTF-8."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _members(written: str) -> dict[str, tuple[Any, str]]:
    """An object's members: each value, and the text it was read from."""
    members: dict[str, tuple[Any, str]] = {}
    at = 1
    while key := _KEY.match(written, at):
        value, at = _DECODER.raw_decode(written, key.end())
        name = json.loads(key[1], strict=False)
        if name in members:
            raise ValueError("a member occurs twice")
        members[name] = value, written[key.end() : at]
    return members


def read_call(written: str) -> tuple[str, str] | None:
    """The name, and the arguments' JSON."""
    try:
        members = _members(written)
        name, _ = members.get("name", (None, ""))
        values = [members[key] for key in ("arguments", "parameters") if key in members]
        value, text = values[0] if len(values) == 1 else (None, "")
        if isinstance(value, str):  # JSON inside a string
            value, text = json.loads(value, strict=False), value
    except (ValueError, RecursionError):
        return None
    if not isinstance(name, str) or not _is_unicode(name) or not isinstance(value, dict):
        return None
    return name, text if _is_strict(text) else json.dumps(value, ensure_ascii=False)


def _is_strict(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def has_only_other_members(rest: str) -> bool:
    """Whether the members after the arguments are neither name nor arguments."""
    try:
        return not {"name", "arguments", "parameters"} & _members(f'{{"": 0{rest}').keys()
    except ValueError:
        return False
