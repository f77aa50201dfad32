"""Tool calls in the text: how a model is told of tools, and how its calls are read."""

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from paceline.errors import TextError
from paceline.text.tool_calls.formats import (
    HERMES,
    LLAMA3,
    MISTRAL,
    SMOLLM2,
    ToolCall,
    ToolFormat,
    render_calls,
)
from paceline.text.tool_calls.parser import ToolCallParser
from paceline.text.tool_calls.tool_events import CallArguments, CallBegin, CallEnd, CallError, TextEvent

_FENCE: Final = re.compile(r"```(?:json)?\s*\n(.*?)\n?\s*```", re.DOTALL)

# The SmolLM2 family's own tool prompt, shortened: the template of its smaller models has no place for tools.
_PROMPT: Final = """\
You are an expert in composing functions. You are given a question and a set of possible functions.
Based on the question, you will need to make one or more function/tool calls to achieve the purpose.
If none of the functions can be used, point it out.

You have access to the following tools:
<tools>%s</tools>

The output MUST strictly adhere to the following format, and NO other text MUST be included.
Please make sure the parameter type is correct. If no function call is needed, use an empty list '[]'.
<tool_call>[
{"name": "func_name1", "arguments": {"argument1": "value1", "argument2": "value2"}}
]</tool_call>"""


def tool_prompt(tools: Sequence[dict[str, Any]]) -> str:
    """System text that offers tools to a model whose template knows none."""
    return _PROMPT % json.dumps([t.get("function", t) for t in tools], ensure_ascii=False)


def without_tool_roles(messages: Sequence[dict[str, Any]], system: str) -> list[dict[str, Any]]:
    """The conversation in the roles every template has: system, user, assistant.

    `system`, if there is any, follows the conversation's own system text; calls become the assistant's text,
    and results the user's.
    """
    chat = [_plain_role(m) for m in messages]
    if not system:
        return chat
    if chat and chat[0].get("role") == "system":
        first = {**chat[0], "content": f"{chat[0].get('content') or ''}\n\n{system}".strip()}
        return [first, *chat[1:]]
    return [{"role": "system", "content": system}, *chat]


def text_of(parts: list[Any]) -> str:
    """The text of a content given in parts."""
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        raise TextError("a message's content holds parts that are not text: only text can be read")
    if not all(isinstance(part.get("text"), str) for part in parts):
        raise TextError("a message's content holds a part without its text: expected type and text")
    return "".join(part["text"] for part in parts)


def _plain_role(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = _calls(message.get("tool_calls") or [])
    if not calls:
        return {**message, "content": content}
    written = render_calls(
        [ToolCall(c.get("name") or "", _loaded(c.get("arguments"))) for c in calls], SMOLLM2
    )
    return {"role": message.get("role"), "content": f"{content}\n{written}".lstrip()}


def _calls(given: Any) -> list[dict[str, Any]]:
    found = (
        [c.get("function", c) if isinstance(c, dict) else c for c in given]
        if isinstance(given, list)
        else [given]
    )
    if not all(isinstance(call, dict) for call in found):
        raise TextError('tool_calls cannot be read: expected a list of {"function": {"name": ..., ...}}')
    return found


def parse_tool_calls(text: str, format: ToolFormat | None = None) -> tuple[str, list[ToolCall], list[str]]:
    """The text around the calls, the calls, and an error for each one that cannot be read.

    What cannot be read stays where it is in the text around; the error names its place. Without a format,
    calls are read as the first trigger in the text says; without any trigger, a message that is nothing
    but calls, as an object or a list, in a fence or not, is read too.
    """
    if format is not None:
        return _read(text, format)
    triggered = [(at, f) for f in (HERMES, MISTRAL) if (at := text.find(f.trigger)) >= 0]
    if triggered:
        return _read(text, min(triggered, key=lambda found: found[0])[1])
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
    reader = ToolCallParser(format)
    content: list[str] = []
    calls: list[ToolCall] = []
    errors: list[str] = []
    name = arguments = ""
    for event in [*reader.push(text), *reader.flush()]:
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
                    f"the tool call at character {event.at} {event.problem}: {_short(text[event.at :])}"
                )
                content.append(text[event.at : event.end])
    return "".join(content), calls, errors


def _loaded(arguments: Any) -> Any:
    """Arguments are sometimes written as JSON inside a string."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return arguments


def _short(text: str, most: int = 120) -> str:
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most else line[:most] + " ..."
