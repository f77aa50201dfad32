"""Predicted outputs: drafts along the text the caller expects, such as a file to be edited."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from paceline.types import NO_DRAFT, Ask, Draft, Drafter, Seq

NGRAMS: Final = (4, 3, 2)  # matching tokens that realign a lost output, longest first
INITIAL_MATCH: Final = 4  # matching tokens that the prediction counts as at the start
DOUBT: Final = 0.8  # after m matching tokens, P(the next one matches) is m / (m + DOUBT)

Positions = dict[tuple[int, ...], list[int]]


@dataclass(slots=True)
class _Alignment:
    """How far the output has followed the prediction."""

    text: tuple[int, ...]
    positions: Positions  # of the token after each n-gram, ascending
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
            positions = self.positions.get(self.recent[-n:]) if len(self.recent) >= n else None
            if positions:
                ahead = bisect_left(positions, self.at)
                self.at = positions[min(ahead, len(positions) - 1)]
                self.agreed = n
                return


class Prediction(Drafter):
    name = "prediction"

    def __init__(self) -> None:
        self._alignments: dict[str, _Alignment] = {}

    def begin(self, seq: Seq) -> None:
        self._alignments[seq.id] = _Alignment(seq.prediction, _positions(seq.prediction))

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


def _positions(text: tuple[int, ...]) -> Positions:
    positions: Positions = {}
    for n in NGRAMS:
        for end in range(n, len(text) + 1):
            positions.setdefault(text[end - n : end], []).append(end)
    return positions
