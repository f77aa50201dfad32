"""Text in pieces to the deltas of a chat completion that is streamed: content, and tool calls."""

import hashlib
import string
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from paceline.text.tool_calls.formats import ToolFormat
from paceline.text.tool_calls.parser import ToolCallParser
from paceline.text.tool_calls.tool_events import (
    CallArguments,
    CallBegin,
    CallEnd,
    CallError,
    Event,
    TextEvent,
)

_ID_LETTERS: Final = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Part of one call: its name comes first, and its parts' arguments joined are the arguments' JSON."""

    index: int
    name: str | None
    arguments: str


Delta = ContentDelta | CallDelta


class ToolStream:
    """All deltas joined are what `parse_tool_calls` gives for the whole text.

    They differ only for a call that breaks off within its arguments: what was sent of it cannot be taken
    back, so it stays a call whose arguments are incomplete, and only the text after it becomes content.
    """

    def __init__(self, format: ToolFormat) -> None:
        self._reader = ToolCallParser(format)
        self._index = 0  # of the call that is read, or else of the next

    def push(self, text: str) -> list[Delta]:
        return self._deltas(self._reader.push(text))

    def flush(self) -> list[Delta]:
        """The rest, once no text follows."""
        return self._deltas(self._reader.flush())

    def _deltas(self, events: Iterable[Event]) -> list[Delta]:
        deltas: list[Delta] = []
        for event in events:
            match event:
                case TextEvent():
                    _append(deltas, ContentDelta(event.text))
                case CallBegin():
                    _append(deltas, CallDelta(self._index, event.name, ""))
                case CallArguments():
                    _append(deltas, CallDelta(self._index, None, event.text))
                case CallEnd():
                    self._index += 1
                case CallError(begun=True):
                    self._index += 1
        return deltas


def _append(deltas: list[Delta], delta: Delta) -> None:
    """Adds a delta, as part of the last one where both belong together."""
    last = deltas[-1] if deltas else None
    if isinstance(last, ContentDelta) and isinstance(delta, ContentDelta):
        deltas[-1] = ContentDelta(last.text + delta.text)
    elif isinstance(last, CallDelta) and isinstance(delta, CallDelta) and last.index == delta.index:
        deltas[-1] = CallDelta(last.index, last.name, last.arguments + delta.arguments)
    else:
        deltas.append(delta)


def call_id(seed: str, index: int, format: ToolFormat) -> str:
    """A call's id: the same for the same seed and index, and unlike all others."""
    digest = hashlib.sha256(f"{seed}:{index}".encode())
    if not format.short_ids:
        return f"call_{digest.hexdigest()[:24]}"
    number = int.from_bytes(digest.digest(), "big")
    return "".join(_ID_LETTERS[number // len(_ID_LETTERS) ** i % len(_ID_LETTERS)] for i in range(9))
