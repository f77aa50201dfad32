"""Tool calls in the text: how a model is told of tools, and how its calls are read."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.errors import TextError

_CALL: Final = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)  # a last call may lack its end
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


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


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
    return "".join(str(part.get("text", "")) for part in parts)


def _plain_role(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [c.get("function", c) for c in message.get("tool_calls") or ()]
    if not calls:
        return {**message, "content": content}
    written = json.dumps(
        [{"name": c.get("name"), "arguments": _loaded(c.get("arguments"))} for c in calls], ensure_ascii=False
    )
    return {"role": message.get("role"), "content": f"{content}\n<tool_call>{written}</tool_call>".lstrip()}


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall], list[str]]:
    """The text around the calls, the calls, and an error for each one that cannot be read.

    Reads <tool_call>{...}</tool_call>, <tool_call>[{...}, ...]</tool_call>, and a message that is nothing
    but such an object or list.
    """
    calls: list[ToolCall] = []
    errors: list[str] = []
    bodies = _CALL.findall(text)
    if not bodies:
        bare = _bare_calls(text)
        return ("", bare, []) if bare else (text, [], [])
    for body in bodies:
        _read_body(body.strip(), calls, errors)
    return _CALL.sub("", text).strip(), calls, errors


def _bare_calls(text: str) -> list[ToolCall]:
    """The calls of a message that is wholly calls; none if any part of it is something else."""
    stripped = text.strip()
    fenced = _FENCE.fullmatch(stripped)
    calls: list[ToolCall] = []
    errors: list[str] = []
    _read_body(fenced.group(1).strip() if fenced else stripped, calls, errors)
    return [] if errors else calls


def _read_body(body: str, calls: list[ToolCall], errors: list[str]) -> None:
    if body.startswith("{{") and body.endswith("}}"):  # Qwen2.5-Coder's own template shows calls this way
        body = body[1:-1]
    try:
        found = json.loads(body, strict=False)
    except (ValueError, RecursionError) as problem:
        errors.append(f"the tool call is not valid JSON ({problem}): {_short(body)}")
        return
    for item in found if isinstance(found, list) else [found]:
        call = _read_call(item)
        if call is None:
            errors.append(
                f'a tool call needs "name" (text) and "arguments" (an object): {_short(json.dumps(item))}'
            )
        else:
            calls.append(call)


def _read_call(item: Any) -> ToolCall | None:
    if not isinstance(item, dict):
        return None
    name = item.get("name")
    arguments = _loaded(item.get("arguments", item.get("parameters")))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(name, arguments)


def _loaded(arguments: Any) -> Any:
    """Arguments are sometimes written as JSON inside a string."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return arguments


def _short(text: str, most: int = 120) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[:most] + " ..."
