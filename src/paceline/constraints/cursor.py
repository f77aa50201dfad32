"""A place in a grammar.

The matcher is never rolled back: it was seen to keep a mask over a rollback and to give it for another text.
A fork shares its origin's matcher until either of them moves on, and then takes a copy with it.
"""

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, TypeVar

from paceline.errors import ConstraintError
from paceline.types import Bits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")


class Grammar:
    """A grammar as compiled, to be copied for each output.

    Copies share the memory of their lexer, so an error in one spoils all: then it is compiled anew.
    """

    def __init__(self, make: "Callable[[], LLMatcher]", tokenizer: "LLTokenizer") -> None:
        self.tokenizer = tokenizer
        self.eos = frozenset(tokenizer.eos_tokens)
        self._make = make
        self.matcher = make()

    def renew(self) -> None:
        self.matcher = self._make()


class _Read:
    """The tokens read so far, the last one first."""

    __slots__ = ("before", "token")

    def __init__(self, before: "_Read | None", token: int) -> None:
        self.before = before
        self.token = token


class GrammarCursor:
    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._of = grammar.matcher  # what ours is a copy of
        self._matcher = grammar.matcher.deep_copy()
        self._shared = False  # with a fork
        self._read: _Read | None = None
        self._ended = False
        self._stopped = self._matcher.is_stopped()  # only an end may follow

    @property
    def finished(self) -> bool:
        return self._ended or self._stopped

    def fork(self) -> "GrammarCursor":
        self._shared = True
        return copy(self)

    def fill(self, row: Bits) -> bool:
        """An error would leave a row that allows an end, as if the output were complete."""
        assert not self.finished, "nothing can follow"
        self._ask(lambda matcher: matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes))
        if not row.any():
            raise ConstraintError("the grammar has come to a dead end: no token of the model can follow")
        return True

    def advance(self, token: int) -> bool:
        if self.finished or not 0 <= token < self._grammar.tokenizer.vocab_size:
            return False
        if token in self._grammar.eos:  # never shown to the matcher: a stopped one would not count it
            self._ended = self._guess(lambda matcher: matcher.is_accepting(), False)
            return self._ended
        if self._shared:
            self._matcher, self._shared = self._matcher.deep_copy(), False
        taken, stopped = self._guess(
            lambda matcher: (matcher.try_consume_tokens([token]) == 1, matcher.is_stopped()), (False, False)
        )
        if taken:
            self._read, self._stopped = _Read(self._read, token), stopped
        return taken

    def forced(self) -> list[int]:
        return [] if self.finished else self._guess(lambda matcher: matcher.compute_ff_tokens(), [])

    def canonical(self) -> list[int]:
        """Text that ends within a word is left alone: the model would write the whole word as one token."""
        text = b"" if self.finished else self._guess(lambda matcher: matcher.compute_ff_bytes(), b"")
        if not text or b"\xff" in text or text[-1:].isalnum() or text.endswith(b"_"):
            return []
        return self._grammar.tokenizer.tokenize_bytes(text)

    def _guess(self, question: "Callable[[LLMatcher], T]", otherwise: T) -> T:
        try:
            return self._ask(question)
        except ConstraintError:
            return otherwise

    def _ask(self, question: "Callable[[LLMatcher], T]") -> T:
        """What a matcher says that stands here. An error counts only if a new matcher makes it too."""
        message = ""
        for _ in range(2):
            if self._of is self._grammar.matcher or self._start_again():
                said = question(self._matcher)
                if not self._matcher.is_error():
                    return said
            message = _broken(self._matcher)
            self._grammar.renew()
        raise ConstraintError(message)

    def _start_again(self) -> bool:
        """After an error, in this output or in another: a new matcher reads it all.

        A mask comes before each token, as when an output is written token by token: how much a matcher may
        still be asked depends on what it was asked before.
        """
        self._of = self._grammar.matcher
        self._matcher, self._shared = self._of.deep_copy(), False
        tokens, at = [], self._read
        while at is not None:
            tokens.append(at.token)
            at = at.before
        for token in reversed(tokens):
            self._matcher.compute_bitmask()
            if self._matcher.try_consume_tokens([token]) != 1:
                return False
        return True


def _broken(matcher: "LLMatcher") -> str:
    reason = matcher.get_error().strip().splitlines()
    return f"the grammar cannot be followed any further: {reason[0] if reason else matcher.stop_reason()}"
