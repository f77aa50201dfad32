"""What an answer must look like, from the command line: files and patterns to the options of `LLM.stream`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.constraints import Choice, Constraint, Json, Lark, Regex, Whitespace
from paceline.errors import ConstraintError, UsageError


def read_json(path: str) -> Any:
    """A file's data; - is standard input."""
    text = sys.stdin.read() if path == "-" else read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        name = "standard input" if path == "-" else path
        raise ConstraintError(f"{name} is not JSON ({problem})") from None


def read_schema(path: str) -> Any:
    data = read_json(path)
    if not isinstance(data, dict | bool):
        raise ConstraintError(f"{path} holds no schema: expected an object, true or false")
    return data


def read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read {path}: {reason}") from None


def answer_options(
    tools: str | None,
    tool_choice: str,
    schema: str | None,
    regex: str | None,
    lark: str | None,
    choice: Sequence[str],
    whitespace: Whitespace,
) -> dict[str, Any]:
    outputs: list[Constraint] = []
    if schema is not None:
        outputs.append(Json.of(read_schema(schema), whitespace))
    if regex is not None:
        outputs.append(Regex(regex))
    if lark is not None:
        outputs.append(Lark(read_text(lark)))
    if choice:
        outputs.append(Choice(tuple(choice)))
    if len(outputs) > 1:
        raise UsageError("--schema, --regex, --lark and --choice exclude one another: give one of them")
    return {
        "tools": _tools(tools),
        "tool_choice": tool_choice,
        "output": outputs[0] if outputs else None,
        "whitespace": whitespace,
    }


def _tools(path: str | None) -> list[dict[str, Any]] | None:
    if path is None:
        return None
    found = read_json(path)
    listed = found.get("tools", [found]) if isinstance(found, dict) else found
    if not isinstance(listed, list) or not listed:
        raise ConstraintError(
            f'{path} holds no tools: expected a list of {{"type": "function", "function": ...}}'
        )
    return listed
