"""Prompt lookup: the tokens that followed the latest occurrence of the last n tokens in this request.

There is no index: comparing all tokens of a request takes microseconds, and building one takes milliseconds.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.errors import SettingError
from paceline.types import NO_DRAFT, Ask, Draft, Drafter, Seq

DOUBT: Final = 0.9  # after m matching tokens, P(the next one matches) is (m / (m + DOUBT)) squared
ROOM: Final = 256  # tokens, at least, that an array has room for when it is made


class _Tokens:
    """The tokens of a sequence as an array that grows with it."""

    __slots__ = ("_count", "_room")

    def __init__(self) -> None:
        self._room: NDArray[np.int32] = np.empty(0, np.int32)
        self._count = 0

    def of(self, seq: Seq) -> NDArray[np.int32]:
        before, count = self._count, len(seq.tokens)
        if count > len(self._room):
            self._room = np.concatenate((self._room[:before], np.empty(count + ROOM, np.int32)))
        if count > before:
            self._room[before:count] = seq.tokens[before:]
            self._count = count
        return self._room[:count]


class Ngram(Drafter):
    name = "ngram"
    fingerprint = "1"  # raised where its scores change their meaning

    def __init__(self, sizes: Sequence[int] = (4, 3, 2)) -> None:
        if not sizes or min(sizes) < 1:
            raise SettingError("sizes", sizes, "one or more whole numbers above 0")
        self.sizes = tuple(sorted(sizes))
        self._tokens: dict[str, _Tokens] = {}

    def begin(self, seq: Seq) -> None:
        self._tokens[seq.id] = _Tokens()

    def prepare(self, seq: Seq) -> None:
        self._tokens_of(seq)

    def end(self, seq: Seq) -> None:
        self._tokens.pop(seq.id, None)

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._draft(ask) if ask.budget > 0 else NO_DRAFT for ask in asks]

    def _draft(self, ask: Ask) -> Draft:
        tail = (*ask.seq.tokens[-self.sizes[-1] :], *ask.after)
        matching, position = latest(self._tokens_of(ask.seq), tail, self.sizes)
        if not matching:
            return NO_DRAFT
        return Draft(_copy(ask, position), None, (self.name,) * ask.budget, _chances(matching, ask.budget))

    def _tokens_of(self, seq: Seq) -> NDArray[np.int32]:
        return (self._tokens.get(seq.id) or self._tokens.setdefault(seq.id, _Tokens())).of(seq)


def latest(tokens: NDArray[np.int32], tail: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
    """The longest n for which the last n of `tail` occur before the last token, and where the latest ends.

    sizes: those of n, ascending. (0, 0): none occurs. An occurrence ends where a token stands, so the end of
    the text never matches itself.
    """
    found, matched, positions = (0, 0), 0, None
    for n in sizes:
        if len(tail) < n or len(tokens) <= n:
            break
        for back in range(matched + 1, n + 1):
            token = tail[-back]
            if positions is None:
                positions = np.flatnonzero(tokens[:-1] == token) + 1
            else:
                positions = positions[positions >= back]
                positions = positions[tokens[positions - back] == token]
        if positions is None or not len(positions):
            break
        found, matched = (n, int(positions[-1])), n
    return found


@lru_cache(maxsize=256)
def _chances(matching: int, budget: int) -> tuple[float, ...]:
    return tuple((m / (m + DOUBT)) ** 2 for m in range(matching, matching + budget))


def _copy(ask: Ask, position: int) -> tuple[int, ...]:
    """A copy that reaches the end of the text continues with itself, as repetitions do."""
    source = [*ask.seq.tokens[position : position + ask.budget], *ask.after]
    if len(source) >= ask.budget:
        return tuple(source[: ask.budget])
    return tuple(source[i % len(source)] for i in range(ask.budget))
