"""Reads the tool calls of a whole text."""

import json
import re
from typing import Final

from paceline.text.tool_calls.formats import (
    HERMES,
    LLAMA3,
    MISTRAL,
    ToolCall,
    ToolFormat,
)
from paceline.text.tool_calls.parser import (
    CallArguments,
    CallBegin,
    CallEnd,
    CallError,
    TextEvent,
    ToolCallParser,
)

_FENCE: Final = re.compile(r"```(?:json)?\s*\n(.*?)\n?\s*```", re.DOTALL)


def parse_tool_calls(text: str, format: ToolFormat | None = None) -> tuple[str, list[ToolCall], list[str]]:
    """The text around the calls, the calls, and an error for each one that cannot be read.

    A call that cannot be read stays in the text; its error names the position. Without a format, the first
    trigger in the text decides; without a trigger, a message is read that is nothing but calls, as an object
    or a list, fenced or not.
    """
    if format is not None:
        return _read(text, format)
    triggered = [(at, f) for f in (HERMES, MISTRAL) if (at := text.find(f.trigger)) >= 0]
    if triggered:
        return _read(text, min(triggered, key=lambda match: match[0])[1])
    bare = _bare_calls(text)
    return ("", bare, []) if bare else (text, [], [])


def _bare_calls(text: str) -> list[ToolCall]:
    """The calls of a message that is wholly calls; none if any part of it is something else."""
    fenced = _FENCE.fullmatch(text.strip())
    body = fenced.group(1) if fenced else text.strip()
    for written, format in ((body, LLAMA3), (f"{HERMES.begin}{body}{HERMES.end}", HERMES)):
        content, calls, errors = _read(written, format)
        if calls and not content and not errors:
            return calls
    return []


def _read(text: str, format: ToolFormat) -> tuple[str, list[ToolCall], list[str]]:
    parser = ToolCallParser(format)
    content: list[str] = []
    calls: list[ToolCall] = []
    errors: list[str] = []
    name = arguments = ""
    for event in [*parser.push(text), *parser.flush()]:
        match event:
            case TextEvent():
                content.append(event.text)
            case CallBegin():
                name, arguments = event.name, ""
            case CallArguments():
                arguments += event.text
            case CallEnd():
                calls.append(ToolCall(name, json.loads(arguments), arguments))
            case CallError():
                errors.append(
                    f"the tool call at character {event.at} {event.reason}: {_short(text[event.at :])}"
                )
                content.append(text[event.at : event.end])
    return "".join(content), calls, errors


def _short(text: str, limit: int = 120) -> str:
    line = " ".join(text[: 4 * limit].split())
    return line if len(line) <= limit else line[:limit] + " ..."
