"""Finds calls that a model writes in another form than its template declares.

Models drop the declared mark: they write a JSON object, bare or in a code fence, a Python-like list of calls,
or tags. Such text counts as calls only by a strict rule, since prose may quote a call as an example:

- it is the whole answer, or its last part, beginning on a line of its own;
- from there on the answer is nothing but calls, and the fences, tags and brackets around them;
- every call names an offered tool, and its arguments fit the schema of that tool;
- nothing before it looked like a call and was none.

Such calls are known only at the end of the answer. Until then the text is held back, and released as content
as soon as it cannot be calls any more: mostly at its first characters.

An answer that begins with a call is no example in prose. Where a grammar enforces its arguments from the
opening {"name": "tool", "arguments": on (`OfferedTools.enforced`), it is a call from there on, and is sent as
it is written; text after it is content, as after a call in the declared format.
"""

import ast
import json
import re
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeVar

from paceline.text.tool_calls.formats import Form, ToolCall
from paceline.text.tool_calls.json_scanner import JsonScanner
from paceline.text.tool_calls.parser import (
    CUT_OFF,
    NOT_JSON,
    CallArguments,
    CallBegin,
    CallEnd,
    CallError,
    Event,
    TextEvent,
    escaped,
    read_call,
    read_member,
)

T = TypeVar("T")
Steps = Generator[None, str, T]  # is sent one character at a time; "" is the end of the text

Rejection = Literal["unknown_tool", "arguments", "followed_by_text", "syntax", "cut", "several", "too_long"]

MAX_HELD: Final = 1 << 16  # characters of calls that are held back
MAX_NAME: Final = 128
MAX_DEPTH: Final = 50  # of brackets in Python-like calls
_MAX_LEAD: Final = 80  # blanks before a call on its line
_KEYS: Final = ("name", "arguments", "parameters", "type", "id", "function")
FENCES: Final = ("json", "tool_call", "tool_calls", "tool_code", "python", "xml")
_TAGS: Final = ("tool_call", "tool_calls", "tools", "function_call")
_FUNCTION: Final = "function="
_PARAMETER: Final = "parameter="
_BLANK: Final = " \t\r\n"
_CLOSING: Final = f"{_BLANK}`,;"  # may be left of the marks around calls that were sent
_WORDS: Final = {"true": True, "false": False, "null": None}
_LEAD: Final = re.compile(r"(?:\A|\n)[ \t]*\Z")
_SPACES: Final = r"[ \t\r\n]*"
_OPENING: Final = re.compile(  # a call up to its arguments; group 1 is the name as it is written
    rf'\{{{_SPACES}"name"{_SPACES}:{_SPACES}("(?:[^"\\]|\\.)*"){_SPACES},{_SPACES}"(?:arguments|parameters)"{_SPACES}:{_SPACES}',
    re.DOTALL,
)


class OfferedTools(Protocol):
    """The tools of a request, as far as calls are checked against them."""

    @property
    def names(self) -> Collection[str]: ...
    @property
    def enforced(self) -> bool:
        """True if a grammar enforces each call from its opening on (`constraints/tool_call_openings.py`)."""

    def fits(self, name: str, arguments: Mapping[str, Any]) -> bool:
        """True if the tool's schema accepts the arguments."""

    def typed(self, name: str, texts: Mapping[str, str]) -> dict[str, Any]:
        """Arguments that were written as bare text, in the types of the tool's schema."""


class _Rejected(Exception):
    """The text cannot be calls. reason: "" if it never looked like one."""

    def __init__(self, reason: Rejection | Literal[""] = "") -> None:
        self.reason: Rejection | Literal[""] = reason


@dataclass(slots=True)
class CallDetector:
    """Takes text in pieces. The content and the calls do not depend on how the text is cut."""

    offered: OfferedTools
    forms: Collection[Form]
    parallel: bool = True  # False: several calls are none
    rejected: list[Rejection] = field(default_factory=list)  # text that looked like calls and was none
    calls: int = 0  # accepted so far
    _events: list[Event] = field(default_factory=list)  # settled, not returned yet
    _held: str = ""  # the blanks before a possible call, then its text
    _read: int = 0  # characters of the answer before those held back
    _block: Steps[list[ToolCall]] | None = None  # reads a possible call
    _code: bool = False  # within a code fence
    _line_start: bool = True  # nothing but blanks since the line began
    _blank: bool = True  # nothing but blanks since the answer began
    _early: bool = False  # calls are sent as they are written
    _fresh_line: bool = False  # the blanks read last had a line break
    _begun_at: int | None = None  # of a call that is sent in part
    _arguments: list[str] = field(default_factory=list)  # of that call, not among the events yet
    _settled: bool = False  # the text up to this character belongs to calls that were sent
    _off: bool = False

    def push(self, text: str) -> list[Event]:
        """The content and the calls that this piece settles."""
        at = 0
        while at < len(text):
            if self._off:
                self._content(text[at:])
                break
            at = self._prose(text, at) if self._block is None else self._feed(text, at)
        return self._taken()

    def flush(self) -> list[Event]:
        """The rest, at the end of the text."""
        calls: list[ToolCall] = []
        try:
            if self._block is not None:
                self._block.send("")
        except StopIteration as end:
            calls = end.value
        except _Rejected as rejection:
            self._reject(rejection)
        if self.calls:  # sent as they were written: marks that close them may follow
            return [*self._taken(), *(_text(self._held) if self._held.strip(_CLOSING) else ())]
        if len(calls) > 1 and not self.parallel:
            self._reject(_Rejected("several"))
            calls = []
        self.calls = len(calls)
        for call in calls:
            self._events += (CallBegin(call.name, self._read), CallArguments(call.text), CallEnd())
        return [*self._taken(), *(() if calls else _text(self._held))]

    def stop(self) -> list[Event]:
        """The text held back, which is content after all. No call is looked for from here on."""
        self._content(self._held)
        self._held, self._block, self._off = "", None, True
        return self._taken()

    def _taken(self) -> list[Event]:
        self._emit_arguments()
        events, self._events = self._events, []
        return events

    def _emit_arguments(self) -> None:
        if self._arguments:
            self._events.append(CallArguments("".join(self._arguments)))
            self._arguments.clear()

    def _content(self, text: str) -> None:
        self._read += len(text)
        self._events += _text(text)

    def _prose(self, text: str, at: int) -> int:
        """Reads text that is no call up to the next place where one may begin."""
        if not self._line_start:
            end = text.find("\n", at)
            if end < 0:
                self._content(text[at:])
                return len(text)
            self._content(text[at:end])
            self._line_start, self._held = True, "\n"
            return end + 1
        c = text[at]
        if c in _BLANK and len(self._held) < _MAX_LEAD:
            if c == "\n" and not self._blank:  # only the last line break belongs to the calls
                self._content(self._held)
                self._held = ""
            self._held += c
            return at + 1
        if c == "`" or (c in "{[<" and not self._code):
            self._block = self._read_block()
            next(self._block)
            return at
        self._release()
        self._blank = False
        return at

    def _feed(self, text: str, at: int) -> int:
        """Reads a possible call. The character that rejects it is read again, as prose."""
        room = MAX_HELD - len(self._held)
        for i in range(at, len(text)):
            rejection = _Rejected("too_long") if i - at >= room else self._rejection(text[i])
            if rejection is not None:
                self._held += text[at:i]
                self._block = None
                self._reject(rejection)
                self._release()
                return i
            if self._settled:
                self._read += len(self._held) + i + 1 - at
                self._held, self._settled, at, room = "", False, i + 1, MAX_HELD
        self._held += text[at:]
        return len(text)

    def _rejection(self, c: str) -> _Rejected | None:
        assert self._block is not None
        try:
            self._block.send(c)
        except _Rejected as rejection:
            return rejection
        return None

    def _reject(self, rejection: _Rejected) -> None:
        if self._begun_at is not None:
            reason = CUT_OFF if rejection.reason == "cut" else NOT_JSON
            self._emit_arguments()
            self._events.append(CallError(reason, self._begun_at, self._read))
            self._begun_at, self._off = None, True
        elif self.calls:  # text follows them
            self._off = True
        elif rejection.reason:
            self.rejected.append(rejection.reason)
            self._off = True

    def _release(self) -> None:
        """The text held back is content."""
        self._blank = self._blank and not self._held.strip(_BLANK)
        self._line_start = bool(self._held.strip(_BLANK)) and _LEAD.search(self._held) is not None
        self._content(self._held)
        self._held = ""

    def _read_block(self) -> Steps[list[ToolCall]]:
        """Calls up to the end of the answer."""
        self._early = self.offered.enforced and self._blank
        c = yield
        calls: list[ToolCall] = []
        while c:
            first = c
            calls += yield from self._unit(c, calls)
            c = yield from self._blanks()
            if c and c in ",;" and not (c := (yield from self._blanks())):
                raise _Rejected("cut")
            if first == "`" and not self._fresh_line:  # where no opening counts
                self._early = False
        return calls

    def _unit(self, c: str, before: list[ToolCall]) -> Steps[list[ToolCall]]:
        """Calls that stand in one pair of marks."""
        if c == "`":
            return (yield from self._fenced())
        if c == "{" and "json" in self.forms:
            return [(yield from self._object())]
        if c == "[":
            return (yield from self._listed())
        if c == "<" and "xml" in self.forms and not self.calls:
            self._early = False
            return (yield from self._tagged())
        raise _Rejected("followed_by_text" if before else "")

    def _units(self, c: str, end: str) -> Steps[list[ToolCall]]:
        """One or more units, up to the character that begins the closing mark."""
        calls: list[ToolCall] = []
        while c != end or not calls:
            if not c:
                raise _Rejected("cut" if calls else "")
            calls += yield from self._unit(c, calls)
            c = yield from self._blanks()
            if c and c in ",;":
                c = yield from self._blanks()
        return calls

    def _fenced(self) -> Steps[list[ToolCall]]:
        yield from self._literal("``")
        self._code = not self._code
        if not self._code:  # the end of a fence in the prose before
            raise _Rejected
        language = ""
        while (c := (yield)) != "\n":
            language += c
            if not c or not _begins(language.strip(_BLANK), FENCES) or len(language) > _MAX_LEAD:
                raise _Rejected
        if language.strip(_BLANK) not in ("", *FENCES):
            raise _Rejected
        if "\t" in language or "\r" in language:  # where no opening counts
            self._early = False
        calls = yield from self._units((yield from self._blanks()), "`")
        yield from self._literal("``", "followed_by_text")
        self._code = False
        self._settled = self.calls > 0
        return calls

    def _object(self) -> Steps[ToolCall]:
        """{"name": ..., "arguments": {...}}, or {{...}} as Qwen2.5-Coder's template shows it."""
        if self.calls and not self.parallel:
            raise _Rejected("several")
        scanner = JsonScanner()
        scanner.feed("{")
        written, key, keys = ["{"], "", set[str]()
        c = yield from self._blanks()
        doubled = c == "{"
        if doubled:
            c = yield
        looks = False  # like a call
        while True:
            in_key = scanner.in_key
            if c == "{" and looks and not doubled and (name := self._opened("".join(written))) is not None:
                return (yield from self._sent(name, scanner))
            if not c or not scanner.feed(c):
                raise _Rejected(("syntax" if c else "cut") if looks else "")
            written.append(c)
            if not scanner.depth:
                break
            if scanner.depth == 1 and scanner.in_key:
                key = key + c if in_key else ""
                if not _begins(key, _KEYS):
                    raise _Rejected
            elif scanner.depth == 1 and in_key:
                if key not in _KEYS:
                    raise _Rejected
                keys.add(key)
                looks = "name" in keys and not keys.isdisjoint(("arguments", "parameters"))
            c = yield
        if doubled and (yield from self._blanks()) != "}":
            raise _Rejected("syntax" if looks else "")
        text = "".join(written)
        call = read_call(read_member(text, "function") or text)
        if call is None:
            raise _Rejected("syntax" if looks else "")
        name, arguments = call
        checked = self._checked(name, json.loads(arguments), arguments)
        if self.calls:
            self._begin(name)
            self._arguments.append(arguments)
            self._end()
        else:
            self._early = False  # the end of the answer decides about this call, so about all after it
        return checked

    def _opened(self, written: str) -> str | None:
        """The tool, if this is an opening from which on a grammar enforces the call."""
        opening = _OPENING.fullmatch(written) if self._early else None
        if opening is None:
            return None
        spelled = {json.dumps(name, ensure_ascii=False): name for name in self.offered.names}
        return spelled.get(opening[1])

    def _sent(self, name: str, scanner: JsonScanner) -> Steps[ToolCall]:
        """A call from its arguments' first brace on, sent as it is written."""
        self._begin(name)
        c, written = "{", list[str]()
        while True:
            in_string = scanner.in_string
            if not c or not scanner.feed(c):
                raise _Rejected("syntax" if c else "cut")
            written.append(escaped(c) if in_string else c)
            self._arguments.append(written[-1])
            self._settled = True
            if scanner.depth == 1:
                break
            c = yield
        self._end()
        if (yield from self._blanks()) != "}":
            raise _Rejected("followed_by_text")
        self._settled = True
        text = "".join(written)
        return ToolCall(name, json.loads(text), text)

    def _begin(self, name: str) -> None:
        self._begun_at = self._read
        self._events.append(CallBegin(name, self._read))

    def _end(self) -> None:
        self._emit_arguments()
        self._events.append(CallEnd())
        self._begun_at, self._settled = None, True
        self.calls += 1

    def _listed(self) -> Steps[list[ToolCall]]:
        c = yield from self._blanks()
        if (c.isalpha() or c == "_") and "python" in self.forms and not self.calls:
            return (yield from self._python(c))
        calls: list[ToolCall] = []
        while c == "{" and "json" in self.forms:
            calls.append((yield from self._object()))
            c = yield from self._blanks()
            if c == ",":
                c = yield from self._blanks()
        if c != "]" or not calls:
            raise _Rejected(("syntax" if c else "cut") if calls else "")
        self._settled = self.calls > 0
        return calls

    def _python(self, first: str) -> Steps[list[ToolCall]]:
        """[f(a=1), g(b="x")], from the first letter of the first name on."""
        name, written = first, ["[", first]
        while (c := (yield)) != "(":
            name += c
            written.append(c)
            if not c or not (c.isalnum() or c in "_.") or len(name) > MAX_NAME:
                raise _Rejected
        if name not in self.offered.names:
            raise _Rejected
        written.append(c)
        closing, quote, escaped = ["]", ")"], "", False
        while closing:
            c = yield
            if not c:
                raise _Rejected("cut")
            written.append(c)
            if quote:
                escaped, ends = c == "\\" and not escaped, c == quote and not escaped
                quote = "" if ends else quote
            elif c in "'\"":
                quote = c
            elif c in "([{":
                closing.append({"(": ")", "[": "]", "{": "}"}[c])
            elif c in ")]}" and c != closing.pop():
                raise _Rejected("syntax")
            if len(closing) > MAX_DEPTH:
                raise _Rejected("syntax")
        return [self._checked(*call) for call in _python_calls("".join(written))]

    def _tagged(self) -> Steps[list[ToolCall]]:
        """<function=f>...</function>, or calls between <tool_call> and the like."""
        tag = yield from self._tag((*_TAGS, _FUNCTION))
        if tag.startswith(_FUNCTION):
            return [(yield from self._function(tag.removeprefix(_FUNCTION)))]
        c = yield from self._blanks()
        if c != "<":
            calls = yield from self._units(c, "<")
        else:
            inside = yield from self._tag((_FUNCTION,))
            calls = [(yield from self._function(inside.removeprefix(_FUNCTION)))]
            if (c := (yield from self._blanks())) != "<":
                raise _Rejected("syntax" if c else "cut")
        yield from self._literal(f"/{tag}>", "syntax")
        return calls

    def _function(self, name: str) -> Steps[ToolCall]:
        """The arguments after <function=name>: an object, or <parameter=key>text</parameter>."""
        if name not in self.offered.names:
            raise _Rejected("unknown_tool")
        c = yield from self._blanks()
        if c == "{":
            arguments = yield from self._json_object()
            if (yield from self._blanks()) != "<":
                raise _Rejected("syntax")
            yield from self._literal("/function>", "syntax")
            _, text = read_call(f'{{"name": "", "arguments": {arguments}}}') or ("", "")
            return self._checked(name, json.loads(text or "null"), text)
        texts: dict[str, str] = {}
        while c == "<":
            tag = yield from self._tag((_PARAMETER, "/function"), "syntax")
            if tag == "/function":
                return self._checked(name, self.offered.typed(name, texts))
            texts[tag.removeprefix(_PARAMETER)] = yield from self._until("</parameter>")
            c = yield from self._blanks()
        raise _Rejected("syntax" if c else "cut")

    def _json_object(self) -> Steps[str]:
        """The rest of an object, as it is written."""
        scanner, written = JsonScanner(), "{"
        scanner.feed("{")
        while scanner.depth:
            c = yield
            if not c or not scanner.feed(c):
                raise _Rejected("syntax" if c else "cut")
            written += c
        return written

    def _tag(self, names: Collection[str], reason: Rejection | Literal[""] = "") -> Steps[str]:
        """A tag after its <. A name that ends in = is followed by some value."""
        tag = ""
        while (c := (yield)) != ">":
            tag += c
            free = any(name.endswith("=") and tag.startswith(name) for name in names)
            if not c or c in "<\n" or not (free or _begins(tag, names)) or len(tag) > MAX_NAME:
                raise _Rejected(reason)
        if tag in names and not tag.endswith("="):
            return tag
        if any(name.endswith("=") and tag.startswith(name) for name in names):
            return tag
        raise _Rejected(reason)

    def _until(self, mark: str) -> Steps[str]:
        """The text before the mark, without the line breaks that set it apart."""
        text: list[str] = []
        while "".join(text[-len(mark) :]) != mark:
            c = yield
            if not c:
                raise _Rejected("cut")
            text.append(c)
        return "".join(text[: -len(mark)]).removeprefix("\n").removesuffix("\n")

    def _literal(self, text: str, reason: Rejection | Literal[""] = "") -> Steps[None]:
        for expected in text:
            c = yield
            if c != expected:
                raise _Rejected("cut" if reason and not c else reason)

    def _blanks(self) -> Steps[str]:
        """The next character that is no blank."""
        self._fresh_line = False
        while (c := (yield)) and c in _BLANK:
            self._fresh_line |= c == "\n"
        return c

    def _checked(self, name: str, arguments: Any, text: str = "") -> ToolCall:
        if name not in self.offered.names:
            raise _Rejected("unknown_tool")
        if not isinstance(arguments, dict) or not self.offered.fits(name, arguments):
            raise _Rejected("arguments")
        return ToolCall(name, arguments, text)


def _text(text: str) -> tuple[TextEvent, ...]:
    return (TextEvent(text),) if text else ()


def _begins(text: str, names: Collection[str]) -> bool:
    return any(name.startswith(text) for name in names)


def _python_calls(written: str) -> list[tuple[str, dict[str, Any]]]:
    """The calls of a list in Python's syntax. Values are literals; true, false and null are JSON's."""
    try:
        tree = ast.parse(written, mode="eval").body
        if isinstance(tree, ast.List) and tree.elts:
            return [_python_call(element) for element in tree.elts]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        pass
    raise _Rejected("syntax")


def _python_call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call, or an argument without a name")
    arguments = {keyword.arg: _literal_value(keyword.value) for keyword in node.keywords}
    if None in arguments or len(arguments) < len(node.keywords):
        raise ValueError("an argument without a name of its own")
    return ast.unparse(node.func), {str(key): value for key, value in arguments.items()}


def _literal_value(node: ast.expr) -> Any:
    """A value that JSON can hold."""
    match node:
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=elements):
            return [_literal_value(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            names = [ast.literal_eval(key) if key is not None else None for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise ValueError("a key that is no text")
            return {str(name): _literal_value(value) for name, value in zip(names, values, strict=True)}
    value = ast.literal_eval(node)
    if value is not None and not isinstance(value, str | int | float):
        raise ValueError("no value of JSON")
    return value
