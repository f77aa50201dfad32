"""The conversation of a request: a hash that the turns of an agent run share."""

import hashlib
import json
from collections.abc import Mapping
from itertools import islice
from typing import Any, Final

from paceline.web.api_keys import Key

HEADER: Final = "x-conversation-id"  # a client's own name for it
PROMPT_CHARS: Final = 1000  # of a prompt that is no chat: its beginning tells conversations apart
MAX_CHARS: Final = 4096  # of a text, at its beginning and at its end: a long one is not hashed whole
MAX_PARTS: Final = 32  # of a list or an object


def conversation_of(headers: Mapping[str, str], key: Key | None, body: Mapping[str, Any]) -> str:
    """A hash that all requests of one conversation share, and few others: whole agent runs have one.

    Of the client's own id for it, or else of everything up to its first user message.
    """
    named = headers.get(HEADER)
    start = {"id": named} if named else {"start": _excerpt(_start(body)), "user": _excerpt(body.get("user"))}
    text = json.dumps([key.name if key else "", start], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()


def _start(body: Mapping[str, Any]) -> Any:
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, list):
        roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
        end = roles.index("user") + 1 if "user" in roles else 1
        return [body.get("instructions"), messages[:end]]
    prompt = messages if isinstance(messages, str) else body.get("prompt")
    return prompt[:PROMPT_CHARS] if isinstance(prompt, str) else prompt


def _excerpt(value: Any) -> Any:
    """The same value if it is small: a body of megabytes must not hold up the event loop."""
    if isinstance(value, str) and len(value) > 2 * MAX_CHARS:
        return [value[:MAX_CHARS], len(value), value[-MAX_CHARS:]]
    if isinstance(value, list):
        return [_excerpt(part) for part in value[:MAX_PARTS]]
    if isinstance(value, dict):
        return {name: _excerpt(part) for name, part in islice(value.items(), MAX_PARTS)}
    return value
