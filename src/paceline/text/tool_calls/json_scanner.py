"""An incremental JSON scanner: finds the end of a value, and the first character that is not JSON."""

import re
from collections.abc import Callable
from typing import Final

_BLANK: Final = " \t\r\n"
_ATOM: Final = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_ATOM_CHARACTERS: Final = frozenset("+-.0123456789eEtrufalsn")
_HEX: Final = frozenset("0123456789abcdefABCDEF")
# Limits of json.loads, which recurses into nested values and limits the digits of a number.
_MAX_DEPTH: Final = 100
_MAX_ATOM: Final = 400


class JsonScanner:
    """Follows one JSON value. Control characters in strings are accepted: models write them."""

    def __init__(self) -> None:
        self._open: list[str] = []  # the bracket that closes each open object or list
        self._next: Callable[[str], bool] = self._value
        self._atom = ""
        self._key = False  # the string being read is an object's key
        self._hex_left = 0

    @property
    def depth(self) -> int:
        """Open objects and lists."""
        return len(self._open)

    @property
    def in_string(self) -> bool:
        return self._next == self._string

    @property
    def in_key(self) -> bool:
        return self._key and self.in_string

    @property
    def in_value(self) -> bool:
        """Within a value's string, or in a number, true, false or null."""
        in_string = self._next in (self._string, self._escape, self._unicode_escape)
        return self._next == self._in_atom or (in_string and not self._key)

    def feed(self, character: str) -> bool:
        """False if the character cannot stand here; nothing may be fed after that."""
        return self._next(character)

    def _value(self, c: str) -> bool:
        if c in _BLANK:
            return True
        if c == '"':
            return self._begin_string(key=False)
        if c in "{[":
            return self._open_bracket(c)
        if c not in _ATOM_CHARACTERS:
            return False
        self._atom = c
        self._next = self._in_atom
        return True

    def _open_bracket(self, c: str) -> bool:
        self._open.append("}" if c == "{" else "]")
        self._next = self._first_key if c == "{" else self._first_item
        return len(self._open) <= _MAX_DEPTH

    def _first_item(self, c: str) -> bool:
        return self._close() if c == "]" else self._value(c)

    def _first_key(self, c: str) -> bool:
        return self._close() if c == "}" else self._before_key(c)

    def _before_key(self, c: str) -> bool:
        return c in _BLANK or (c == '"' and self._begin_string(key=True))

    def _colon(self, c: str) -> bool:
        if c == ":":
            self._next = self._value
        return c == ":" or c in _BLANK

    def _after_value(self, c: str) -> bool:
        if c in _BLANK:
            return True
        if not self._open:
            return False
        if c == ",":
            self._next = self._before_key if self._open[-1] == "}" else self._value
            return True
        return c == self._open[-1] and self._close()

    def _close(self) -> bool:
        self._open.pop()
        self._next = self._after_value
        return True

    def _begin_string(self, key: bool) -> bool:
        self._key = key
        self._next = self._string
        return True

    def _string(self, c: str) -> bool:
        if c == '"':
            self._next = self._colon if self._key else self._after_value
        elif c == "\\":
            self._next = self._escape
        return True

    def _escape(self, c: str) -> bool:
        self._hex_left = 4
        self._next = self._unicode_escape if c == "u" else self._string
        return c in '"\\/bfnrtu'

    def _unicode_escape(self, c: str) -> bool:
        self._hex_left -= 1
        if not self._hex_left:
            self._next = self._string
        return c in _HEX

    def _in_atom(self, c: str) -> bool:
        if c in _ATOM_CHARACTERS:
            self._atom += c
            return len(self._atom) <= _MAX_ATOM
        self._next = self._after_value
        return _ATOM.fullmatch(self._atom) is not None and self._after_value(c)
