"""Messages of a request and its outputs in the shape of the OpenTelemetry GenAI conventions."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.output import RequestOutput
from paceline.text.tool_calls.parse import text_of
from paceline.trace.record import write_json


def input_messages(messages: Sequence[Any] | None, prompt: Any) -> str:
    """JSON of a chat, or of a prompt or several."""
    if messages is not None:
        return write_json([_message(message) for message in messages])
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    prompts = prompt if several else [prompt]
    return write_json([{"role": "user", "parts": _texts(one)} for one in prompts])


def output_messages(outputs: Sequence[RequestOutput]) -> str:
    """JSON of every output."""
    return write_json([_answer(output) for output in outputs])


def first_user_text(messages: Sequence[Any]) -> str:
    """The text of the first user message: all turns of a conversation share it."""
    content = next((m.get("content") for m in messages if m.get("role") == "user"), "")
    return text_of(content) if isinstance(content, list) else str(content or "")


def _answer(output: RequestOutput) -> dict[str, Any]:
    calls = [{"type": "tool_call", "name": name, "arguments": arguments} for name, arguments in output.calls]
    return {
        "role": "assistant",
        "parts": [*_texts(output.content), *calls],
        "finish_reason": output.finish_reason if output.finish in ("stop", "length") else "error",
    }


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if message.get("role") == "tool":
        answer = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}
        return {"role": "tool", "parts": [answer]}
    calls = [{"type": "tool_call", **_call(call)} for call in message.get("tool_calls") or ()]
    return {"role": message.get("role"), "parts": [*_texts(content), *calls]}


def _call(call: Any) -> dict[str, Any]:
    """Templates take calls of many shapes; one of an unknown shape is empty here."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return {}
    return {"id": call.get("id"), "name": function.get("name"), "arguments": function.get("arguments")}


def _texts(content: Any) -> list[dict[str, Any]]:
    if not content:
        return []
    parts = content if isinstance(content, list) and isinstance(content[0], Mapping) else [{"text": content}]
    return [{"type": "text", "content": part.get("text")} for part in parts if isinstance(part, Mapping)]
