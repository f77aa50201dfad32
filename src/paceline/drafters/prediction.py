"""Predicted outputs: drafts along the text the caller expects, such as a file to be edited."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, overload

import numpy as np
from numpy.typing import NDArray

from paceline.types import NO_DRAFT, Ask, Draft, Drafter, Seq

NGRAMS: Final = (4, 3, 2)  # matching tokens that realign a lost output, longest first
INITIAL_MATCH: Final = 4  # matching tokens that the prediction counts as at the start
DOUBT: Final = 0.8  # after m matching tokens, P(the next one matches) is m / (m + DOUBT)

_BASE: Final = 0x9E3779B97F4A7C15  # of the polynomial that hashes an n-gram to 64 bits
_MASK: Final = (1 << 64) - 1


class PredictionIndex(Sequence[int]):
    """A prediction's tokens with the positions of their n-grams, for `Seq.prediction`.

    Immutable, so that the choices of a request share it. It takes 16 bytes for each token and n.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tuple(tokens)
        ids = np.array(self.tokens, np.uint64)
        self._by_length = {n: _sorted_ngrams(ids, n) for n in NGRAMS}

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...
    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        return self.tokens[at]

    def __len__(self) -> int:
        return len(self.tokens)

    def find(self, ngram: tuple[int, ...], at: int) -> int | None:
        """The nearest position from `at` on right after this n-gram, else the last one before."""
        hashes, positions = self._by_length[len(ngram)]
        value = np.uint64(_hash(ngram))
        first, stop = np.searchsorted(hashes, value, "left"), np.searchsorted(hashes, value, "right")
        if first == stop:
            return None
        here = positions[first:stop]
        position = int(here[min(int(np.searchsorted(here, at)), len(here) - 1)])
        return position if self.tokens[position - len(ngram) : position] == ngram else None


def _hash(ngram: tuple[int, ...]) -> int:
    value = 0
    for token in ngram:
        value = (value * _BASE + token + 1) & _MASK
    return value


def _sorted_ngrams(ids: NDArray[np.uint64], n: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """The hashes of all n-grams, sorted, and the position after each; positions of equal ones ascend."""
    count = max(0, len(ids) - n + 1)
    hashes = np.zeros(count, np.uint64)
    for i in range(n):
        hashes = hashes * np.uint64(_BASE) + ids[i : i + count] + np.uint64(1)
    order = np.argsort(hashes, kind="stable")
    return hashes[order], order + n


@dataclass(slots=True)
class _Alignment:
    """How far the output has followed the prediction."""

    text: PredictionIndex
    at: int = 0  # the position expected next
    agreed: int = INITIAL_MATCH  # matching tokens in a row; 0: lost
    seen: int = 0  # output tokens so far
    recent: tuple[int, ...] = field(default=())

    def advance(self, token: int) -> None:
        self.seen += 1
        self.recent = (*self.recent, token)[-NGRAMS[0] :]
        if self.agreed and self.at < len(self.text) and self.text[self.at] == token:
            self.at += 1
            self.agreed += 1
        else:
            self._realign()

    def _realign(self) -> None:
        """Realigns at the nearest position ahead where the last tokens occur, else at the last one behind."""
        self.agreed = 0
        for n in NGRAMS:
            position = self.text.find(self.recent[-n:], self.at) if len(self.recent) >= n else None
            if position is not None:
                self.at, self.agreed = position, n
                return


class Prediction(Drafter):
    name = "prediction"
    fingerprint = "1"  # raised where its scores change their meaning

    def __init__(self) -> None:
        self._alignments: dict[str, _Alignment] = {}

    def begin(self, seq: Seq) -> None:
        text = seq.prediction
        self._alignments[seq.id] = _Alignment(
            text if isinstance(text, PredictionIndex) else PredictionIndex(text)
        )

    def end(self, seq: Seq) -> None:
        self._alignments.pop(seq.id, None)

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._draft(ask) if ask.budget > 0 and ask.seq.prediction else NO_DRAFT for ask in asks]

    def _draft(self, ask: Ask) -> Draft:
        here = self._catch_up(ask.seq)
        if ask.after:
            here = replace(here)
            for token in ask.after:
                here.advance(token)
        tokens = here.text[here.at : here.at + ask.budget] if here.agreed else ()
        chances = tuple(m / (m + DOUBT) for m in range(here.agreed, here.agreed + len(tokens)))
        return Draft(tokens, None, (self.name,) * len(tokens), chances)

    def _catch_up(self, seq: Seq) -> _Alignment:
        if seq.id not in self._alignments:
            self.begin(seq)
        alignment = self._alignments[seq.id]
        for token in seq.tokens[seq.prompt_len + alignment.seen :]:
            alignment.advance(token)
        return alignment
