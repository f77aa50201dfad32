"""A draft model with another tokenizer writes text, which is encoded into the target's tokens.

String-level vocabulary mapping (arXiv 2502.05202). The draft model writes greedily, whatever the request's
temperature. Only whole tokens of the target are proposed, without q; the last token, which more text might
change, is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from paceline.drafters.draft_model.base import ModelRunnerDrafter
from paceline.drafters.draft_model.exact_encoder import without_partial_char
from paceline.drafters.draft_model.retokenizer import REWRITE_BYTES
from paceline.drafters.draft_model.vocab_mapping import TextRetokenizer, TokenizerPair
from paceline.drafters.support.grammar_filter import unforced, valid_prefix
from paceline.sampling import Floats
from paceline.types import Ask, Draft, Seq, Target


@dataclass(slots=True)
class _TextState:
    ask: Ask
    draft_seq: Seq  # in the draft model's tokens; ends with the text so far
    before: list[int]  # the target's tokens right before the text, from the start of a word
    text: bytes = b""
    steps: list[tuple[int, float]] = field(default_factory=list)  # draft tokens: first byte, probability
    tokens: list[int] = field(default_factory=list)  # complete tokens of the target
    end_token: int | None = None  # the target's special token that ends the text
    ended: bool = False  # nothing follows, or nothing grammar-valid does

    @property
    def full(self) -> bool:
        enough = len(self.tokens) >= self.ask.budget
        return self.ended or enough or len(self.steps) > self.ask.budget


class TextDrafter(ModelRunnerDrafter[_TextState]):
    def __init__(self, model: Target, pair: TokenizerPair, prefill_chunk: int = 256) -> None:
        super().__init__(model, TextRetokenizer(pair), prefill_chunk)
        self._pair = pair

    def _start(self, ask: Ask, draft_seq: Seq) -> _TextState:
        ended = ask.cursor is not None and ask.cursor.finished
        return _TextState(
            ask, draft_seq, self._tail([*ask.seq.tokens[-REWRITE_BYTES:], *ask.after]), ended=ended
        )

    def _tail(self, tokens: Sequence[int]) -> list[int]:
        """The last of these tokens, from the start of a word or of the text."""
        specials, piece = self._pair.target.control, self._pair.piece
        start = len(tokens)
        while start > 0 and tokens[start - 1] not in specials:
            start -= 1
            inner = start > 0 and not piece(tokens[start - 1])[-1:].isspace()
            if inner and piece(tokens[start])[:1] == b" ":
                break
        return list(tokens[start:])

    def _extend(self, g: _TextState, row: Floats) -> None:
        """One more token of the draft model, then the text so far in the target's tokens."""
        token = int(row.argmax())
        piece = self._pair.draft.piece(token)
        g.steps.append((len(g.text), float(1 / np.exp(row - row[token]).sum(dtype=np.float64))))
        if token in self._pair.draft.control or not piece:
            g.end_token = self._pair.target_special.get(token)
            g.ended = True
        g.text += b"" if g.ended else piece
        g.draft_seq.tokens.append(token)
        g.tokens = self._whole_tokens(g)
        if g.ask.cursor is not None:
            taken, at = valid_prefix(g.ask.cursor, g.tokens, until_forced=g.ask.forced_budget > 0)
            g.ended = g.ended or taken < len(g.tokens) or at.finished

    def _whole_tokens(self, g: _TextState) -> list[int]:
        """The target's tokens that more text would hardly change."""
        if not g.ended:
            return self.encode_after(g.before, without_partial_char(g.text))[:-1]
        end = [] if g.end_token is None else [g.end_token]
        return self.encode_after(g.before, g.text) + end

    def encode_after(self, before: Sequence[int], text: bytes) -> list[int]:
        """The text in the target's tokens, the first of which begins where `before` ends."""
        encoder, piece = self._pair.target_encoder, self._pair.piece
        context = b"".join(map(piece, before))
        whole, ends = encoder.encode_with_ends(context + text)
        starts = [0, *ends]
        if len(context) in starts:
            return whole[starts.index(len(context)) :]
        return encoder.encode(text)

    def _draft(self, g: _TextState) -> Draft:
        tokens = tuple(g.tokens[: g.ask.budget])
        return Draft(tokens, None, (self.name,) * len(tokens), self._scores(g, tokens))

    def _scores(self, g: _TextState, tokens: tuple[int, ...]) -> tuple[float, ...]:
        """For each token, the product of the probabilities of the draft tokens that begin within it."""
        scores, start = [], 0
        for token in tokens:
            end = start + len(self._pair.piece(token))
            scores.append(unforced(prod(prob for at, prob in g.steps if start <= at < end)))
            start = end
        return tuple(scores)
