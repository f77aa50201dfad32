"""Text in pieces to the deltas of a streamed chat completion: content and tool calls."""

import hashlib
import string
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from paceline.text.tool_calls.formats import ToolFormat
from paceline.text.tool_calls.parser import (
    CallArguments,
    CallBegin,
    CallEnd,
    CallError,
    Event,
    TextEvent,
    ToolCallParser,
)

_ID_LETTERS: Final = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Part of one call. The name comes first; the arguments of all parts, joined, are one JSON object."""

    index: int
    name: str | None
    arguments: str


Delta = ContentDelta | CallDelta


class ToolStream:
    """All deltas joined are what `parse_tool_calls` gives for the whole text.

    The exception is a call that breaks off within its arguments. The part that was sent cannot be taken back,
    so it stays a call with incomplete arguments, and only the text after it becomes content.
    """

    def __init__(self, format: ToolFormat) -> None:
        self._parser = ToolCallParser(format)
        self._index = 0  # of the call being read, else of the next one

    def push(self, text: str) -> list[Delta]:
        return self._deltas(self._parser.push(text))

    def flush(self, cut_off: bool = False) -> list[Delta]:
        """The rest, at the end of the text. cut_off: by a limit, so that a call without an end is no text."""
        return self._deltas(self._parser.flush(cut_off))

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
    """The same for the same seed and index, and different for all others."""
    digest = hashlib.sha256(f"{seed}:{index}".encode())
    if not format.short_ids:
        return f"call_{digest.hexdigest()[:24]}"
    number = int.from_bytes(digest.digest(), "big")
    return "".join(_ID_LETTERS[number // len(_ID_LETTERS) ** i % len(_ID_LETTERS)] for i in range(9))
