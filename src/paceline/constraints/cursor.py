"""A place in a grammar.

One matcher serves all cursors of an output: it is taken from place to place by rolling back to where two
places part and reading on from there. So a fork costs nothing, whatever the length of the output.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from paceline.errors import ConstraintError
from paceline.types import Bits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")


class _Place:
    """The end of some tokens that the grammar takes."""

    __slots__ = ("depth", "parent", "stopped", "token")

    def __init__(self, parent: "_Place | None", token: int, depth: int, stopped: bool) -> None:
        self.parent = parent
        self.token = token
        self.depth = depth
        self.stopped = stopped  # only an end may follow


class Grammar:
    """A grammar as compiled, to be copied for each output.

    Copies share the memory of their lexer, so an error in one spoils all: then it is compiled anew.
    """

    def __init__(self, make: "Callable[[], LLMatcher]") -> None:
        self._make = make
        self.matcher = make()

    def renew(self) -> None:
        self.matcher = self._make()


class Walker:
    """A matcher that can be taken to any place."""

    def __init__(self, grammar: Grammar, tokenizer: "LLTokenizer") -> None:
        self.tokenizer = tokenizer
        self.eos: Final = frozenset(tokenizer.eos_tokens)
        self._grammar = grammar
        self._of = grammar.matcher
        self._matcher = grammar.matcher.deep_copy()
        self._careful = False
        self.start = self._at = _Place(None, -1, 0, self._matcher.is_stopped())

    def ask(self, place: _Place, question: "Callable[[LLMatcher], T]") -> T:
        """What a matcher says that stands there. An error counts only if a new matcher makes it too."""
        message = ""
        for _ in range(2):
            if self._move(place):
                said = question(self._matcher)
                if not self._matcher.is_error():
                    return said
            message = _broken(self._matcher)
            self._grammar.renew()
        raise ConstraintError(message)

    def _move(self, place: _Place) -> bool:
        if self._of is not self._grammar.matcher:
            self._start_again()
        back, there, path = self._at, place, []
        while back is not there:
            if back.depth >= there.depth and back.parent is not None:
                back = back.parent
            else:
                assert there.parent is not None
                path.append(there.token)
                there = there.parent
        up = self._at.depth - back.depth
        self._at = place
        return (not up or self._matcher.rollback(up)) and self._read(path[::-1])

    def _read(self, tokens: list[int]) -> bool:
        if not self._careful:
            return not tokens or self._matcher.try_consume_tokens(tokens) == len(tokens)
        for token in tokens:
            self._matcher.compute_bitmask()
            if self._matcher.try_consume_tokens([token]) != 1:
                return False
        return True

    def _start_again(self) -> None:
        """After an error, in this output or in another.

        From then on a mask comes before each token, as when an output is written token by token: how much a
        matcher may still be asked depends on what it was asked before.
        """
        self._of = self._grammar.matcher
        self._matcher = self._of.deep_copy()
        self._at = self.start
        self._careful = True

    def step(self, place: _Place, token: int) -> _Place | None:
        """None: the token cannot be taken."""
        try:
            taken, stopped = self.ask(
                place, lambda matcher: (matcher.try_consume_tokens([token]) == 1, matcher.is_stopped())
            )
        except ConstraintError:
            return None
        if not taken:
            return None
        self._at = _Place(place, token, place.depth + 1, stopped)
        return self._at

    def fill(self, place: _Place, row: Bits) -> None:
        """An error would leave a row that allows an end, as if the output were complete."""
        self.ask(place, lambda matcher: matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes))
        if not row.any():
            raise ConstraintError("the grammar has come to a dead end: no token of the model can follow")

    def accepting(self, place: _Place) -> bool:
        try:
            return self.ask(place, lambda matcher: matcher.is_accepting())
        except ConstraintError:
            return False

    def forced(self, place: _Place) -> list[int]:
        """A guess: where it goes wrong, nothing is certain."""
        try:
            return self.ask(place, lambda matcher: matcher.compute_ff_tokens())
        except ConstraintError:
            return []

    def forced_text(self, place: _Place) -> bytes:
        try:
            return self.ask(place, lambda matcher: matcher.compute_ff_bytes())
        except ConstraintError:
            return b""


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
            self._ended = self._walker.accepting(self._place)
            return self._ended
        place = self._walker.step(self._place, token)
        if place is not None:
            self._place = place
        return place is not None

    def forced(self) -> list[int]:
        return [] if self.finished else self._walker.forced(self._place)

    def spelled(self) -> list[int]:
        """Text that ends within a word is left alone: the model would write the whole word as one token."""
        if self.finished:
            return []
        text = self._walker.forced_text(self._place)
        if not text or b"\xff" in text or text[-1:].isalnum() or text.endswith(b"_"):
            return []
        return self._walker.tokenizer.tokenize_bytes(text)

    def fork(self) -> "GrammarCursor":
        return GrammarCursor(self._walker, self._place, self._ended)


def _broken(matcher: "LLMatcher") -> str:
    reason = matcher.get_error().strip().splitlines()
    return f"the grammar cannot be followed any further: {reason[0] if reason else matcher.stop_reason()}"
