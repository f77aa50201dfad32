"""OpenAI's harmony format, which gpt-oss writes: an answer is messages, each with a header.

    <|channel|>analysis<|message|>We need the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"a": 1}<|call|>

(without the line break). The format: github.com/openai/harmony, docs/format.md. By channel and recipient:

to=functions.NAME    a call; the recipient may stand before or after the channel
to=ANOTHER           a tool of the model's own training, which nobody runs: reasoning
analysis             reasoning
final, commentary    content: the answer, and what the model tells the user before it calls tools
"""

import re
from typing import Final

from paceline.text.detokenizer import partial_match_len
from paceline.text.tool_calls.json_scanner import JsonScanner
from paceline.text.tool_calls.parser import (
    CUT_OFF,
    CallArguments,
    CallBegin,
    CallEnd,
    CallError,
    Event,
    ReasoningEvent,
    TextEvent,
    escaped,
)

_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")  # of a message's content
_OPENINGS: Final = ("<|start|>", "<|channel|>", _MESSAGE)  # of a header
_OPENINGS_AFTER_SPACE: Final = (*_OPENINGS, "to=")
_HEADER_END: Final = re.compile(r"<\|(?:message|end|return|call)\|>")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS: Final = "functions."
_BLANK: Final = " \t\r\n"
_MAX_HEADER: Final = 400  # characters, from its opening to its end
_NOT_OBJECT: Final = "has arguments that are no JSON object"


class HarmonyParser:
    """The events do not depend on how the text is cut into pieces.

    calls: tools were offered; without, a call is reasoning. within: the text goes on with a message of the
    final channel, whose header stands in the prompt. Text that stands where a header is expected, and is
    none, is content. A step reads from the front of `_text`; it returns False to wait for more text.
    """

    def __init__(self, calls: bool = True, within: bool = False) -> None:
        self._calls = calls
        self._events: list[Event] = []
        self._text = ""  # not decided yet
        self._at = 0  # where _text begins in the whole text
        self._begun_at = 0
        self._name = ""  # of a call whose arguments have not begun
        self._scanner: JsonScanner | None = None  # of the arguments being read; None: they are over
        self._reasons = False  # the content being read is reasoning
        self._last = False  # no more text follows
        self._cut_off = False  # by a limit
        self._step = self._content if within else self._header

    def push(self, text: str) -> list[Event]:
        self._text += text
        while self._step():
            pass
        events, self._events = self._events, []
        return events

    def flush(self, cut_off: bool = False) -> list[Event]:
        """The rest, at the end of the text. A header without an end is dropped, cut off or not.

        cut_off: a call whose arguments have not begun is none; else it is one without arguments.
        """
        self._last, self._cut_off = True, cut_off
        return self.push("")

    @property
    def reasons(self) -> bool:
        """Text that follows is reasoning."""
        return self._reasons and self._step == self._content

    def _header(self) -> bool:
        blank = len(self._text) - len(self._text.lstrip(_BLANK))  # between two messages
        openings = _OPENINGS_AFTER_SPACE if self._text[:blank].endswith(" ") else _OPENINGS
        text = self._text[blank:]
        if not self._last and any(opening.startswith(text) for opening in openings):
            return False
        begins = text.startswith(openings)
        end = _HEADER_END.search(text, 0, _MAX_HEADER) if begins else None
        if begins and end is None and len(text) < _MAX_HEADER:
            if self._last:  # a header without an end says nothing
                self._take(len(self._text))
            return False
        self._take(blank)
        if end is None:
            self._reasons, self._step = False, self._content
            self._emit(self._take(int(begins)))  # no header: the rest is not to begin with the same mark
        elif end[0] == _MESSAGE:
            self._open(self._take(end.end()))
        else:  # the mark of the content is missing
            self._unmarked(self._take(end.start()))
        return True

    def _open(self, header: str) -> None:
        self._begun_at = self._at - len(header)
        header = header[max(0, header.rfind("<|start|>")) :]
        recipient, channel = _RECIPIENT.search(header), _last_channel(header)
        name = recipient[1] if recipient else ""
        if self._calls and name.startswith(_FUNCTIONS) and name != _FUNCTIONS:
            self._name, self._scanner = name.removeprefix(_FUNCTIONS), JsonScanner()
            self._step = self._arguments
            return
        self._reasons = bool(name) or (channel is not None and channel[1] == "analysis")
        self._step = self._content

    def _unmarked(self, message: str) -> None:
        """What follows the channel's name, as the harmony library reads it where it is not strict."""
        channel = _last_channel(message)
        self._reasons, self._step = channel is not None and channel[1] == "analysis", self._content
        self._emit(message[channel.end() :].lstrip(_BLANK) if channel else "")

    def _content(self) -> bool:
        at, end = self._end()
        self._emit(self._take(at))
        if not end:
            return False
        return self._close(end)

    def _emit(self, text: str) -> None:
        if text:
            self._events.append(ReasoningEvent(text) if self._reasons else TextEvent(text))

    def _end(self) -> tuple[int, str]:
        """Where the content ends that can be read, and the mark that ends it; empty: it may go on."""
        found = [(at, mark) for mark in _ENDS if (at := self._text.find(mark)) >= 0]
        if found:
            return min(found)
        return len(self._text) - (0 if self._last else partial_match_len(self._text, _ENDS)), ""

    def _close(self, mark: str) -> bool:
        """After a message; one without an end ends where the next begins."""
        if mark not in ("<|start|>", "<|channel|>"):
            self._take(len(mark))
        self._step = self._header
        return True

    def _arguments(self) -> bool:
        at, end = self._end()
        written, text = self._text[:at], ""
        for i, character in enumerate(written):
            if self._scanner is None:  # blanks after the object, and whatever else stands there
                break
            if not text and not self._scanner.depth and character in _BLANK:
                continue
            self._begin_call()
            in_string = self._scanner.in_string
            if (not self._scanner.depth and character != "{") or not self._scanner.feed(character):
                self._emit_arguments(text)
                self._take(i)
                return self._break_off(_NOT_OBJECT)
            text += escaped(character) if in_string else character
            if not self._scanner.depth:
                self._scanner = None
        self._emit_arguments(text)
        self._take(at)
        if text and self._scanner is None:
            self._events.append(CallEnd())
        if end:
            return self._end_call() and self._close(end)
        return self._last and self._end_call(self._cut_off)

    def _begin_call(self) -> None:
        if self._name:
            self._events.append(CallBegin(self._name, self._begun_at))
            self._name = ""

    def _emit_arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(text))

    def _end_call(self, cut_off: bool = False) -> bool:
        """At the end of the message, or of the text."""
        scanner, self._scanner = self._scanner, None
        if scanner is not None and scanner.depth:
            self._events.append(CallError(CUT_OFF, self._begun_at, self._at))
        elif scanner is not None and cut_off:
            self._events.append(CallError(CUT_OFF, self._begun_at, self._begun_at))
        elif scanner is not None:  # a function without arguments
            self._begin_call()
            self._events += [CallArguments("{}"), CallEnd()]
        self._reasons, self._step = False, self._content
        return True

    def _break_off(self, reason: str) -> bool:
        """A call that has begun goes no further; the rest of its message is content."""
        self._events.append(CallError(reason, self._begun_at, self._at))
        self._scanner, self._reasons, self._step = None, False, self._content
        return True

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        self._at += length
        return taken


def _last_channel(header: str) -> re.Match[str] | None:
    return next(reversed(list(_CHANNEL.finditer(header))), None)
