"""Finds tool calls in text that comes in pieces: one state machine for every family, streamed or not.

Events come in the order of the text: TextEvent, and for each call CallBegin, CallArguments, then CallEnd or
CallError.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from paceline.text.detokenizer import partial_match_len
from paceline.text.tool_calls.formats import ToolFormat
from paceline.text.tool_calls.json_scanner import JsonScanner

_NAMED: Final = re.compile(r"([\w.-]{1,99})(?:\[CALL_ID\]\w{1,60})?(?:\[ARGS\])?\s{0,9}(?=\{)", re.ASCII)
_NAMED_SO_FAR: Final = re.compile(r"[\w.-][\w.\-\[\]]{0,200}\s{0,9}", re.ASCII)
_BLANK: Final = " \t\r\n"
_GAP: Final = re.compile(rf"[{_BLANK}]*")
_GAP_WITH_SEMICOLON: Final = re.compile(rf"[{_BLANK}]*;?[{_BLANK}]*")

_STRING: Final = r'"(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"'
_SPACES: Final = r"[ \t\r\n]*"
_CALL_HEAD: Final = re.compile(  # a call up to its arguments, in the usual order; group 1 is the name
    rf'\{{{_SPACES}(?:"(?:type|id)"{_SPACES}:{_SPACES}"[^"\\]*"{_SPACES},{_SPACES})*"name"{_SPACES}:{_SPACES}({_STRING}){_SPACES},'
    rf'{_SPACES}"(?:arguments|parameters)"{_SPACES}:{_SPACES}'
)
_KEY: Final = re.compile(rf"{_SPACES},?{_SPACES}({_STRING}){_SPACES}:{_SPACES}")
_DECODER: Final = json.JSONDecoder(strict=False)

_SHAPE: Final = '"name" (text) and "arguments" (an object)'
NOT_JSON: Final = f"is not valid JSON with {_SHAPE}"
_NO_CALL: Final = f"needs {_SHAPE}"
CUT_OFF: Final = "is not valid JSON: it has no end"


@dataclass(frozen=True, slots=True)
class TextEvent:
    """Text outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    name: str
    at: int  # where the call begins in the whole text, its trigger included


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A part of the arguments' JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    pass


@dataclass(frozen=True, slots=True)
class CallError:
    """A call that cannot be read. The text from `end` on follows as TextEvent."""

    reason: str
    at: int  # where it begins in the whole text, its trigger included
    end: int  # the same, unless CallBegin was sent

    @property
    def begun(self) -> bool:
        return self.end > self.at

    @property
    def cut(self) -> bool:
        """The text ended before the call."""
        return self.reason == CUT_OFF


@dataclass(frozen=True, slots=True)
class ReasoningEvent:
    """Text of the model to itself, in a format that marks it."""

    text: str


Event = TextEvent | ReasoningEvent | CallBegin | CallArguments | CallEnd | CallError


class ToolCallParser:
    """The events do not depend on how the text is cut into pieces.

    Blanks before the first call, between calls and after the last, and one line break between text and a
    call, belong to the calls. A step reads from the front of `_text`; it returns False to wait for more text.
    """

    def __init__(self, format: ToolFormat) -> None:
        self._format = format
        self._triggers = (format.trigger, *format.other_triggers)
        self._closing = format.end.strip().removeprefix("]")
        self._events: list[Event] = []
        self._text = ""  # not decided yet
        self._at = 0  # where _text begins in the whole text
        self._lead = ""  # syntax read before a call: text after all, should no call follow
        self._begun_at = 0
        self._called = False  # some call was read, or an empty list of calls
        self._listed = False  # inside [...]
        self._doubled = False  # inside {{...}}, as Qwen2.5-Coder's template shows calls
        self._wrapped = True  # the arguments stand in an object with the name
        self._scanner = JsonScanner()
        self._scanned = 0  # characters of _text the scanner was fed
        self._last = False  # no more text follows
        self._step = self._outside

    def push(self, text: str) -> list[Event]:
        self._text += text
        while self._step():
            pass
        events, self._events = self._events, []
        return events

    def flush(self, cut_off: bool = False) -> list[Event]:
        """The rest, at the end of the text. cut_off: the text of a call without a name does not follow."""
        self._last = True
        if cut_off and self._step in (self._opening, self._item, self._object):
            start = self._at - len(self._lead)
            self._text = self._lead = ""
            return [CallError(CUT_OFF, start, start)]
        return self.push("")

    def _outside(self) -> bool:
        """At the very start, or after a call."""
        semicolon = self._called and self._format.between == "; "
        blank = self._length(_GAP_WITH_SEMICOLON if semicolon else _GAP)
        rest = self._text[blank:]
        for trigger in self._triggers:
            if rest.startswith(trigger):
                return self._open(blank, trigger)
        if not self._last and any(trigger.startswith(rest) for trigger in self._triggers):
            return False
        if self._called and not self._text.strip(_BLANK):
            self._take(blank)
            return False
        self._step = self._prose
        return True

    def _prose(self) -> bool:
        trigger = self._format.trigger
        at = self._text.find(trigger) if self._format.anywhere else -1
        if at >= 0:
            line_break = int(self._text[:at].endswith("\n"))
            self._emit_text(self._take(at - line_break))
            return self._open(line_break, trigger)
        marks = (trigger, f"\n{trigger}") if self._format.anywhere and not self._last else ()
        self._emit_text(self._take(len(self._text) - partial_match_len(self._text, marks)))
        return False

    def _open(self, blank: int, trigger: str) -> bool:
        """Where calls stand bare, the trigger is itself the beginning of a call."""
        self._lead = self._take(blank + (0 if trigger.startswith("{") else len(trigger)))
        self._step = self._opening
        return True

    def _opening(self) -> bool:
        self._lead += self._take(self._length(_GAP))
        if not self._text:
            return self._last and self._break(CUT_OFF)
        if self._text[0] == "{":
            return self._begin_object()
        if self._text[0] == "[" and self._format.begin:
            self._lead += self._take(1)
            self._listed = True
            self._step = self._item
            return True
        return self._named()

    def _named(self) -> bool:
        """A bare name before its arguments."""
        match = _NAMED.match(self._text) if self._format.bare_names else None
        if match:
            self._wrapped = False
            self._begin_call(match[1], match.end())
            return True
        if self._format.bare_names and not self._last and _NAMED_SO_FAR.fullmatch(self._text):
            return False
        return self._break(NOT_JSON)

    def _item(self) -> bool:
        """The next call of a list, or the list's end."""
        self._lead += self._take(self._length(_GAP))
        if not self._text:
            return self._last and self._break(CUT_OFF)
        if self._text[0] == "]":
            self._lead = ""
            self._called = True
            self._step = self._after_call
            return True
        return self._begin_object() if self._text[0] == "{" else self._break(NOT_JSON)

    def _begin_object(self) -> bool:
        self._scanner = JsonScanner()
        self._scanned = 0
        self._wrapped = True
        self._step = self._object
        return True

    def _object(self) -> bool:
        if self._text == "{" and not self._last:
            return False
        if self._text.startswith("{{") and not self._scanned:
            self._lead += self._take(1)
            self._doubled = True
        while self._scanned < len(self._text):
            if self._text[self._scanned] == "{" and self._begin_after_name():
                return True
            if not self._scan(self._scanned + 1):
                return self._break(NOT_JSON)
            if not self._scanner.depth:
                return self._whole_call()
        return self._last and self._break(CUT_OFF)

    def _begin_after_name(self) -> bool:
        """Begins the call if its object was read up to the arguments, and holds the name."""
        if self._scanner.depth != 1 or self._scanner.in_string:
            return False
        head = _CALL_HEAD.fullmatch(self._text, 0, self._scanned)
        name = _decoded_name(head[1]) if head else None
        if name is None:
            return False
        self._begin_call(name, self._scanned)
        return True

    def _whole_call(self) -> bool:
        """An object whose members stand in some other order than name, arguments."""
        call = read_call(self._text[: self._scanned])
        if call is None:
            return self._break(_NO_CALL)
        name, arguments = call
        self._begin_call(name, self._scanned)
        self._events.append(CallArguments(arguments))
        self._end_call()
        self._step = self._after_call
        return True

    def _begin_call(self, name: str, length: int) -> None:
        self._begun_at = self._at - len(self._lead)
        self._lead = ""
        self._take(length)
        if not self._wrapped:
            self._scanner = JsonScanner()
        self._events.append(CallBegin(name, self._begun_at))
        self._step = self._arguments

    def _arguments(self) -> bool:
        outside = int(self._wrapped)  # the depth at which the arguments are over
        text = ""
        for i, character in enumerate(self._text):
            in_string = self._scanner.in_string
            if not self._scanner.feed(character):
                self._emit_arguments(text, i)
                return self._break_off(NOT_JSON)
            text += escaped(character) if in_string else character
            if self._scanner.depth == outside:
                self._emit_arguments(text, i + 1)
                self._end_call()
                self._step = self._rest_of_object if self._wrapped else self._after_call
                return True
        self._emit_arguments(text, len(self._text))
        return self._last and self._break_off(CUT_OFF)

    def _emit_arguments(self, text: str, length: int) -> None:
        self._take(length)
        if text:
            self._events.append(CallArguments(text))

    def _end_call(self) -> None:
        self._events.append(CallEnd())
        self._called = True

    def _rest_of_object(self) -> bool:
        """Skips other members. Text that cannot stand here is left for the next state."""
        valid = self._scan(len(self._text))
        if valid and self._scanner.depth and not self._last:
            return False
        if valid and not self._scanner.depth and _has_only_other_members(self._text[: self._scanned]):
            self._take(self._scanned)
        self._step = self._after_call
        return True

    def _after_call(self) -> bool:
        blank = self._length(_GAP)
        rest = self._text[blank:]
        if self._doubled and rest[:1] == "}":
            self._doubled = False
            self._take(blank + 1)
        elif self._listed and rest[:1] == ",":
            self._lead = self._take(blank + 1)
            self._step = self._item
        elif self._listed and rest[:1] == "]":
            self._listed = False
            self._take(blank + 1)
        elif self._closing and rest[:1] == "{":
            self._lead = self._take(blank)
            self._begin_object()
        else:
            return self._close(blank, rest)
        return True

    def _close(self, blank: int, rest: str) -> bool:
        expects_more = self._closing or self._listed or self._doubled
        if expects_more and not self._last and (not rest or self._is_cut_closing(rest)):
            return False
        if self._closing and rest.startswith(self._closing):
            self._take(blank + len(self._closing))
        elif self._is_cut_closing(rest):
            self._take(len(self._text))
        self._listed = self._doubled = False
        self._step = self._outside
        return True

    def _is_cut_closing(self, rest: str) -> bool:
        return 0 < len(rest) < len(self._closing) and self._closing.startswith(rest)

    def _break(self, reason: str) -> bool:
        """No call begins here: the supposed call is plain text, and may hold a call further on."""
        start = self._at - len(self._lead)
        self._events.append(CallError(reason, start, start))
        self._emit_text(self._lead)
        return self._continue_as_prose()

    def _break_off(self, reason: str) -> bool:
        """A call that has begun goes no further."""
        self._events.append(CallError(reason, self._begun_at, self._at))
        return self._continue_as_prose()

    def _continue_as_prose(self) -> bool:
        self._lead = ""
        self._listed = self._doubled = False
        self._step = self._prose
        return True

    def _emit_text(self, text: str) -> None:
        if text:
            self._events.append(TextEvent(text))

    def _scan(self, end: int) -> bool:
        """Feeds the scanner up to `end`, or up to the object's end; False if the text is not JSON."""
        while self._scanned < end:
            if not self._scanner.feed(self._text[self._scanned]):
                return False
            self._scanned += 1
            if not self._scanner.depth:
                break
        return True

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        self._at += length
        self._scanned = max(0, self._scanned - length)
        return taken

    def _length(self, pattern: re.Pattern[str]) -> int:
        match = pattern.match(self._text)
        return match.end() if match else 0


def escaped(character: str) -> str:
    """A character of a JSON string. Models write control characters bare, which no parser accepts."""
    return json.dumps(character)[1:-1] if character < " " else character


def _decoded_name(written: str) -> str | None:
    name = json.loads(written, strict=False)
    return name if isinstance(name, str) and _is_unicode(name) else None


def _is_unicode(text: str) -> bool:
    """No lone surrogate, such as \\ud800 in JSON: it cannot be encoded as UTF-8."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _members(written: str) -> dict[str, tuple[Any, str]]:
    """An object's members: each value, and the text it was read from."""
    members: dict[str, tuple[Any, str]] = {}
    at = 1
    while key := _KEY.match(written, at):
        value, at = _DECODER.raw_decode(written, key.end())
        name = json.loads(key[1], strict=False)
        if name in members:
            raise ValueError("a member occurs twice")
        members[name] = value, written[key.end() : at]
    return members


def read_call(written: str) -> tuple[str, str] | None:
    """The name, and the arguments' JSON."""
    try:
        members = _members(written)
        name, _ = members.get("name", (None, ""))
        values = [members[key] for key in ("arguments", "parameters") if key in members]
        value, text = values[0] if len(values) == 1 else (None, "")
        if isinstance(value, str):  # JSON inside a string
            value, text = json.loads(value, strict=False), value
    except (ValueError, RecursionError):
        return None
    if not isinstance(name, str) or not _is_unicode(name) or not isinstance(value, dict):
        return None
    return name, text if _is_strict(text) else json.dumps(value, ensure_ascii=False)


def read_member(written: str, name: str) -> str:
    """The text of an object that is a member of this one; empty if there is none."""
    try:
        value, text = _members(written).get(name, (None, ""))
    except (ValueError, RecursionError):
        return ""
    return text if isinstance(value, dict) else ""


def _is_strict(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _has_only_other_members(rest: str) -> bool:
    """True if the members after the arguments are neither name nor arguments."""
    try:
        return not {"name", "arguments", "parameters"} & _members(f'{{"": 0{rest}').keys()
    except ValueError:
        return False
