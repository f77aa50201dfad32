"""The output items of a response as they grow, and the events of each change."""

import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Any

from paceline.output import OutputDelta
from paceline.text import CallDelta, ContentDelta, Delta, ReasoningDelta, ToolFormat, call_id
from paceline.types import TokenLogprob

Event = dict[str, Any]


class TextLogprobs:
    """Hands out the log-probabilities of an answer with its texts, until its first call or reasoning.

    A token's text may be held back, and then comes with a later one. The tokens of an answer and their order
    depend on its text alone, not on how many of them came in one round.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, TokenLogprob]] = deque()
        self._token_chars = 0  # of the tokens handed out
        self._content_chars = 0
        self._called = False

    def push(self, delta: OutputDelta) -> None:
        self._waiting.extend(zip(delta.texts, delta.logprobs, strict=False))  # none were requested: none

    def take(self, part: Delta) -> list[TokenLogprob]:
        if self._called or not isinstance(part, ContentDelta):
            self._called = True
            self._waiting.clear()
            return []
        taken: list[TokenLogprob] = []
        self._content_chars += len(part.text)
        while self._waiting and self._token_chars < self._content_chars:
            text, logprob = self._waiting.popleft()
            taken.append(logprob)
            self._token_chars += len(text)
        return taken


class Items:
    """Texts become messages; calls and reasoning become items of their own; one is open at a time."""

    def __init__(self, response: str) -> None:
        self._response = response
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._call: int | None = None  # the open item's index among the calls

    def take(self, delta: Delta, tools: ToolFormat, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """tools: how the model writes calls."""
        match delta:
            case ReasoningDelta():
                events = [] if self._is_open("reasoning") else self._begin_reasoning()
                return [*events, self._thought(delta.text)]
            case ContentDelta():
                events = [] if self._is_open("message") else self._begin_message()
                return [*events, self._text(delta.text, logprobs)]
            case CallDelta():
                events = [] if self._call == delta.index else self._begin_call(delta, tools)
                return [*events, *self._arguments(delta.arguments)]

    def close(self, status: str = "completed") -> list[Event]:
        """Ends the open item. An answer without any has an empty message."""
        begun = [] if self.done or self._open is not None else self._begin_message()
        return begun + self._end(status)

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _begin(self, item: dict[str, Any]) -> list[Event]:
        ended = self._end("completed")
        self._open = item
        added = {"type": "response.output_item.added", "output_index": len(self.done), "item": copied(item)}
        return [*ended, added]

    def _begin_message(self) -> list[Event]:
        item: dict[str, Any] = {
            "id": self._id("msg"),
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        began = self._begin(item)
        item["content"] = [_text_part("")]
        return [*began, {**self._at("response.content_part.added", part=True), "part": _text_part("")}]

    def _begin_reasoning(self) -> list[Event]:
        item: dict[str, Any] = {
            "id": self._id("rs"),
            "type": "reasoning",
            "status": "in_progress",
            "summary": [],
            "content": [],
        }
        began = self._begin(item)
        item["content"] = [_thought_part("")]
        return [*began, {**self._at("response.content_part.added", part=True), "part": _thought_part("")}]

    def _thought(self, text: str) -> Event:
        assert self._open is not None
        self._open["content"][0]["text"] += text
        return {**self._at("response.reasoning_text.delta", part=True), "delta": text}

    def _reasoning_ended(self, item: dict[str, Any]) -> list[Event]:
        part = item["content"][0]
        return [
            {**self._at("response.reasoning_text.done", part=True), "text": part["text"]},
            {**self._at("response.content_part.done", part=True), "part": dict(part)},
        ]

    def _begin_call(self, delta: CallDelta, tools: ToolFormat) -> list[Event]:
        item = {
            "id": self._id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "arguments": "",
            "call_id": call_id(self._response, delta.index, tools),
            "name": delta.name or "",
        }
        began = self._begin(item)
        self._call = delta.index
        return began

    def _text(self, text: str, logprobs: Sequence[dict[str, Any]]) -> Event:
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        part["logprobs"] = [*part["logprobs"], *logprobs]
        return {
            **self._at("response.output_text.delta", part=True),
            "delta": text,
            "logprobs": list(logprobs),
        }

    def _arguments(self, text: str) -> list[Event]:
        if not text:
            return []
        assert self._open is not None
        self._open["arguments"] += text
        return [{**self._at("response.function_call_arguments.delta"), "delta": text}]

    def _end(self, status: str) -> list[Event]:
        item = self._open
        if item is None:
            return []
        item["status"] = status
        ended = {
            "message": self._message_ended,
            "reasoning": self._reasoning_ended,
            "function_call": self._call_ended,
        }
        events = ended[item["type"]](item)
        done = {"type": "response.output_item.done", "output_index": len(self.done), "item": copied(item)}
        self.done.append(item)
        self._open = self._call = None
        return [*events, done]

    def _message_ended(self, item: dict[str, Any]) -> list[Event]:
        part = item["content"][0]
        return [
            {
                **self._at("response.output_text.done", part=True),
                "text": part["text"],
                "logprobs": part["logprobs"],
            },
            {**self._at("response.content_part.done", part=True), "part": dict(part)},
        ]

    def _call_ended(self, item: dict[str, Any]) -> list[Event]:
        call = {"name": item["name"], "arguments": item["arguments"]}
        return [{**self._at("response.function_call_arguments.done"), **call}]

    def _at(self, kind: str, part: bool = False) -> Event:
        assert self._open is not None
        head = {"type": kind, "item_id": self._open["id"], "output_index": len(self.done)}
        return {**head, "content_index": 0} if part else head

    def _id(self, prefix: str) -> str:
        seed = f"{self._response}/{len(self.done) + (self._open is not None)}"
        return f"{prefix}_{hashlib.sha256(seed.encode()).hexdigest()[:48]}"


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}


def _thought_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def copied(item: dict[str, Any]) -> dict[str, Any]:
    """As it is now, whatever is added to it later."""
    return {**item, "content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)
