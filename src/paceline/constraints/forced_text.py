"""Lark grammars in which forced text may have no end.

llguidance computes forced text at once, with every mask, and never returns where that has no end:
`start: /a*/ start`, or `start: /a+/ "a"`, since its lexer takes the longest match. Its limits count rules and
new states of the lexer; a byte that leads back to the same state is free. So such text lies within one
terminal, in a repetition that leaves no choice of a byte.
"""

import re
from collections.abc import Iterator
from typing import Final

NO_FORCING: Final = '%llguidance {"no_forcing": true}'  # the model writes fixed text token by token
_LITERAL: Final = re.compile(r"""//[^\n]*|"(?:\\.|[^"\\\n])*"i?|/((?:\\.|[^/\\\n])+)/[is]*(?![a-z])""")
# Marks between literals of which this module knows nothing: they may make one terminal of several parts.
_UNKNOWN: Final = re.compile(r"""["/#&~\\]|\w\[|%(?!(?:import|ignore)\b)""")
_DEFINITION: Final = re.compile(r"^\s*[?!]*(\w+)\s*(?:\.\s*-?\d+)?\s*:", re.MULTILINE)
_REPEATED: Final = re.compile(r"[*+{]")
_UNBOUNDED: Final = re.compile(r"[*+]|\{\d*,\}")
_ATOM: Final = re.compile(r"\\[pPxuU]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?:|.", re.DOTALL)
_BOUNDED: Final = re.compile(r"\?|\{\d+(?:,\d+)?\}")
_WIDE: Final = (".", *(f"\\{kind}" for kind in "dwsDWS"))  # match two characters or more
_FLAGS: Final = re.compile(r"\(\?[^:]")
_RANGE: Final = re.compile(r"(\w)-(\w)")


def forced_text_ends(lark: str) -> bool:
    """True if no terminal repeats a fixed text without end. False where that cannot be told."""
    patterns = [match[1] for match in _LITERAL.finditer(lark) if match[1] is not None]
    outside = _LITERAL.sub(" ", lark)
    if _UNKNOWN.search(outside):
        return False
    bodies = _DEFINITION.split(outside)[1:]
    terminals = (
        body for name, body in zip(bodies[::2], bodies[1::2], strict=True) if name.lstrip("_")[:1].isupper()
    )
    return not any(map(_REPEATED.search, terminals)) and all(map(_leaves_a_choice, patterns))


def _leaves_a_choice(pattern: str) -> bool:
    """True if every unbounded repetition of a regular expression is that of a class of characters."""
    if _FLAGS.search(pattern):
        return False
    wide = False  # the atom before
    for atom in _atoms(pattern):
        if _UNBOUNDED.fullmatch(atom):
            if not wide:
                return False
        elif not _BOUNDED.fullmatch(atom):
            wide = atom in _WIDE or _wide_class(atom)
    return True


def _atoms(pattern: str) -> Iterator[str]:
    at = 0
    while at < len(pattern):
        match = _UNBOUNDED.match(pattern, at) or _BOUNDED.match(pattern, at) or _ATOM.match(pattern, at)
        assert match is not None, "any character is an atom"
        yield match[0]
        at = match.end()


def _wide_class(atom: str) -> bool:
    """A class of two characters or more; one with sets within it may have fewer."""
    if not atom.startswith("[") or any(mark in atom[1:] for mark in ("[", "&&", "--", "~~")):
        return False
    inside = atom[1:-1]
    if inside.startswith("^"):  # of all characters but a few
        return not re.search(r"-|\\[^nrt\\\"'\]/]", inside)
    if any(low < high for low, high in _RANGE.findall(inside)) or re.search(r"\\[dws]", inside):
        return True
    return len(set(re.sub(r"\\.|-", "", inside))) >= 2
