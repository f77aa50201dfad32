"""An answer's text, whole or in pieces, to content and tool calls.

Both read the same events: those of the declared format, and those of calls in another form if the tools that
were offered are known.
"""

import hashlib
import json
import re
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from paceline.text.tool_calls.detector import CallDetector, OfferedTools, Rejection
from paceline.text.tool_calls.formats import HERMES, LLAMA3, MISTRAL, ToolCall, ToolFormat
from paceline.text.tool_calls.harmony import HarmonyParser
from paceline.text.tool_calls.parser import (
    CallArguments,
    CallBegin,
    CallEnd,
    CallError,
    Event,
    ReasoningEvent,
    TextEvent,
    ToolCallParser,
)

_ID_LETTERS: Final = string.ascii_letters + string.digits
_FENCE: Final = re.compile(r"```(?:json)?\s*\n(.*?)\n?\s*```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Part of one call. The name comes first; the arguments of all parts, joined, are one JSON object."""

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """What the model writes to itself before it answers, where its format marks that."""

    text: str


Delta = ContentDelta | ReasoningDelta | CallDelta


class _Events:
    """The events of an answer. Calls in another form count only if no earlier one is in the declared form."""

    def __init__(
        self,
        format: ToolFormat,
        offered: OfferedTools | None,
        parallel: bool,
        calls: bool = True,
        within: bool = False,
    ) -> None:
        self._parser = HarmonyParser(calls, within) if format.channels else ToolCallParser(format)
        self._detector = None if offered is None else CallDetector(offered, format.alternatives, parallel)
        self._errors: list[Rejection] = []
        self.reasoning_pieces = 0

    def push(self, text: str) -> Iterator[Event]:
        reasoned = self._reasons
        yield from self._detected(self._parser.push(text))
        self.reasoning_pieces += reasoned and self._reasons

    def flush(self, cut_off: bool = False) -> Iterator[Event]:
        yield from self._detected(self._parser.flush(cut_off))
        if self._detector is None:
            return
        before = self._detector.calls
        yield from self._counted(self._detector.flush())
        if self._detector.calls > before:
            self._errors.clear()

    @property
    def _reasons(self) -> bool:
        return isinstance(self._parser, HarmonyParser) and self._parser.reasons

    @property
    def undeclared(self) -> int:
        """Calls in another form."""
        return 0 if self._detector is None else self._detector.calls

    @property
    def rejected(self) -> tuple[Rejection, ...]:
        """Why texts that looked like calls were none."""
        return (*self._errors, *(() if self._detector is None else self._detector.rejected))

    def _detected(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in self._counted(events):
            if self._detector is None:
                yield event
            elif isinstance(event, TextEvent):
                yield from self._counted(self._detector.push(event.text))
            elif isinstance(event, CallBegin):
                yield from self._detector.stop()
                yield event
            else:
                yield event

    def _counted(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, CallError):
                self._errors.append("cut" if event.cut else "syntax")
            yield event


class ToolStream:
    """All deltas joined are what `parse_tool_calls` gives for the whole text.

    The exception is a call that breaks off within its arguments after they began to be sent. The part that
    was sent cannot be taken back, so it stays a call with incomplete arguments, and only the text after it
    becomes content. Calls in another form are sent as they are written where the answer begins with them and
    a grammar enforces them; else they come whole, at the end.

    calls, within: of a format with channels (HarmonyParser).
    """

    def __init__(
        self,
        format: ToolFormat,
        offered: OfferedTools | None = None,
        parallel: bool = True,
        calls: bool = True,
        within: bool = False,
    ) -> None:
        self._events = _Events(format, offered, parallel, calls, within)
        self._index = 0  # of the call being read, else of the next one

    def push(self, *pieces: str) -> list[Delta]:
        return self._deltas(event for piece in pieces for event in self._events.push(piece))

    def flush(self, cut_off: bool = False) -> list[Delta]:
        """The rest, at the end of the text. cut_off: by a limit, so that a call without an end is no text."""
        return self._deltas(self._events.flush(cut_off))

    @property
    def reasoning_pieces(self) -> int:
        """Pieces within reasoning, empty ones too; without those that complete the marks around it."""
        return self._events.reasoning_pieces

    @property
    def undeclared(self) -> int:
        """Calls in another form than the declared one."""
        return self._events.undeclared

    @property
    def rejected(self) -> tuple[Rejection, ...]:
        """Why texts that looked like calls were none; complete at the end of the text."""
        return self._events.rejected

    def _deltas(self, events: Iterable[Event]) -> list[Delta]:
        deltas: list[Delta] = []
        for event in events:
            match event:
                case TextEvent():
                    _append(deltas, ContentDelta(event.text))
                case ReasoningEvent():
                    _append(deltas, ReasoningDelta(event.text))
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
    elif isinstance(last, ReasoningDelta) and isinstance(delta, ReasoningDelta):
        deltas[-1] = ReasoningDelta(last.text + delta.text)
    elif isinstance(last, CallDelta) and isinstance(delta, CallDelta) and last.index == delta.index:
        deltas[-1] = CallDelta(last.index, last.name, last.arguments + delta.arguments)
    else:
        deltas.append(delta)


def parse_tool_calls(
    text: str,
    format: ToolFormat | None = None,
    offered: OfferedTools | None = None,
    parallel: bool = True,
    calls: bool = True,
    within: bool = False,
    cut_off: bool = False,
) -> tuple[str, list[ToolCall], list[str]]:
    """The text around the calls, the calls, and an error for each one that cannot be read.

    A call that cannot be read stays in the text; its error names the position. offered: calls of these tools
    count in other forms too (detector.py). Without a format, the first trigger in the text decides; without a
    trigger, a message is read that is nothing but calls, as an object or a list, fenced or not. calls,
    within: as for ToolStream. cut_off: as for its flush.
    """
    if format is not None:
        return _read(text, _Events(format, offered, parallel, calls, within), cut_off)
    triggered = [(at, f) for f in (HERMES, MISTRAL) if (at := text.find(f.trigger)) >= 0]
    if triggered:
        return _read(text, _Events(min(triggered, key=lambda match: match[0])[1], None, parallel))
    bare = _bare_calls(text)
    return ("", bare, []) if bare else (text, [], [])


def _bare_calls(text: str) -> list[ToolCall]:
    """The calls of a message that is wholly calls; none if any part of it is something else."""
    fenced = _FENCE.fullmatch(text.strip())
    body = fenced.group(1) if fenced else text.strip()
    for written, format in ((body, LLAMA3), (f"{HERMES.begin}{body}{HERMES.end}", HERMES)):
        content, calls, errors = _read(written, _Events(format, None, True))
        if calls and not content and not errors:
            return calls
    return []


def _read(text: str, events: _Events, cut_off: bool = False) -> tuple[str, list[ToolCall], list[str]]:
    content: list[str] = []
    calls: list[ToolCall] = []
    errors: list[str] = []
    name = arguments = ""
    for event in [*events.push(text), *events.flush(cut_off)]:
        match event:
            case TextEvent():
                content.append(event.text)
            case CallBegin():
                name, arguments = event.name, ""
            case CallArguments():
                arguments += event.text
            case CallEnd():
                calls.append(ToolCall(name, json.loads(arguments), arguments))
            case CallError():
                errors.append(
                    f"the tool call at character {event.at} {event.reason}: {_short(text[event.at :])}"
                )
                content.append(text[event.at : event.end])
    return "".join(content), calls, errors


def _short(text: str, limit: int = 120) -> str:
    line = " ".join(text[: 4 * limit].split())
    return line if len(line) <= limit else line[:limit] + " ..."


def call_id(seed: str, index: int, format: ToolFormat) -> str:
    """The same for the same seed and index, and different for all others."""
    digest = hashlib.sha256(f"{seed}:{index}".encode())
    if not format.short_ids:
        return f"call_{digest.hexdigest()[:24]}"
    number = int.from_bytes(digest.digest(), "big")
    return "".join(_ID_LETTERS[number // len(_ID_LETTERS) ** i % len(_ID_LETTERS)] for i in range(9))
