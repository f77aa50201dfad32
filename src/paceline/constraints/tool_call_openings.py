"""Finds where free text has begun a JSON call of an offered tool: an automaton over the text's bytes.

An opening is {"name": "tool", "arguments": with any white space, up to the colon. It counts where
`text/tool_calls/detector.py` looks for calls: on a line of its own, in a list there, or after another call;
bare, or in a code fence of which it is the beginning.
"""

import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from paceline.text.tool_calls.detector import FENCES

_BLANK: Final = b" \t\r\n"
_NEWLINE: Final = ord("\n")
START: Final = 0  # the state of an empty text


@dataclass(slots=True)
class _Region:
    """Prose, or the inside of a code fence: the states after text that is no opening."""

    line: int  # on a new line
    text: int  # elsewhere


@dataclass(slots=True)
class _Node:
    region: _Region
    after: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OpeningState:
    """Where a text is, and the part of an opening that it ends with."""

    node: int = START
    opening: bytes = b""  # from the brace on


class ToolCallOpenings:
    def __init__(self, tools: Iterable[str]) -> None:
        self._nodes: list[_Node] = []
        self._inside: set[int] = set()  # nodes within an opening, after its brace
        self._resume: dict[int, int] = {}  # from a complete opening to the state after its whole call
        names = [json.dumps(tool, ensure_ascii=False)[1:-1].encode() for tool in tools]
        prose, code = _Region(0, 1), _Region(2, 3)
        for region in (prose, prose, code, code):
            self._add(region)
        closing = self._add(code)  # the first backtick of a fence's end
        self._literal(closing, b"``", code, prose.text)
        opening = self._add(prose)
        fence = self._literal(opening, b"``", prose, self._add(code))
        inside, bare = self._calls(names, code, closing), self._calls(names, prose, opening)
        for language in ("", *FENCES):
            end = self._literal(fence, language.encode(), code)
            self._nodes[end].after |= {ord(" "): end, _NEWLINE: inside}
        self._nodes[prose.line].after |= dict.fromkeys(_BLANK, prose.line) | {ord("`"): opening}
        self._nodes[prose.line].after |= {byte: self._nodes[bare].after[byte] for byte in b"{["}
        self._nodes[code.line].after |= dict.fromkeys(_BLANK, code.line) | {ord("`"): closing}
        self._distances = self._to_complete()

    def after(self, state: OpeningState, text: bytes) -> OpeningState:
        """The state after more text; after the first opening that it completes, if any."""
        node, begin = state.node, -1
        for i, byte in enumerate(text):
            here = self._nodes[node]
            region = here.region
            following = here.after.get(byte)
            if following is None:
                following = region.line if byte == _NEWLINE else region.text
            if following in self._inside and node not in self._inside:
                begin = i
            node = following
            if node in self._resume:
                break
        if node not in self._inside:
            return OpeningState(node)
        return OpeningState(node, text[begin:] if begin >= 0 else state.opening + text)

    def complete(self, state: OpeningState) -> bool:
        return state.node in self._resume

    def resumed(self, state: OpeningState) -> OpeningState:
        """After the whole call that a complete opening begins."""
        return OpeningState(self._resume[state.node])

    def distance(self, state: OpeningState) -> int:
        """The fewest bytes that complete an opening."""
        return self._distances[state.node]

    def _add(self, region: _Region, blanks: bool = False) -> int:
        node = len(self._nodes)
        self._nodes.append(_Node(region, dict.fromkeys(_BLANK, node) if blanks else {}))
        return node

    def _literal(self, node: int, text: bytes, region: _Region, end: int | None = None) -> int:
        """Nodes for this text, shared with texts that begin alike; the last is `end`, if given."""
        for i, byte in enumerate(text):
            last = i == len(text) - 1
            if byte not in self._nodes[node].after:
                self._nodes[node].after[byte] = end if last and end is not None else self._add(region)
            node = self._nodes[node].after[byte]
        return node

    def _calls(self, names: Iterable[bytes], region: _Region, backtick: int) -> int:
        """The state before a call, and after one. backtick: the state after a backtick there."""
        around = self._add(region, blanks=True)
        first = len(self._nodes)
        brace, name = self._add(region, blanks=True), self._add(region, blanks=True)
        value, quote, complete = self._add(region, blanks=True), self._add(region), self._add(region)
        self._literal(brace, b'"name"', region, name)
        self._nodes[name].after[ord(":")] = value
        self._nodes[value].after[ord('"')] = quote
        for written in names:  # each tool has nodes of its own: its grammar decides what may follow them
            comma, key, colon = (self._add(region, blanks=True) for _ in range(3))
            end = self._literal(quote, written, region)
            self._nodes[end].after[ord('"')] = comma
            self._nodes[comma].after[ord(",")] = key
            for argument in (b'"arguments"', b'"parameters"'):
                self._literal(key, argument, region, colon)
            self._nodes[colon].after[ord(":")] = complete
        self._inside |= set(range(first, len(self._nodes)))
        listed = self._add(region, blanks=True)
        self._nodes[listed].after[ord("{")] = brace
        self._nodes[around].after |= dict.fromkeys(b",;]", around)
        self._nodes[around].after |= {ord("{"): brace, ord("["): listed, ord("`"): backtick}
        self._resume[complete] = around
        return around

    def _to_complete(self) -> Mapping[int, int]:
        before: dict[int, set[int]] = {}
        for i, node in enumerate(self._nodes):
            for following in {*node.after.values(), node.region.line, node.region.text}:
                before.setdefault(following, set()).add(i)
        distances = dict.fromkeys(self._resume, 0)
        reached = deque(self._resume)
        while reached:
            here = reached.popleft()
            for earlier in before.get(here, ()):
                if earlier not in distances:
                    distances[earlier] = distances[here] + 1
                    reached.append(earlier)
        return distances
