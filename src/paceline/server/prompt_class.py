"""What kind of text a request is after, from the request alone."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

PromptClass = Literal["code", "json", "chat", "tools"]

LOOK_AT: Final = 20_000  # characters, from the end
_FENCE: Final = re.compile(r"^[ \t]*(?:```|~~~)", re.M)
_CODE_LINE: Final = re.compile(
    r"\s*(?:(?:async )?def \w|class \w|(?:from \S+ )?import \w|#include|func(?:tion)? \w|fn \w|return\b"
    r"|(?:const|let|var) \w|(?:if|for|while)\b.*[:{]$|(?:public|private|static) \w|[@}])"
    r"|.*[;{]$"
)
_CODE_LINES: Final = 3
_CODE_SHARE: Final = 0.25


def prompt_class(
    messages_or_text: str | Sequence[Any], tools: Sequence[Any] | None = None, response_format: Any = None
) -> PromptClass:
    """The first of these that holds:

    tools: the request offers any.
    json: `response_format` asks for it (`json_object` or `json_schema`).
    code: the end of the prompt, or of the user's last message, has a fenced block, or at least three lines
        that look like code and make up a quarter of it.
    chat: everything else.
    """
    if tools:
        return "tools"
    if isinstance(response_format, Mapping) and response_format.get("type") in ("json_object", "json_schema"):
        return "json"
    text = messages_or_text if isinstance(messages_or_text, str) else _last_user_text(messages_or_text)
    return "code" if _like_code(text[-LOOK_AT:]) else "chat"


def _like_code(text: str) -> bool:
    if _FENCE.search(text):
        return True
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    code = sum(_CODE_LINE.match(line) is not None for line in lines)
    return code >= max(_CODE_LINES, _CODE_SHARE * len(lines))


def _last_user_text(messages: Sequence[Any]) -> str:
    for message in reversed(messages):
        if isinstance(message, Mapping) and message.get("role") == "user":
            return _text(message.get("content"))
    return ""


def _text(content: Any) -> str:
    """A message's text, also where it comes in parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    parts = (part.get("text") for part in content if isinstance(part, Mapping))
    return "\n".join(part for part in parts if isinstance(part, str))
