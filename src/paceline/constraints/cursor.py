"""A place in a grammar.

One matcher serves all cursors of an output: it is taken from place to place by rolling back to where two
places part and reading on from there. So a fork costs nothing, whatever the length of the output.
"""

from typing import TYPE_CHECKING, Final

from paceline.errors import ConstraintError
from paceline.types import Bits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class _Place:
    """The end of some tokens that the grammar takes."""

    __slots__ = ("depth", "parent", "stopped", "token")

    def __init__(self, parent: "_Place | None", token: int, depth: int, stopped: bool) -> None:
        self.parent = parent
        self.token = token
        self.depth = depth
        self.stopped = stopped  # only an end may follow


class Walker:
    """A matcher that can be taken to any place."""

    def __init__(self, pristine: "LLMatcher", tokenizer: "LLTokenizer") -> None:
        self.tokenizer = tokenizer
        self.eos: Final = frozenset(tokenizer.eos_tokens)
        self._pristine = pristine
        self._matcher = pristine.deep_copy()
        self.start = self._at = _Place(None, -1, 0, self._matcher.is_stopped())

    def at(self, place: _Place) -> "LLMatcher":
        """The matcher, standing there."""
        if self._at is place:
            return self._matcher
        back, there, path = self._at, place, []
        while back is not there:
            if back.depth >= there.depth and back.parent is not None:
                back = back.parent
            else:
                assert there.parent is not None
                path.append(there.token)
                there = there.parent
        self._move(self._at.depth - back.depth, path[::-1])
        self._at = place
        return self._matcher

    def _move(self, back: int, tokens: list[int]) -> None:
        if back and not self._matcher.rollback(back):
            raise ConstraintError(_broken(self._matcher))
        if tokens and self._matcher.try_consume_tokens(tokens) != len(tokens):
            raise ConstraintError(_broken(self._matcher))

    def step(self, place: _Place, token: int) -> _Place | None:
        matcher = self.at(place)
        taken = matcher.try_consume_tokens([token]) == 1
        if matcher.is_error():
            self._restart(place)
            return None
        if taken:
            self._at = _Place(place, token, place.depth + 1, matcher.is_stopped())
        return self._at if taken else None

    def _restart(self, place: _Place) -> None:
        """A matcher never leaves an error behind: a new one reads all from the start."""
        self._matcher = self._pristine.deep_copy()
        self._at = self.start
        self.at(place)

    def fill(self, place: _Place, row: Bits) -> None:
        matcher = self.at(place)
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if matcher.is_error():  # the row then allows an end, as if the output were complete
            message = _broken(matcher)
            self._restart(place)
            raise ConstraintError(message)
        if not row.any():
            raise ConstraintError("the grammar has come to a dead end: no token of the model can follow")


class GrammarCursor:
    def __init__(self, walker: Walker, place: _Place | None = None, ended: bool = False) -> None:
        self._walker = walker
        self._place = place or walker.start
        self._ended = ended

    @property
    def finished(self) -> bool:
        return self._ended or self._place.stopped

    def fill(self, row: Bits) -> bool:
        assert not self.finished, "nothing can follow"
        self._walker.fill(self._place, row)
        return True

    def advance(self, token: int) -> bool:
        if self.finished:
            return False
        if not 0 <= token < self._walker.tokenizer.vocab_size:
            return False
        if token in self._walker.eos:  # never shown to the matcher, which could not take it back
            self._ended = self._walker.at(self._place).is_accepting()
            return self._ended
        place = self._walker.step(self._place, token)
        if place is not None:
            self._place = place
        return place is not None

    def forced(self) -> list[int]:
        return [] if self.finished else self._walker.at(self._place).compute_ff_tokens()

    def spelled(self) -> list[int]:
        """Text that ends within a word is left alone: the model would write the whole word as one token."""
        if self.finished:
            return []
        text = self._walker.at(self._place).compute_ff_bytes()
        if not text or b"\xff" in text or text[-1:].isalnum() or text.endswith(b"_"):
            return []
        return self._walker.tokenizer.tokenize_bytes(text)

    def fork(self) -> "GrammarCursor":
        return GrammarCursor(self._walker, self._place, self._ended)


def _broken(matcher: "LLMatcher") -> str:
    reason = matcher.get_error().strip().splitlines()
    return f"the grammar cannot be followed any further: {reason[0] if reason else matcher.stop_reason()}"
