"""Free text until a trigger appears, or the opening of a call without one; then a grammar.

The trigger is searched in the bytes of the text, wherever token boundaries fall. A token that would complete
it must be one that the grammar accepts; all others stay free. The grammar's text begins with the trigger, so
its cursor first consumes the part already written, and then the token that completes it. Openings are found
by `tool_call_openings.py`, and treated alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from paceline.constraints.cursor import copied
from paceline.constraints.mask_batch import MatcherCopy
from paceline.constraints.tool_call_openings import OpeningState, ToolCallOpenings
from paceline.types import Bits, Cursor

_QUOTE, _BACKSLASH, _BRACE = b'"\\{'
DISABLED: Final = -1  # the trigger counts only at the start, and the text began otherwise

# The grammar's cursor after these bytes, if it accepts them. True: quick, it has not consumed them if the
# grammar has to be compiled again.
Start = Callable[[bytes, bool], Cursor | None]


@dataclass(slots=True)
class Trigger:
    """A trigger, and the tokens that matter for it."""

    text: bytes
    pieces: Sequence[bytes]  # [vocab]
    start: Start
    again: bool
    anywhere: bool
    eos: frozenset[int]
    last: Sequence[int]  # tokens with the trigger's last byte
    must: bool = False
    _gates: dict[int, Bits | None] = field(default_factory=dict)

    def completes(self, written: int, token: int) -> bool:
        """True if this token completes the trigger, of which `written` bytes stand before it."""
        text = self.text[:written] + self.pieces[token]
        return self.text in text if self.anywhere else text.startswith(self.text)

    def after(self, written: int, token: int) -> int:
        """Bytes of the trigger that the text ends with after a token that does not complete it."""
        text = self.text[:written] + self.pieces[token]
        if not self.anywhere:
            return len(text) if self.text.startswith(text) else DISABLED
        longest = min(len(text), len(self.text) - 1)
        return next((n for n in range(longest, 0, -1) if text.endswith(self.text[:n])), 0)

    def entered(self, written: int, token: int, quick: bool = False) -> Cursor | None:
        """The grammar's cursor after a token that completes the trigger, if the grammar accepts it.

        quick: for the engine's thread; a grammar that is broken is compiled by the cursor's `settle`.
        """
        begin, piece = self.text[:written], self.pieces[token]
        for n in range(written, -1, -1):  # a partial trigger may be abandoned for a new one
            if begin.endswith(self.text[:n]) and piece.startswith(self.text[n:]):
                return _entered(self.start(self.text[:n], quick), token, quick)
        return None  # the token begins with other text

    def gate(self, written: int) -> Bits | None:
        """The mask of free text: None if any token may follow."""
        if written == DISABLED and not self.must:
            return None
        if written not in self._gates:
            self._gates[written] = self._mask(written)
        return self._gates[written]

    def _mask(self, written: int) -> Bits | None:
        completing = [t for t in self.last if written != DISABLED and self.completes(written, t)]
        forbidden = [t for t in completing if self.entered(written, t) is None]
        if self.must:
            forbidden += self.eos
        return _without(forbidden, len(self.pieces)) if forbidden else None


@dataclass(frozen=True, slots=True)
class Nesting:
    """The open braces in the JSON of a call. The grammar sees to it that it is JSON: braces suffice here."""

    depth: int = 1
    in_string: bool = False
    escaped: bool = False

    def after(self, text: bytes) -> tuple["Nesting", int]:
        """And the position after the last brace, or -1."""
        depth, in_string, escaped = self.depth, self.in_string, self.escaped
        for i, byte in enumerate(text):
            if escaped:
                escaped = False
            elif byte == _QUOTE:
                in_string = not in_string
            elif in_string:
                escaped = byte == _BACKSLASH
            elif byte in b"{}":
                depth += 1 if byte == _BRACE else -1
                if not depth:
                    return Nesting(0), i + 1
        return Nesting(depth, in_string, escaped), -1


@dataclass(slots=True)
class Openings:
    """Openings of calls without a trigger, and the tokens that complete one."""

    automaton: ToolCallOpenings
    pieces: Sequence[bytes]  # [vocab]
    start: Start
    last: Sequence[int]  # tokens with the last byte of an opening
    _gates: dict[int, Bits | None] = field(default_factory=dict)  # by node

    def entered(self, state: OpeningState, token: int, quick: bool = False) -> Cursor | None:
        """The grammar's cursor after a token that completes an opening, if the grammar accepts it."""
        if not state.opening:  # the token begins with other text
            return None
        return _entered(self.start(state.opening, quick), token, quick)

    def gate(self, state: OpeningState) -> Bits | None:
        """The mask of free text: None if any token may follow. White space in one changes nothing."""
        if state.node not in self._gates:
            self._gates[state.node] = self._mask(state)
        return self._gates[state.node]

    def _mask(self, state: OpeningState) -> Bits | None:
        automaton, pieces = self.automaton, self.pieces
        long = [t for t in self.last if len(pieces[t]) >= automaton.distance(state)]
        completing = [t for t in long if automaton.complete(automaton.after(state, pieces[t]))]
        forbidden = [t for t in completing if self.entered(state, t) is None]
        return _without(forbidden, len(pieces)) if forbidden else None


def _entered(cursor: Cursor | None, token: int, quick: bool) -> Cursor | None:
    accepted = cursor is not None and (cursor.commit(token) if quick else cursor.advance(token))
    return cursor if accepted else None


def _without(tokens: Sequence[int], vocab: int) -> Bits:
    row = np.full((vocab + 31) // 32, 0xFFFFFFFF, np.uint32)
    for token in tokens:
        row[token // 32] &= ~np.uint32(1 << token % 32)
    return row


class TriggerCursor(Cursor):
    def __init__(self, trigger: Trigger, ignore_eos: bool = False, openings: Openings | None = None) -> None:
        self._trigger = trigger
        self._openings = openings
        self._opening = OpeningState()
        self._ignore_eos = ignore_eos  # in free text
        self._written = 0  # bytes of the trigger that the text ends with
        self._inner: Cursor | None = None  # the grammar's cursor, once the trigger or an opening is complete
        self._resumes: OpeningState | None = None  # after the call that an opening has begun
        self._nesting = Nesting()  # within that call
        self._committed = -1  # the last token
        self._ended = False
        self._hints = False  # it never compiles

    @property
    def finished(self) -> bool:
        return self._ended or (self._inner is not None and self._inner.finished)

    def fill(self, row: Bits) -> bool:
        assert not self.finished, "nothing can follow"
        if self._inner is not None:
            return self._inner.fill(row)
        gates = [self._trigger.gate(self._written)]
        if self._openings is not None:
            gates.append(self._openings.gate(self._opening))
        masks = [gate for gate in gates if gate is not None]
        for i, mask in enumerate(masks):
            row[:] = mask if not i else row & mask
        return bool(masks)

    def matcher_copy(self) -> MatcherCopy | None:
        """Not where free text may follow: after the last brace of a call that an opening has begun."""
        return None if self._inner is None or self._resumes is not None else self._inner.matcher_copy()

    def advance(self, token: int) -> bool:
        if self.finished or not 0 <= token < len(self._trigger.pieces):
            return False
        if self._inner is None:
            return self._advance_free(token, self._hints)
        if not self._inner.advance(token):
            return False
        self._after_inner(token)
        return True

    def commit(self, token: int) -> bool:
        if self._inner is None:
            self._committed = token
            return not self.finished and self._advance_free(token, quick=True)
        if self.finished or not self._inner.commit(token):
            return False
        self._committed = token
        self._after_inner(token)
        return True

    def _after_inner(self, token: int) -> None:
        if self._resumes is not None:
            self._follow_call(self._trigger.pieces[token])
        elif self._inner is not None and self._inner.finished:
            self._leave(token)

    def _follow_call(self, text: bytes) -> None:
        """Free text follows the last brace of a call that an opening has begun."""
        self._nesting, end = self._nesting.after(text)
        if end >= 0 and self._openings is not None and self._resumes is not None:
            self._opening = self._openings.automaton.after(self._resumes, text[end:])
            self._inner = self._resumes = None

    @property
    def unsettled(self) -> bool:
        return self._inner is not None and self._inner.unsettled

    def settle(self) -> None:
        if self._inner is not None:
            self._inner.settle()
            if self._inner.finished and not self._ended:
                self._leave(self._committed)

    def _advance_free(self, token: int, quick: bool) -> bool:
        trigger = self._trigger
        if token in trigger.eos and not self._ignore_eos:
            self._ended = not trigger.must
            return self._ended
        if self._written != DISABLED and trigger.completes(self._written, token):
            self._inner = self._as_hints(trigger.entered(self._written, token, quick))
            return self._inner is not None
        if self._openings is not None and not self._advance_opening(self._openings, token, quick):
            return False
        if self._written != DISABLED:
            self._written = trigger.after(self._written, token)
        return True

    def _as_hints(self, inner: Cursor | None) -> Cursor | None:
        return inner.hints() if inner is not None and self._hints else inner

    def _advance_opening(self, openings: Openings, token: int, quick: bool) -> bool:
        piece = self._trigger.pieces[token]
        after = openings.automaton.after(self._opening, piece)
        if not openings.automaton.complete(after):
            self._opening = after
            return True
        self._inner = self._as_hints(openings.entered(self._opening, token, quick))
        if self._inner is None:
            return False
        ends = (
            i
            for i in range(1, len(piece))
            if openings.automaton.complete(openings.automaton.after(self._opening, piece[:i]))
        )
        self._resumes, self._nesting = openings.automaton.resumed(after), Nesting()
        self._follow_call(piece[next(ends, len(piece)) :])
        return True

    def _leave(self, token: int) -> None:
        """The grammar is complete. Free text follows, unless the model has ended the output."""
        if self._trigger.again and token not in self._trigger.eos:
            self._inner, self._written, self._opening = None, 0, OpeningState()
        else:
            self._ended = True

    def forced(self) -> list[int]:
        return [] if self._inner is None else self._inner.forced()

    def canonical(self) -> list[int]:
        return [] if self._inner is None else self._inner.canonical()

    def hints(self) -> "TriggerCursor":
        other = copied(self)
        other._inner, other._hints = None if self._inner is None else self._inner.hints(), True
        return other

    def clone(self) -> "TriggerCursor":
        other = copied(self)
        other._inner = None if self._inner is None else self._inner.clone()
        return other

    def fork(self) -> "TriggerCursor":
        other = copied(self)
        other._inner = None if self._inner is None else self._inner.fork()
        return other
