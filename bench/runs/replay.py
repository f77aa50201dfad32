"""One conversation sent to one server, turn by turn, as a streaming client sends it."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from bench.runs.conversations import Conversation, Message
from bench.serve.http_client import Reading, read
from bench.serve.servers import CHAT

History = Literal["recorded", "own"]
HISTORIES: Final[tuple[History, ...]] = ("recorded", "own")


@dataclass(frozen=True, slots=True)
class Turn:
    """Times are seconds after the request."""

    first_s: float  # the first piece of text or of a call
    last_s: float  # the last one
    end_s: float  # of the stream
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    answer: str  # text, calls and the reason of the end, as JSON


@dataclass(frozen=True, slots=True)
class Run:
    """A conversation as one arm answered it in one round."""

    arm: str
    state: str
    round: int
    conversation: str
    turns: tuple[Turn, ...]
    setup_s: float = 0.0  # before the first turn: restoring a cache by hand

    @property
    def seconds(self) -> float:
        return self.setup_s + sum(turn.end_s for turn in self.turns)


def chat_body(
    messages: list[Message], tools: tuple[dict[str, Any], ...], max_tokens: int, own: Mapping[str, Any]
) -> dict[str, Any]:
    """own: parameters of one server."""
    body: dict[str, Any] = {
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "seed": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **own,
    }
    return body | {"tools": list(tools)} if tools else body


def replay(
    port: int,
    conversation: Conversation,
    max_tokens: int,
    own: Mapping[str, Any],
    history: History = "recorded",
    send: Callable[[int, str, Mapping[str, Any]], Reading] = read,
) -> tuple[Turn, ...]:
    messages = list(conversation.messages)
    turns = []
    for index in conversation.turns:
        reading = send(port, CHAT, chat_body(messages[:index], conversation.tools, max_tokens, own))
        turns.append(
            Turn(
                reading.first or reading.end,
                reading.last or reading.end,
                reading.end,
                reading.tokens,
                reading.prompt_tokens,
                reading.cached_tokens,
                json.dumps([reading.text, sorted(reading.calls.items()), reading.finish]),
            )
        )
        if history == "own":
            messages[index] = message_of(reading)
    return tuple(turns)


def message_of(reading: Reading) -> Message:
    """The answer as a client sends it back."""
    message: Message = {"role": "assistant", "content": reading.text or None}
    if reading.calls:
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in sorted(reading.calls.items())
        ]
    elif not reading.text:
        message["content"] = ""
    return message


def timed(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
