"""Answers in OpenAI's shapes, whole and in chunks."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from paceline.server.choice import Choice, Piece, chat_logprobs, completion_logprobs
from paceline.text import CallDelta, ContentDelta, Delta, Tokenizer, call_id
from paceline.web.api_errors import ApiError


@dataclass(slots=True)
class Reply:
    """What all chunks of one answer have in common."""

    end: ClassVar[bytes] = b"data: [DONE]\n\n"  # of a stream

    id: str
    model: str
    fingerprint: str
    tokenizer: Tokenizer
    logprobs: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def failed(self, problem: ApiError) -> dict[str, Any]:
        """Instead of the rest of a stream."""
        return problem.body


class ChatReply(Reply):
    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            **self.head("chat.completion"),
            "choices": [self._choice(choice) for choice in choices],
            "usage": usage,
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        calls = [
            {"id": self.call(choice, i), "type": "function", "function": {"name": n, "arguments": a}}
            for i, (n, a) in enumerate(choice.calls)
        ]
        content = choice.content
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = calls
        logprobs = chat_logprobs(self.tokenizer, choice.tally.logprobs) if self.logprobs else None
        return {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": choice.reason,
        }

    def call(self, choice: Choice, index: int) -> str:
        return call_id(f"{self.id}/{choice.index}", index, self.tokenizer.tool_format)

    def first(self, choice: Choice) -> dict[str, Any]:
        return self.chunk(choice, {"role": "assistant", "content": ""}, None, None)

    def chunks(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        """One for a round; the last also says why it is the last."""
        delta = self._delta(choice, piece.deltas)
        logprobs = chat_logprobs(self.tokenizer, piece.logprobs) if self.logprobs and piece.tokens else None
        found = [self.chunk(choice, delta, None, logprobs)] if delta or logprobs else []
        if piece.finish is not None:
            found.append(self.chunk(choice, {}, choice.reason, None))
        return found

    def _delta(self, choice: Choice, deltas: Sequence[Delta]) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
        calls = [self._call_delta(choice, delta) for delta in deltas if isinstance(delta, CallDelta)]
        found: dict[str, Any] = {"content": text} if text else {}
        if calls:
            found["tool_calls"] = calls
        return found

    def _call_delta(self, choice: Choice, delta: CallDelta) -> dict[str, Any]:
        if delta.name is None:
            return {"index": delta.index, "function": {"arguments": delta.arguments}}
        return {
            "index": delta.index,
            "id": self.call(choice, delta.index),
            "type": "function",
            "function": {"name": delta.name, "arguments": delta.arguments},
        }

    def chunk(
        self, choice: Choice, delta: dict[str, Any], reason: str | None, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        one = {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self.head("chat.completion.chunk"), "choices": [one]}

    def last(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**self.head("chat.completion.chunk"), "choices": [], "usage": usage}]


class CompletionReply(Reply):
    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            **self.head("text_completion"),
            "choices": [self._choice(choice) for choice in choices],
            "usage": usage,
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = completion_logprobs(self.tokenizer, choice.tally.logprobs, 0) if self.logprobs else None
        return {
            "index": choice.index,
            "text": choice.content,
            "logprobs": logprobs,
            "finish_reason": choice.reason,
        }

    def first(self, choice: Choice) -> dict[str, Any]:
        one = {"index": choice.index, "text": "", "logprobs": None, "finish_reason": None}
        return {**self.head("text_completion"), "choices": [one]}

    def chunks(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        text = "".join(delta.text for delta in piece.deltas if isinstance(delta, ContentDelta))
        reason = choice.reason if piece.finish is not None else None
        if not text and not piece.tokens and reason is None:
            return []
        start = choice.written - len(text)
        logprobs = completion_logprobs(self.tokenizer, piece.logprobs, start) if self.logprobs else None
        one = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return [{**self.head("text_completion"), "choices": [one]}]

    def last(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**self.head("text_completion"), "choices": [], "usage": usage}]
