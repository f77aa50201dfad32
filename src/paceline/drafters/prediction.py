"""What the caller expects the output to be: a file to be edited, a form to be filled."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from paceline.types import NO_DRAFT, Ask, Draft, Drafter, Seq

RUNS: Final = (4, 3, 2)  # tokens that must agree to find the place again, most first
TRUST: Final = 4  # the tokens in common that the caller's word is worth at the start
DOUBT: Final = 0.8  # once m tokens agree, the next one does m times in m + DOUBT

Places = dict[tuple[int, ...], list[int]]


@dataclass(slots=True)
class _Alignment:
    """How far the output has followed the prediction."""

    text: tuple[int, ...]
    places: Places  # of the token after each run, in order
    at: int = 0  # what is expected next
    agreed: int = TRUST  # tokens in a row; 0 when lost
    seen: int = 0  # output tokens
    recent: tuple[int, ...] = field(default=())

    def advance(self, token: int) -> None:
        self.seen += 1
        self.recent = (*self.recent, token)[-RUNS[0] :]
        if self.agreed and self.at < len(self.text) and self.text[self.at] == token:
            self.at += 1
            self.agreed += 1
        else:
            self._search()

    def _search(self) -> None:
        """The nearest place ahead where the last tokens occur, else the last one behind."""
        self.agreed = 0
        for n in RUNS:
            places = self.places.get(self.recent[-n:]) if len(self.recent) >= n else None
            if places:
                ahead = bisect_left(places, self.at)
                self.at = places[min(ahead, len(places) - 1)]
                self.agreed = n
                return


class Prediction(Drafter):
    name = "prediction"

    def __init__(self) -> None:
        self._alignments: dict[str, _Alignment] = {}

    def begin(self, seq: Seq) -> None:
        self._alignments[seq.id] = _Alignment(seq.prediction, _places(seq.prediction))

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


def _places(text: tuple[int, ...]) -> Places:
    places: Places = {}
    for n in RUNS:
        for place in range(n, len(text) + 1):
            places.setdefault(text[place - n : place], []).append(place)
    return places
