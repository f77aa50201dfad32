"""Prompt lookup: the tokens that followed the latest occurrence of the last n tokens in this request."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from paceline.errors import SettingError
from paceline.types import NO_DRAFT, Ask, Draft, Drafter, Seq

DOUBT: Final = 0.9  # after m matching tokens, P(the next one matches) is (m / (m + DOUBT)) squared
FEW: Final = 16  # new tokens that are indexed one by one


@dataclass(slots=True)
class _Occurrences:
    """The position right after the latest occurrence of each n-gram."""

    positions: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = 0  # positions before this one are in it


class Ngram(Drafter):
    name = "ngram"
    fingerprint = "1"  # raised where its scores change their meaning

    def __init__(self, sizes: Sequence[int] = (4, 3, 2)) -> None:
        if not sizes or min(sizes) < 1:
            raise SettingError("sizes", sizes, "one or more whole numbers above 0")
        self.sizes = tuple(sorted(sizes, reverse=True))
        self._seqs: dict[str, _Occurrences] = {}

    def begin(self, seq: Seq) -> None:
        self._seqs[seq.id] = _Occurrences()

    def prepare(self, seq: Seq) -> None:
        self._catch_up(seq)

    def end(self, seq: Seq) -> None:
        self._seqs.pop(seq.id, None)

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._draft(ask) if ask.budget > 0 else NO_DRAFT for ask in asks]

    def _draft(self, ask: Ask) -> Draft:
        positions = self._catch_up(ask.seq)
        tail = (*ask.seq.tokens[-self.sizes[0] :], *ask.after)
        for n in self.sizes:
            if len(tail) >= n and (position := positions.get(tail[-n:])) is not None:
                return Draft(_copy(ask, position), None, (self.name,) * ask.budget, _chances(n, ask.budget))
        return NO_DRAFT

    def _catch_up(self, seq: Seq) -> dict[tuple[int, ...], int]:
        """A position is indexed once a token stands there, so the end of the text never matches itself."""
        seen = self._seqs.get(seq.id) or self._seqs.setdefault(seq.id, _Occurrences())
        first, end, positions = seen.indexed, len(seq.tokens), seen.positions
        seen.indexed = end
        if end - first > FEW:
            self._add_many(positions, seq.tokens, first)
            return positions
        for n in self.sizes:
            for position in range(first if first > n else n, end):
                positions[tuple(seq.tokens[position - n : position])] = position
        return positions

    def _add_many(self, positions: dict[tuple[int, ...], int], tokens: list[int], indexed: int) -> None:
        for n in self.sizes:
            first = max(indexed, n)
            recent = tokens[first - n :]
            runs = zip(*(recent[i:] for i in range(n)), strict=False)
            positions.update(zip(runs, range(first, len(tokens)), strict=False))


@lru_cache(maxsize=256)
def _chances(matching: int, budget: int) -> tuple[float, ...]:
    return tuple((m / (m + DOUBT)) ** 2 for m in range(matching, matching + budget))


def _copy(ask: Ask, position: int) -> tuple[int, ...]:
    """A copy that reaches the end of the text continues with itself, as repetitions do."""
    source = [*ask.seq.tokens[position : position + ask.budget], *ask.after]
    if len(source) >= ask.budget:
        return tuple(source[: ask.budget])
    return tuple(source[i % len(source)] for i in range(ask.budget))
