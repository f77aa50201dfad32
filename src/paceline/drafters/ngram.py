"""What followed the last time these n tokens were said."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from paceline.errors import SettingError
from paceline.types import NO_DRAFT, Ask, Draft, Drafter, Seq

DOUBT: Final = 0.9  # once m tokens agree, the next one does with a chance of (m / (m + DOUBT)) squared


@dataclass(slots=True)
class _Said:
    """Where the token after each run of tokens stands, the latest time."""

    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    upto: int = 0  # places before this one are known


class Ngram(Drafter):
    name = "ngram"

    def __init__(self, sizes: Sequence[int] = (4, 3, 2)) -> None:
        if not sizes or min(sizes) < 1:
            raise SettingError("sizes", sizes, "one or more whole numbers above 0")
        self.sizes = tuple(sorted(sizes, reverse=True))
        self._said: dict[str, _Said] = {}

    def begin(self, seq: Seq) -> None:
        self._said[seq.id] = _Said()

    def end(self, seq: Seq) -> None:
        self._said.pop(seq.id, None)

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._draft(ask) if ask.budget > 0 else NO_DRAFT for ask in asks]

    def _draft(self, ask: Ask) -> Draft:
        places = self._catch_up(ask.seq)
        tail = (*ask.seq.tokens[-self.sizes[0] :], *ask.after)
        for n in self.sizes:
            if len(tail) >= n and (place := places.get(tail[-n:])) is not None:
                tokens = _copy(ask, place)
                chances = tuple((m / (m + DOUBT)) ** 2 for m in range(n, n + ask.budget))
                return Draft(tokens, None, (self.name,) * ask.budget, chances)
        return NO_DRAFT

    def _catch_up(self, seq: Seq) -> dict[tuple[int, ...], int]:
        """A place is known once a token stands there, so the end of the text never finds itself."""
        said = self._said.setdefault(seq.id, _Said())
        for n in self.sizes:
            first = max(said.upto, n)
            recent = seq.tokens[first - n :]
            runs = zip(*(recent[i:] for i in range(n)), strict=False)
            said.places.update(zip(runs, range(first, len(seq.tokens)), strict=False))
        said.upto = len(seq.tokens)
        return said.places


def _copy(ask: Ask, place: int) -> tuple[int, ...]:
    """A copy that reaches the end of the text goes on into itself, as repetitions do."""
    source = [*ask.seq.tokens[place : place + ask.budget], *ask.after]
    return tuple(source[i % len(source)] for i in range(ask.budget))
