"""Fixed text with gaps, each with a constraint of its own, as one grammar.

Holes that are regular languages form one terminal together with the fixed text around them. The engine's
lexer is greedy: a hole that is a terminal of its own would consume the fixed text after it wherever the hole
may contain that text too.
"""

import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, zip_longest
from typing import Any, Final

from paceline.constraints.grammars import Choice, Constraint, Json, Regex, Spell, quoted
from paceline.constraints.python_types import Output, output
from paceline.constraints.text_matcher import as_bytes, ends
from paceline.errors import ConstraintError

# Numbers and booleans are bare in JSON too; as patterns they may stand right before any text.
_BARE: Final = {
    int: r"-?(?:0|[1-9][0-9]*)",
    float: r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?",
    bool: "true|false",
}


@dataclass(frozen=True, slots=True)
class Hole:
    path: tuple[str, ...]  # its name, after the names of the holes around it
    output: Output | None  # None: free text, up to the fixed text that follows

    def constraint(self, following: str) -> Constraint:
        if self.output is not None:
            return self.output.constraint
        first = f"\\x{{{ord(following[0]):x}}}" if following else ""
        return Regex(f"[^\\n\\r{first}]+")

    def value(self, text: str) -> Any:
        try:
            return text if self.output is None else self.output.parse(text)
        except ConstraintError as problem:
            raise ConstraintError(f"{'.'.join(self.path)}: {problem}") from None


Piece = str | Hole


@dataclass(frozen=True, slots=True, init=False)
class Template:
    """Fixed text with holes: Template("{name} is {age} years old.", name=str, age=int).

    Holes are named in braces; {{ and }} are braces of the text. A hole takes whatever `output` takes, another
    template included, and str: one or more characters, none of which breaks the line or is the first
    character of the fixed text that follows. int, float (without an exponent) and bool are written bare, as
    are texts; other types as JSON. Holes have fixed text between them.
    """

    text: str
    pieces: tuple[Piece, ...]  # non-empty fixed texts and holes, alternating

    def __init__(self, text: str, /, **holes: Any) -> None:
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "pieces", _joined(_read(text, holes)))
        _check(self.pieces)

    def rules(self, name: str, spell: Spell) -> str:
        runs = [list(run) for _, run in groupby(_parts(self.pieces, name, spell), lambda part: part.regular)]
        sequence, rules = [], []
        for i, run in enumerate(runs):
            if any(part.hole for part in run if part.regular):
                sequence.append(f"{name}_run{i}")
                rules.append(
                    _terminal(sequence[-1], run, lazy=i + 1 < len(runs) and bool(runs[i + 1][0].rules))
                )
            else:
                sequence += [part.item for part in run]
                rules += [part.rules for part in run if part.rules]
        return "\n".join([f"{name}: {' '.join(sequence)}", *rules])

    def parse(self, text: str) -> dict[str, Any]:
        """The values of the holes; if the text can be read in several ways, the first."""
        raw = as_bytes(text)
        values: dict[str, Any] = {}
        for hole, (start, end) in zip(_holes(self.pieces), _Search(self.pieces, raw).spans(), strict=True):
            inner = values
            for name in hole.path[:-1]:
                inner = inner.setdefault(name, {})
            inner[hole.path[-1]] = hole.value(raw[start:end].decode())
        return values


def _read(text: str, holes: Mapping[str, Any]) -> Iterator[Piece]:
    """Fixed texts and holes in order, those of nested templates included."""
    seen: set[str] = set()
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as problem:
        raise ConstraintError(
            f"the template cannot be read ({problem}): {{{{ is a brace of the text"
        ) from None
    for fixed, name, form, conversion in parts:
        yield fixed
        if name is None:
            continue
        if not name.isidentifier() or form or conversion:
            given = f"{name}{'!' + conversion if conversion else ''}{':' + form if form else ''}"
            raise ConstraintError(
                f"the hole {{{given}}} is not usable: expected a name in braces, and no more"
            )
        if name in seen:
            raise ConstraintError(f"the hole {name} is there twice: each needs a name of its own")
        if name not in holes:
            raise ConstraintError(f"the hole {name} has no constraint: give it one as {name}=...")
        seen.add(name)
        yield from _filled(name, holes[name])
    if unused := sorted(holes.keys() - seen):
        raise ConstraintError(f"no hole in the template is named {', '.join(unused)}")
    if not seen:
        raise ConstraintError("the template has no holes: nothing is left to write")


def _filled(name: str, given: Any) -> Iterator[Piece]:
    if isinstance(given, Template):
        yield from (p if isinstance(p, str) else Hole((name, *p.path), p.output) for p in given.pieces)
    elif given is str:
        yield Hole((name,), None)
    elif isinstance(given, type) and given in _BARE:
        yield Hole((name,), Output(Regex(_BARE[given]), output(given).parse))
    else:
        try:
            yield Hole((name,), output(given))
        except ConstraintError as problem:
            raise ConstraintError(f"the hole {name}: {problem}") from None


def _joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Joins adjacent fixed texts, and drops empty ones."""
    joined: list[Piece] = []
    for fixed, run in groupby(pieces, lambda piece: isinstance(piece, str)):
        alike = list(run)
        joined += ["".join(map(str, alike))] if fixed else alike
    return tuple(piece for piece in joined if piece != "")


def _check(pieces: Sequence[Piece]) -> None:
    for piece, following in pairwise(pieces):
        if not isinstance(piece, Hole):
            continue
        name = ".".join(piece.path)
        if isinstance(following, Hole):
            other = ".".join(following.path)
            raise ConstraintError(f"the holes {name} and {other} touch: put fixed text between them")
        if (
            piece.output is not None
            and isinstance(piece.output.constraint, Json)
            and following[0] in string.digits
        ):
            raise ConstraintError(f"a digit follows the hole {name}: no number in it would ever end")


def _holes(pieces: Iterable[Piece]) -> list[Hole]:
    return [piece for piece in pieces if isinstance(piece, Hole)]


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the template's rule."""

    item: str
    regular: bool = False  # may be part of a terminal
    hole: bool = False
    rules: str = ""  # those that define the item


def _parts(pieces: Sequence[Piece], name: str, spell: Spell) -> Iterator[_Part]:
    for i, (piece, following) in enumerate(zip_longest(pieces, pieces[1:], fillvalue="")):
        if isinstance(piece, str):
            yield _Part(quoted(piece), regular=True)
            continue
        constraint = piece.constraint(following if isinstance(following, str) else "")
        inner = f"{name}_{i}"
        rules = constraint.rules(inner, spell)
        if isinstance(constraint, Regex | Choice):
            yield _Part(f"({rules.removeprefix(inner + ':')})", regular=True, hole=True)
        else:
            yield _Part(inner, hole=True, rules=rules)


def _terminal(name: str, run: Iterable[_Part], lazy: bool) -> str:
    """A lazy terminal ends as soon as it can; otherwise it could consume the text of the next rule."""
    terminal = name.upper()
    return f"{name}{'[lazy]' if lazy else ''}: {terminal}\n{terminal}: {' '.join(part.item for part in run)}"


class _Search:
    """Backtracking search for the spans of the holes in a text. Dead ends are remembered."""

    def __init__(self, pieces: Sequence[Piece], text: bytes) -> None:
        self._pieces = pieces
        self._text = text
        self._dead: set[tuple[int, int]] = set()
        self._furthest = 0

    def spans(self) -> list[tuple[int, int]]:
        found = self._from(0, 0)
        if found is None:
            rest = self._text[self._furthest :].decode("utf-8", "replace")
            raise ConstraintError(f"the text does not fit the template from here on: {rest[:80]!r}")
        return found

    def _from(self, piece: int, at: int) -> list[tuple[int, int]] | None:
        """The spans of the holes from this piece on, which begins at byte `at`."""
        self._furthest = max(self._furthest, at)
        if piece == len(self._pieces):
            return [] if at == len(self._text) else None
        if (piece, at) in self._dead:
            return None
        here = self._pieces[piece]
        found = self._fixed(piece, at, here) if isinstance(here, str) else self._filled(piece, at, here)
        if found is None:
            self._dead.add((piece, at))
        return found

    def _fixed(self, piece: int, at: int, fixed: str) -> list[tuple[int, int]] | None:
        raw = as_bytes(fixed)
        return self._from(piece + 1, at + len(raw)) if self._text.startswith(raw, at) else None

    def _filled(self, piece: int, at: int, hole: Hole) -> list[tuple[int, int]] | None:
        following = self._pieces[piece + 1] if piece + 1 < len(self._pieces) else ""
        assert isinstance(following, str)
        for end in ends(hole.constraint(following), self._text, at, self._hole_ends(following, at)):
            rest = self._from(piece + 1, end)
            if rest is not None:
                return [(at, end), *rest]
        return None

    def _hole_ends(self, fixed: str, at: int) -> Iterator[int]:
        """Positions where a hole may end: before the fixed text after it, or at the end of the text."""
        raw = as_bytes(fixed)
        if not raw:
            yield len(self._text)
            return
        position = self._text.find(raw, at)
        while position >= 0:
            yield position
            position = self._text.find(raw, position + 1)
