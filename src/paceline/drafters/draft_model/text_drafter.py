"""A smaller model with another tokenizer writes text, which is cut into the target's tokens.

It writes what it finds likeliest, whatever the request's temperature; nothing but whole tokens of the target
is guessed, and without q: the last token, which more text might change, is not guessed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from paceline.drafters.draft_model.base import RunsModel
from paceline.drafters.draft_model.exact_encoder import without_cut_letter
from paceline.drafters.draft_model.retokenizer import REACH
from paceline.drafters.draft_model.vocab_mapping import Dictionary, Retelling
from paceline.drafters.support.grammar_filter import unforced, valid_prefix
from paceline.sampling import Floats
from paceline.types import Ask, Draft, Seq, Target


@dataclass(slots=True)
class _Writing:
    ask: Ask
    mirror: Seq  # our model's own view of the sequence; ends with the text so far
    before: list[int]  # the end of the target's tokens that stand before
    text: bytes = b""
    steps: list[tuple[int, float]] = field(default_factory=list)  # byte where each begins, how sure of it
    tokens: list[int] = field(default_factory=list)  # the target's, those that are finished
    closing: int | None = None  # the target's mark that ends the text
    ended: bool = False  # nothing follows, or what follows will be refused

    @property
    def full(self) -> bool:
        enough = len(self.tokens) >= self.ask.budget
        return self.ended or enough or len(self.steps) > self.ask.budget


class TextDrafter(RunsModel[_Writing]):
    def __init__(self, model: Target, dictionary: Dictionary, prefill_chunk: int = 256) -> None:
        super().__init__(model, Retelling(dictionary), prefill_chunk)
        self._dictionary = dictionary

    def _begun(self, ask: Ask, mirror: Seq) -> _Writing:
        ended = ask.cursor is not None and ask.cursor.finished
        return _Writing(ask, mirror, self._tail([*ask.seq.tokens[-REACH:], *ask.after]), ended=ended)

    def _tail(self, tokens: Sequence[int]) -> list[int]:
        """The last of these tokens, from where a word or a text begins."""
        marks, piece = self._dictionary.target.control, self._dictionary.piece
        start = len(tokens)
        while start > 0 and tokens[start - 1] not in marks:
            start -= 1
            inner = start > 0 and not piece(tokens[start - 1])[-1:].isspace()
            if inner and piece(tokens[start])[:1] == b" ":
                break
        return list(tokens[start:])

    def _grow(self, g: _Writing, row: Floats) -> None:
        """One more token of ours, then a look at what that makes in the target's."""
        token = int(row.argmax())
        piece = self._dictionary.draft.piece(token)
        g.steps.append((len(g.text), float(1 / np.exp(row - row[token]).sum(dtype=np.float64))))
        if token in self._dictionary.draft.control or not piece:
            g.closing = self._dictionary.target_mark.get(token)
            g.ended = True
        g.text += b"" if g.ended else piece
        g.mirror.tokens.append(token)
        g.tokens = self._whole_tokens(g)
        if g.ask.cursor is not None:
            taken, at = valid_prefix(g.ask.cursor, g.tokens, until_forced=g.ask.forced_budget > 0)
            g.ended = g.ended or taken < len(g.tokens) or at.finished

    def _whole_tokens(self, g: _Writing) -> list[int]:
        """The target's tokens that more text would hardly change."""
        if not g.ended:
            return self.cut(g.before, without_cut_letter(g.text))[:-1]
        closing = [] if g.closing is None else [g.closing]
        return self.cut(g.before, g.text) + closing

    def cut(self, before: Sequence[int], text: bytes) -> list[int]:
        """The text in the target's tokens, the first of which begins where `before` ends."""
        spelling, piece = self._dictionary.target_spelling, self._dictionary.piece
        context = b"".join(map(piece, before))
        whole, ends = spelling.spell(context + text)
        starts = [0, *ends]
        if len(context) in starts:
            return whole[starts.index(len(context)) :]
        return spelling.tokens(text)

    def _finished(self, g: _Writing) -> Draft:
        tokens = tuple(g.tokens[: g.ask.budget])
        return Draft(tokens, None, (self.name,) * len(tokens), self._scores(g, tokens))

    def _scores(self, g: _Writing, tokens: tuple[int, ...]) -> tuple[float, ...]:
        """How sure we were of the steps that begin within each token."""
        scores, start = [], 0
        for token in tokens:
            end = start + len(self._dictionary.piece(token))
            scores.append(unforced(prod(sure for at, sure in g.steps if start <= at < end)))
            start = end
        return tuple(scores)
