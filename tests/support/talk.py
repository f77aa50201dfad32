"""Conversations for the tests of training data, in the form agents record them."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}},
            "required": ["town"],
        },
    },
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def called(town: str, id: str = "call_0") -> dict[str, Any]:
    function = {"name": "weather", "arguments": json.dumps({"town": town})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": id, "type": "function", "function": function}],
    }


def result(text: str, id: str = "call_0") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


def record(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), "tools": [WEATHER], **more}


def write(path: Path, records: Iterable[dict[str, Any]], *raw: str) -> Path:
    text = "\n".join([*map(json.dumps, records), *raw]) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path
