"""A position in a grammar: an llguidance matcher with cheap forks.

The matcher is never rolled back: after a rollback it was seen to return the mask of another text. A fork
shares its origin's matcher until either of the two advances, which then takes a copy.
"""

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, TypeVar

from paceline.errors import ConstraintError
from paceline.types import Bits, Cursor

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")


class Grammar:
    """A compiled grammar, copied for each output.

    Copies share the lexer's memory, so an error in one breaks all of them: then it is compiled again.
    """

    def __init__(self, make: "Callable[[], LLMatcher]", tokenizer: "LLTokenizer", size: int = 0) -> None:
        self.tokenizer = tokenizer
        self.eos = frozenset(tokenizer.eos_tokens)
        self._compiled_size = size  # bytes, by estimate
        self._make = make
        self._renewing = threading.Lock()
        self.matcher = make()
        self.lexer_s = 0.0  # time of queries since it was compiled, in which the lexer may have grown

    @property
    def size(self) -> int:
        """Bytes, by estimate: with the lexer's states that queries have added."""
        return self._compiled_size + int(self.lexer_s * LEXER_BYTES_PER_S)

    def renew(self, broken: "LLMatcher") -> None:
        """Compiles the grammar again, unless another thread has done so since `broken` was copied."""
        with self._renewing:
            if self.matcher is broken:
                self.matcher, self.lexer_s = self._make(), 0.0


class _TokenList:
    """The tokens consumed so far, the last one first."""

    __slots__ = ("before", "token")

    def __init__(self, before: "_TokenList | None", token: int) -> None:
        self.before = before
        self.token = token


class GrammarCursor(Cursor):
    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._origin = grammar.matcher  # ours is a copy of it
        self._matcher = grammar.matcher.deep_copy()
        self._shared = False  # with a fork
        self._consumed: _TokenList | None = None
        self._ended = False
        self._stopped = self._matcher.is_stopped()  # only an end may follow

    @property
    def finished(self) -> bool:
        return self._ended or self._stopped

    def fork(self) -> "GrammarCursor":
        self._shared = True
        return copy(self)

    def fill(self, row: Bits) -> bool:
        """Raises on an error of the matcher: its row would allow an end, as if the output were complete."""
        assert not self.finished, "nothing can follow"
        self._query(lambda matcher: matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes))
        if not row.any():
            raise ConstraintError("the grammar has come to a dead end: no token of the model can follow")
        return True

    def advance(self, token: int) -> bool:
        if self.finished or not 0 <= token < self._grammar.tokenizer.vocab_size:
            return False
        if token in self._grammar.eos:  # not fed to the matcher: a stopped one would not count it
            self._ended = self._query_or(lambda matcher: matcher.is_accepting(), False)
            return self._ended
        if self._shared:
            self._matcher, self._shared = self._matcher.deep_copy(), False
        accepted, stopped = self._query_or(
            lambda matcher: (matcher.try_consume_tokens([token]) == 1, matcher.is_stopped()), (False, False)
        )
        if accepted:
            self._consumed, self._stopped = _TokenList(self._consumed, token), stopped
        return accepted

    def forced(self) -> list[int]:
        return [] if self.finished else self._query_or(lambda matcher: matcher.compute_ff_tokens(), [])

    def canonical(self) -> list[int]:
        """Text that ends within a word is left alone: the model would write the whole word as one token."""
        text = b"" if self.finished else self._query_or(lambda matcher: matcher.compute_ff_bytes(), b"")
        if not text or b"\xff" in text or text[-1:].isalnum() or text.endswith(b"_"):
            return []
        return self._grammar.tokenizer.tokenize_bytes(text)

    def _query_or(self, query: "Callable[[LLMatcher], T]", default: T) -> T:
        try:
            return self._query(query)
        except ConstraintError:
            return default

    def _query(self, query: "Callable[[LLMatcher], T]") -> T:
        """The answer of a matcher at this position. An error counts only if a new matcher makes it too."""
        message = ""
        for _ in range(2):
            if self._origin is self._grammar.matcher or self._replay():
                answer = query(self._matcher)
                if not self._matcher.is_error():
                    return answer
            message = _error_message(self._matcher)
            self._grammar.renew()
        raise ConstraintError(message)

    def _replay(self) -> bool:
        """Feeds all tokens to a new matcher, after an error in this output or in another.

        A mask is computed before each token, as when the output was written: a matcher's remaining fuel
        depends on the queries before.
        """
        self._origin = self._grammar.matcher
        self._matcher, self._shared = self._origin.deep_copy(), False
        tokens, at = [], self._consumed
        while at is not None:
            tokens.append(at.token)
            at = at.before
        for token in reversed(tokens):
            self._matcher.compute_bitmask()
            if self._matcher.try_consume_tokens([token]) != 1:
                return False
        return True


def _error_message(matcher: "LLMatcher") -> str:
    reason = matcher.get_error().strip().splitlines()
    return f"the grammar cannot be followed any further: {reason[0] if reason else matcher.stop_reason()}"
