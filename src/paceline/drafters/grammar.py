"""Drafts the tokens that the grammar of the output forces (jump-forward decoding)."""

from collections.abc import Sequence
from typing import Final

from paceline.drafters.support.grammar_filter import FORCED, valid_prefix
from paceline.types import NO_DRAFT, Ask, Cursor, Draft, Drafter

CANONICAL: Final = 0.9  # the score where the text is forced, but other tokens could write it too


class Grammar(Drafter):
    name = "grammar"
    fingerprint = "1"  # raised where its scores change their meaning
    interleaves = True
    needs_grammar = True

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [NO_DRAFT if ask.cursor is None else self._draft(ask, ask.cursor) for ask in asks]

    def _draft(self, ask: Ask, cursor: Cursor) -> Draft:
        tokens: list[int] = []
        scores: list[float] = []
        left = {FORCED: ask.forced_budget, CANONICAL: ask.budget}
        while not cursor.finished:
            run, score = cursor.forced(), FORCED
            if not run:
                run, score = cursor.canonical(), CANONICAL
            taken, cursor = valid_prefix(cursor, run[: left[score]])
            tokens += run[:taken]
            scores += [score] * taken
            left[score] -= taken
            if not run or taken < len(run):
                break
        return Draft(tuple(tokens), None, (self.name,) * len(tokens), tuple(scores))
