"""Finds calls that a model writes in another form than its template declares.

Models drop the declared mark: they write a JSON object, bare or in a code fence, a Python-like list of calls,
or tags. Such text counts as calls only by a strict rule, since prose may quote a call as an example:

- it is the whole answer, or its last part, beginning on a line of its own;
- from there on the answer is nothing but calls, and the fences, tags and brackets around them;
- every call names an offered tool, and its arguments fit the schema of that tool;
- nothing before it looked like a call and was none.

The calls are known only at the end of the answer. Until then the text is held back, and released as content
as soon as it cannot be calls any more: mostly at its first characters.
"""

import ast
import json
import re
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeVar

from paceline.text.tool_calls.formats import Form, ToolCall
from paceline.text.tool_calls.json_scanner import JsonScanner
from paceline.text.tool_calls.parser import read_call, read_member

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
_WORDS: Final = {"true": True, "false": False, "null": None}
_LEAD: Final = re.compile(r"(?:\A|\n)[ \t]*\Z")


class OfferedTools(Protocol):
    """The tools of a request, as far as calls are checked against them."""

    @property
    def names(self) -> Collection[str]: ...
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
    _held: str = ""  # the blanks before a possible call, then its text
    _block: Steps[list[ToolCall]] | None = None  # reads a possible call
    _code: bool = False  # within a code fence
    _line_start: bool = True  # nothing but blanks since the line began
    _blank: bool = True  # nothing but blanks since the answer began
    _off: bool = False

    def push(self, text: str) -> str:
        """The content that this piece settles."""
        content: list[str] = []
        at = 0
        while at < len(text):
            if self._off:
                content.append(text[at:])
                break
            at = self._prose(text, at, content) if self._block is None else self._feed(text, at, content)
        return "".join(content)

    def flush(self) -> tuple[str, list[ToolCall]]:
        """The rest of the content, and the calls, at the end of the text."""
        calls: list[ToolCall] = []
        try:
            if self._block is not None:
                self._block.send("")
        except StopIteration as end:
            calls = end.value
        except _Rejected as rejection:
            self._count(rejection)
        if len(calls) > 1 and not self.parallel:
            self._count(_Rejected("several"))
            calls = []
        return "" if calls else self._held, calls

    def stop(self) -> str:
        """The text held back, which is content after all. No call is looked for from here on."""
        rest, self._held, self._block, self._off = self._held, "", None, True
        return rest

    def _prose(self, text: str, at: int, content: list[str]) -> int:
        """Reads text that is no call up to the next place where one may begin."""
        if not self._line_start:
            end = text.find("\n", at)
            if end < 0:
                content.append(text[at:])
                return len(text)
            content.append(text[at:end])
            self._line_start, self._held = True, "\n"
            return end + 1
        c = text[at]
        if c in _BLANK and len(self._held) < _MAX_LEAD:
            if c == "\n" and not self._blank:  # only the last line break belongs to the calls
                content.append(self._held)
                self._held = ""
            self._held += c
            return at + 1
        if c == "`" or (c in "{[<" and not self._code):
            self._block = self._read_block()
            next(self._block)
            return at
        self._release(content)
        self._blank = False
        return at

    def _feed(self, text: str, at: int, content: list[str]) -> int:
        """Reads a possible call. The character that rejects it is read again, as prose."""
        room = MAX_HELD - len(self._held)
        for i in range(at, len(text)):
            rejection = _Rejected("too_long") if i - at >= room else self._rejection(text[i])
            if rejection is not None:
                self._held += text[at:i]
                self._block = None
                self._count(rejection)
                self._release(content)
                return i
        self._held += text[at:]
        return len(text)

    def _rejection(self, c: str) -> _Rejected | None:
        assert self._block is not None
        try:
            self._block.send(c)
        except _Rejected as rejection:
            return rejection
        return None

    def _count(self, rejection: _Rejected) -> None:
        if rejection.reason:
            self.rejected.append(rejection.reason)
            self._off = True

    def _release(self, content: list[str]) -> None:
        """The text held back is content."""
        self._blank = self._blank and not self._held.strip(_BLANK)
        self._line_start = bool(self._held.strip(_BLANK)) and _LEAD.search(self._held) is not None
        content.append(self._held)
        self._held = ""

    def _read_block(self) -> Steps[list[ToolCall]]:
        """Calls up to the end of the answer."""
        c = yield
        calls: list[ToolCall] = []
        while c:
            calls += yield from self._unit(c, calls)
            c = yield from self._blanks()
            if c and c in ",;" and not (c := (yield from self._blanks())):
                raise _Rejected("cut")
        return calls

    def _unit(self, c: str, before: list[ToolCall]) -> Steps[list[ToolCall]]:
        """Calls that stand in one pair of marks."""
        if c == "`":
            return (yield from self._fenced())
        if c == "{" and "json" in self.forms:
            return [(yield from self._object())]
        if c == "[":
            return (yield from self._listed())
        if c == "<" and "xml" in self.forms:
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
        calls = yield from self._units((yield from self._blanks()), "`")
        yield from self._literal("``", "followed_by_text")
        self._code = False
        return calls

    def _object(self) -> Steps[ToolCall]:
        """{"name": ..., "arguments": {...}}, or {{...}} as Qwen2.5-Coder's template shows it."""
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
        return self._checked(name, json.loads(arguments), arguments)

    def _listed(self) -> Steps[list[ToolCall]]:
        c = yield from self._blanks()
        if (c.isalpha() or c == "_") and "python" in self.forms:
            return (yield from self._python(c))
        calls: list[ToolCall] = []
        while c == "{" and "json" in self.forms:
            calls.append((yield from self._object()))
            c = yield from self._blanks()
            if c == ",":
                c = yield from self._blanks()
        if c != "]" or not calls:
            raise _Rejected(("syntax" if c else "cut") if calls else "")
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
        while (c := (yield)) and c in _BLANK:
            pass
        return c

    def _checked(self, name: str, arguments: Any, text: str = "") -> ToolCall:
        if name not in self.offered.names:
            raise _Rejected("unknown_tool")
        if not isinstance(arguments, dict) or not self.offered.fits(name, arguments):
            raise _Rejected("arguments")
        return ToolCall(name, arguments, text)


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
