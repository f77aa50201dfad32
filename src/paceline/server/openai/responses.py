"""/v1/responses: requests become chats; answers become items, whole or as a stream of events."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from paceline.server.choice import Choice, Piece, usage
from paceline.server.openai.protocol import ChatRequest, Message
from paceline.server.openai.responses_events import Event, Items, copied
from paceline.server.openai.responses_protocol import (
    CallItem,
    FunctionTool,
    Item,
    JsonSchema,
    MessageItem,
    NamedTool,
    ResponsesRequest,
    TextSettings,
    read_items,
    read_text,
    read_tools,
)
from paceline.strings import short
from paceline.text import Tokenizer
from paceline.web.api_errors import ApiError

_ERROR_CODES: Final = {429: "rate_limit_exceeded", 400: "invalid_prompt"}  # by status; else server_error
_SAME: Final = (
    "model",
    "parallel_tool_calls",
    "temperature",
    "top_p",
    "stream",
    "user",
    "metadata",
    "service_tier",
    "prompt_cache_key",
    "safety_identifier",
    "seed",
    "speculative_config",
    "priority",
    "learn",
)


def as_chat(asked: ResponsesRequest) -> ChatRequest:
    """The same request to /v1/chat/completions."""
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    tools = read_tools(asked.tools or ())
    given: dict[str, Any] = {name: getattr(asked, name) for name in _SAME}
    given |= {
        "messages": _messages(asked),
        "max_completion_tokens": asked.max_output_tokens,
        "response_format": _response_format(asked.text),
    }
    if tools:
        given |= {"tools": [_chat_tool(tool) for tool in tools]}
    if asked.tool_choice is not None:
        given["tool_choice"] = _tool_choice(asked.tool_choice, tools)
    return ChatRequest(**given)


def _messages(asked: ResponsesRequest) -> list[Message]:
    if not asked.input:
        raise ApiError(400, "input is empty: give a text or a list of items", param="input")
    chat: list[Message] = []
    if asked.instructions:
        chat.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        return [*chat, {"role": "user", "content": asked.input}]
    called: set[str] = set()
    for i, item in enumerate(read_items(asked.input)):
        _add(chat, item, f"input[{i}]", called)
    return chat


def _add(chat: list[Message], item: Item, where: str, called: set[str]) -> None:
    """Appends an item to the conversation; some belong to the message before them."""
    last = chat[-1] if chat else None
    if isinstance(item, MessageItem):
        role = "system" if item.role == "developer" else item.role
        text = read_text(item.content, f"{where}.content")
        if role == "system" and last is not None and last["role"] == "system":
            last["content"] += f"\n\n{text}"  # templates know one system message, the first
        else:
            chat.append({"role": role, "content": text})
    elif isinstance(item, CallItem):
        called.add(item.call_id)
        call = {
            "id": item.call_id,
            "type": "function",
            "function": {"name": item.name, "arguments": item.arguments},
        }
        if last is not None and last["role"] == "assistant":
            last.setdefault("tool_calls", []).append(call)
        else:
            chat.append({"role": "assistant", "content": None, "tool_calls": [call]})
    else:
        if item.call_id not in called:
            raise ApiError(
                400,
                f"{where}: no function_call before it has call_id {short(item.call_id)}",
                param=f"{where}.call_id",
            )
        text = read_text(item.output, f"{where}.output")
        chat.append({"role": "tool", "tool_call_id": item.call_id, "content": text})


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    told = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {k: v for k, v in told.items() if v is not None}}


def _tool_choice(choice: str | NamedTool, tools: Sequence[FunctionTool]) -> str | dict[str, Any]:
    known = [tool.name for tool in tools]
    if isinstance(choice, NamedTool):
        if choice.name not in known:
            raise ApiError(
                400,
                f"tool_choice: {short(choice.name)} is none of the tools: {short(known)}",
                param="tool_choice",
            )
        return {"type": "function", "function": {"name": choice.name}}
    if choice == "required" and not tools:
        raise ApiError(400, "tool_choice: 'required' needs tools", param="tool_choice")
    return choice


def _response_format(text: TextSettings | None) -> dict[str, Any] | None:
    form = None if text is None else text.format
    if form is None:
        return None
    if isinstance(form, JsonSchema):
        return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema_}}
    return {"type": form.type}


@dataclass(slots=True)
class ResponsesReply:
    end: ClassVar[bytes] = b""  # of a stream: its last event says that it is the last

    asked: ResponsesRequest
    model: str
    tokenizer: Tokenizer
    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    _items: Items = field(init=False)
    _sent: int = 0  # events

    def __post_init__(self) -> None:
        self._items = Items(self.id, self.tokenizer.tool_format)

    def whole(self, choices: Sequence[Choice], used: dict[str, Any]) -> dict[str, Any]:
        choice = choices[0]
        for delta in choice.deltas:
            self._items.take(delta)
        return self._closed(choice, used)[1]

    def first(self, choice: Choice) -> Event:
        return self._numbered({"type": "response.created", "response": self._response("in_progress")})

    def chunks(self, choice: Choice, piece: Piece) -> list[Event]:
        events: list[Event] = []
        if self._sent == 1:
            events.append({"type": "response.in_progress", "response": self._response("in_progress")})
        for delta in piece.deltas:
            events += self._items.take(delta)
        if piece.finish is not None:
            closing, response = self._closed(choice, usage([choice]))
            events += [*closing, {"type": f"response.{response['status']}", "response": response}]
        return [self._numbered(event) for event in events]

    def failed(self, problem: ApiError) -> Event:
        error = {
            "code": _ERROR_CODES.get(problem.status, "server_error"),
            "message": problem.body["error"]["message"],
        }
        return self._numbered({"type": "response.failed", "response": self._response("failed", error=error)})

    def last(self, used: dict[str, Any]) -> list[Event]:
        return []  # the event that completes a response holds the usage already

    def _numbered(self, event: Event) -> Event:
        self._sent += 1
        return {**event, "sequence_number": self._sent - 1}

    def _closed(self, choice: Choice, used: dict[str, Any]) -> tuple[list[Event], dict[str, Any]]:
        status = "incomplete" if choice.finish == "length" else "completed"
        events = self._items.close(status)
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        at = int(time.time()) if status == "completed" else None
        return events, self._response(
            status, incomplete_details=why, completed_at=at, usage=response_usage(used)
        )

    def _response(self, status: str, **known: Any) -> dict[str, Any]:
        response = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": [copied(item) for item in self._items.done],
            "usage": None,
        }
        return response | _echo(self.asked) | known


def _echo(asked: ResponsesRequest) -> dict[str, Any]:
    """What the request settled, with the defaults that were taken."""
    choice = asked.tool_choice or "auto"
    form = None if asked.text is None else asked.text.format
    shown = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_unset=True)
    tools = [{"strict": None, "parameters": None, "description": None} | tool for tool in asked.tools or ()]
    return {
        "background": False,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "text": {"format": shown},
        "tool_choice": choice.model_dump() if isinstance(choice, NamedTool) else choice,
        "tools": tools,
        "top_logprobs": 0,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "truncation": "disabled",
        "user": asked.user,
    }


def response_usage(used: dict[str, Any]) -> dict[str, Any]:
    """A chat completion's usage in this API's words."""
    cached = used["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": used["total_tokens"],
    }
