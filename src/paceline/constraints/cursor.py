"""A position in a grammar: an llguidance matcher with cheap forks.

The matcher is never rolled back: after a rollback it was seen to return the mask of another text. (Copies in
mask_batch.py are, within the one call that they live for.) A fork shares its origin's matcher until either of
the two advances, which then takes a copy.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from paceline.constraints.mask_batch import MatcherCopy
from paceline.errors import ConstraintError
from paceline.types import Bits, Cursor

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

T = TypeVar("T")
AnyCursor = TypeVar("AnyCursor", bound=Cursor)

SLOW_QUERY_S: Final = 0.001
DEFER_S: Final = 0.003  # after a mask that took longer, tokens are consumed when the next one is computed
EXECUTOR_THREADS: Final = 4
NICE: Final = 10
_LOCAL: Final = threading.local()  # no matcher may be used by two threads at once
LEXER_BYTES_PER_S: Final = 100 << 20  # how fast a lexer grows while it is built


class Source:
    """A matcher at the start of a grammar. Its copies share the lexer: an error in one breaks all of them."""

    __slots__ = ("broken", "matcher")

    def __init__(self, matcher: "LLMatcher") -> None:
        self.matcher = matcher
        self.broken = False


class Grammar:
    """A compiled grammar, copied for each output. Compiled again after an error, by the next output."""

    def __init__(
        self,
        make: "Callable[[], LLMatcher]",
        tokenizer: "LLTokenizer",
        size: int = 0,
        forces: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.forces = forces  # it may prescribe text; the text of one that does not may have no end
        self.eos = frozenset(tokenizer.eos_tokens)
        self._compiled_size = size  # bytes, by estimate
        self._make = make
        self._compiling = threading.Lock()
        self._source = self.compile()
        self._slow_s = 0.0  # of slow queries since it was compiled, in which the lexer has grown

    def compile(self) -> Source:
        """A source of its own for one output, which no other can break."""
        return Source(self._make())

    def source(self, compiles: bool = True) -> Source:
        """The one that outputs share. compiles: not for the engine's thread; without it, it may be broken."""
        if not compiles:
            return self._source
        with self._compiling:
            if self._source.broken:
                self._source, self._slow_s = self.compile(), 0.0
            return self._source

    def took(self, seconds: float) -> None:
        """Counts a query that was slow, since it has built parts of the lexer."""
        if seconds > SLOW_QUERY_S:
            self._slow_s += seconds

    @property
    def size(self) -> int:
        """Bytes, by estimate: as compiled, and the parts of the lexer that queries have built."""
        return self._compiled_size + int(self._slow_s * LEXER_BYTES_PER_S)


class _TokenList:
    """The tokens consumed so far, the last one first."""

    __slots__ = ("before", "token")

    def __init__(self, before: "_TokenList | None", token: int) -> None:
        self.before = before
        self.token = token


class GrammarCursor(Cursor):
    def __init__(self, grammar: Grammar, compiles: bool = True) -> None:
        self._grammar = grammar
        self._source = grammar.source(compiles)
        self._matcher = self._source.matcher.deep_copy()
        self._shared = False  # with a fork
        self._behind = False  # the matcher has not consumed all tokens, and cannot go on
        self._deferred: tuple[int, ...] = ()  # tokens that the matcher has yet to consume
        self._slow = False
        self._alone = False  # the masks of others are computed without the next one
        self._mask: Bits | None = None  # at this position; only where masks are slow
        self._recovers = True  # from errors of the matcher
        self._consumed: _TokenList | None = None
        self._ended = False
        self._stopped = not self._source.broken and self._matcher.is_stopped()  # only an end may follow

    @property
    def finished(self) -> bool:
        return self._ended or self._stopped

    def fork(self) -> "GrammarCursor":
        self._shared = True
        return copied(self)

    def clone(self) -> "GrammarCursor":
        """A matcher raises where two threads use it at once."""
        other = self.fork()
        other._unshare()
        return other

    def _unshare(self) -> None:
        if self._shared:
            self._matcher, self._shared = self._matcher.deep_copy(), False

    def hints(self) -> "GrammarCursor":
        """Never compiles: after an error it knows nothing. Where masks are slow, it accepts no token."""
        hints = self.fork()
        hints._recovers = False
        return hints

    def matcher_copy(self) -> MatcherCopy | None:
        if self.finished or self._slow or self._alone or not self._current:
            return None
        grammar = self._grammar
        vocab = grammar.tokenizer.vocab_size
        return MatcherCopy(self._matcher.deep_copy(), grammar.eos, vocab, self._was_slow, self._failed)

    def _was_slow(self, seconds: float) -> None:
        """The next mask is timed by itself: which one of several was slow is not known."""
        self._alone = True
        self._grammar.took(seconds)

    def _failed(self) -> None:
        self._source.broken = True

    def fill(self, row: Bits) -> bool:
        """Raises on an error of the matcher: its row would allow an end, as if the output were complete."""
        assert not self.finished, "nothing can follow"
        started = perf_counter()
        self.settle()
        self._query(lambda matcher: matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes))
        known = self._mask is not None  # the matcher has it too, and so was quick
        self._slow, self._alone = known or perf_counter() - started > DEFER_S, False
        self._mask = row.copy() if self._slow else None
        if not row.any():
            raise ConstraintError("the grammar has come to a dead end: no token of the model can follow")
        return True

    def advance(self, token: int) -> bool:
        if self.finished or not 0 <= token < self._grammar.tokenizer.vocab_size:
            return False
        if token in self._grammar.eos:  # not fed to the matcher: a stopped one would not count it
            self._ended = self._query_or(lambda matcher: matcher.is_accepting(), False)
            return self._ended
        if self._slow and not self._recovers:
            return False
        if not self._slow:
            return self._consume_along([token]) == 1
        self._unshare()
        accepted, stopped = self._query_or(
            lambda matcher: (self._try_consume(matcher, token), matcher.is_stopped()), (False, False)
        )
        if accepted:
            self._consumed, self._stopped = _TokenList(self._consumed, token), stopped
            self._mask = None
        return accepted

    def advance_along(self, tokens: Sequence[int]) -> int:
        """In one call, where masks are quick and no token is an end."""
        vocab, eos = self._grammar.tokenizer.vocab_size, self._grammar.eos
        if self._slow or self.finished or any(not 0 <= t < vocab or t in eos for t in tokens):
            return super().advance_along(tokens)
        return self._consume_along(tokens) if tokens else 0

    def _consume_along(self, tokens: Sequence[int]) -> int:
        self._unshare()
        taken, stopped = self._query_or(
            lambda matcher: (matcher.try_consume_tokens(list(tokens)), matcher.is_stopped()), (0, False)
        )
        for token in tokens[:taken]:
            self._consumed = _TokenList(self._consumed, token)
        if taken:
            self._stopped, self._mask = stopped, None
        return taken

    def _try_consume(self, matcher: "LLMatcher", token: int) -> bool:
        """The matcher's own call holds Python's lock: where masks are slow, the mask decides instead.

        It allows less before forced text: no other tokens of that text. Masks of drafts check it anyway.
        """
        if self._mask is None:
            mask: Bits = np.zeros((self._grammar.tokenizer.vocab_size + 31) // 32, np.uint32)
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if matcher.is_error():
                return False
            self._mask = mask
        allowed = bool(self._mask[token // 32] >> np.uint32(token % 32) & np.uint32(1))
        return allowed and _consume(matcher, self._grammar.tokenizer, token)

    def commit(self, token: int) -> bool:
        """Where that may be slow, the token is consumed by the next `settle`."""
        if self.finished:
            return False
        if token in self._grammar.eos:
            self._ended = True
            return True
        if not self._slow and self._current:
            recovers, self._recovers = self._recovers, False
            accepted = self._consume_along([token]) == 1
            self._recovers = recovers
            if accepted or self._current:
                return accepted
        self._consumed, self._deferred = _TokenList(self._consumed, token), (*self._deferred, token)
        self._mask = None
        return True

    @property
    def unsettled(self) -> bool:
        return bool(self._deferred)

    def settle(self) -> None:
        """Consumes deferred tokens, without holding Python's lock. Raises as `fill` does."""
        if not self._deferred:
            return
        tokens, self._deferred = self._deferred, ()
        self._unshare()
        if self._current:
            started = perf_counter()
            consumed = all(_consume(self._matcher, self._grammar.tokenizer, token) for token in tokens)
            self._grammar.took(perf_counter() - started)
            self._source.broken |= not consumed  # another output may have broken it meanwhile
        if not self._current:
            self._behind = True
        self._stopped = self._query(lambda matcher: matcher.is_stopped())

    def completed_by(self, tokens: list[int]) -> bool:
        """True if the text may end after these tokens, which may not end before. The cursor is then used up.

        One call for all tokens, with Python's lock. After an error it is False, and nothing is compiled.
        """
        matcher = self._matcher
        whole = matcher.try_consume_tokens(tokens) == len(tokens)
        self._source.broken = self._source.broken or matcher.is_error()
        return whole and not matcher.is_error() and (matcher.is_stopped() or matcher.is_accepting())

    def forced(self) -> list[int]:
        return [] if self.finished else self._query_or(lambda matcher: matcher.compute_ff_tokens(), [])

    def canonical(self) -> list[int]:
        """Text that ends within a word is left alone: the model would write the whole word as one token."""
        if self.finished or not self._grammar.forces:
            return []
        text = self._query_or(lambda matcher: matcher.compute_ff_bytes(), b"")
        if not text or b"\xff" in text or text[-1:].isalnum() or text.endswith(b"_"):
            return []
        return self._grammar.tokenizer.tokenize_bytes(text)

    def _query_or(self, query: "Callable[[LLMatcher], T]", default: T) -> T:
        try:
            return self._query(query)
        except ConstraintError:
            return default

    @property
    def _current(self) -> bool:
        """True if the matcher has consumed all tokens, and no error has broken it."""
        return not (self._behind or self._deferred or self._source.broken)

    def _query(self, query: "Callable[[LLMatcher], T]") -> T:
        """The answer of a matcher at this position. An error counts only if a new matcher makes it too."""
        message = "the grammar has to be compiled again"
        if not (self._current or self._recovers):
            raise ConstraintError(message)
        for _ in range(2):
            if self._current or (self._recovers and self._replay()):
                started = perf_counter()
                answer = query(self._matcher)
                self._grammar.took(perf_counter() - started)
                if not self._matcher.is_error():
                    return answer
            if self._matcher.is_error():
                message = _error_message(self._matcher)
            self._source.broken = True
            if not self._recovers:
                break
        raise ConstraintError(message)

    def _replay(self) -> bool:
        """Feeds all tokens to a new matcher, after an error in this output or in another.

        A mask is computed before each token, as when the output was written: a matcher's remaining fuel
        depends on the queries before.
        """
        self._source = self._grammar.compile()
        self._matcher, self._shared = self._source.matcher.deep_copy(), False
        tokens, at = [], self._consumed
        while at is not None:
            tokens.append(at.token)
            at = at.before
        for token in reversed(tokens):
            self._matcher.compute_bitmask()
            if not _consume(self._matcher, self._grammar.tokenizer, token):
                return False
        self._behind, self._deferred = False, ()
        return True


def copied(cursor: AnyCursor) -> AnyCursor:
    """In a third of the time of `copy.copy`."""
    other = object.__new__(type(cursor))
    other.__dict__.update(cursor.__dict__)
    return other


def _consume(matcher: "LLMatcher", tokenizer: "LLTokenizer", token: int) -> bool:
    """The matcher's own call holds Python's lock, which stops all threads; one for two matchers does not."""
    if not hasattr(_LOCAL, "nothing"):
        import llguidance

        _LOCAL.nothing = llguidance.LLMatcher(
            tokenizer, "start: (", log_level=0
        )  # in error: consumes nothing
    return bool(_executor().consume_token_par([(matcher, token), (_LOCAL.nothing, token)])[0])


@cache
def _executor() -> "LLExecutor":
    from llguidance import LLExecutor

    with ThreadPoolExecutor(1, initializer=lower_priority) as pool:  # its threads inherit the priority
        return pool.submit(LLExecutor, EXECUTOR_THREADS).result()


def lower_priority() -> None:
    """Of the calling thread and those it starts, on systems where threads have priorities of their own."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _error_message(matcher: "LLMatcher") -> str:
    reason = matcher.get_error().strip().splitlines()
    return f"the grammar cannot be followed any further: {reason[0] if reason else matcher.stop_reason()}"
