"""A smaller model guesses token by token in the target's vocabulary, sharing the target's noise.

Under `match` it uses the very noise the target will use for the same token ids, so the two agree far more
often than two independent draws would. Under the residual rules it draws with coins of its own and reports q.
Where the output has a grammar, it guesses and draws only among the tokens that may come. Where its tokenizer
is another, it guesses and draws only among the tokens that both have: q is its law, restricted to them.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.drafters.draft_model.base import RunsModel
from paceline.drafters.draft_model.vocab_mapping import SameWords, Words
from paceline.drafters.support.draft_sampling import draw
from paceline.drafters.support.grammar_filter import unforced
from paceline.errors import ConstraintError
from paceline.sampling import Doubles, Floats
from paceline.types import Ask, Bits, Cursor, Draft, Seq, Target


@dataclass(slots=True)
class _Growing:
    """A draft being written: a chain, with siblings beside its nodes if the tree may be wide."""

    ask: Ask
    mirror: Seq  # our model's own view of the sequence; ends with the chain so far
    written: list[int]  # in the target's tokens: what others guessed, then the chain so far
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    q: list[Doubles] = field(default_factory=list)
    tip: int = -1  # the chain's last node
    at: Cursor | None = None  # stands after the chain so far
    chance: float = 1.0  # that the whole chain so far is right, by what our model says
    ended: bool = False  # nothing follows, others are certain of what does, or more is not worth a pass

    @property
    def full(self) -> bool:
        return self.ended or len(self.tokens) >= self.ask.budget

    def follow(self, token: int) -> None:
        """Moves behind the new tip. Whether the chain ends there hangs on no later draw, so q stays right."""
        if self.at is not None:
            self.ended = self.ended or not self.at.advance(token) or self.at.finished
            self.ended = self.ended or (self.ask.forced_budget > 0 and bool(self.at.forced()))


class ModelDrafter(RunsModel[_Growing]):
    def __init__(
        self,
        model: Target,
        target_vocab: int,
        prefill_chunk: int = 256,
        words: Words | None = None,
        cost: float = 0.0,
        name: str = "model",
    ) -> None:
        """cost: of a pass, as a share of the target's; a chain less likely than that grows no further."""
        self.name = name
        self._cost = cost
        self._words = words or SameWords(model.vocab_size, target_vocab)
        super().__init__(model, self._words, prefill_chunk)
        self._allowed: Bits = np.zeros((target_vocab + 31) // 32, np.uint32)

    def _begun(self, ask: Ask, mirror: Seq) -> _Growing:
        at = None if ask.cursor is None else ask.cursor.fork()
        return _Growing(ask, mirror, list(ask.after), at=at, ended=at is not None and at.finished)

    def _grow(self, g: _Growing, row: Floats) -> None:
        """Adds one node to the chain, and its runners-up as siblings."""
        seq = g.ask.seq
        width = min(seq.spec.tree_width, g.ask.budget - len(g.tokens))
        try:
            mask = self._mask(g.at)
        except ConstraintError:  # which ends the output only if it comes by here
            g.ended = True
            return
        found = draw(self._words.row(row), seq, g.written, width, mask)
        parent, g.tip = g.tip, len(g.tokens)
        g.tokens.extend(found.tokens)
        g.parents.extend([parent] * len(found.tokens))
        g.scores.extend(map(unforced, found.chances))
        g.q.extend(found.laws)
        best = found.tokens[0]
        if self._cost:
            g.chance *= found.chances[0]
            g.ended = g.chance < self._cost  # this guess stays whatever it says, so q stays right
        g.follow(best)
        word = self._words.word(best)
        if word is None:  # a mask may leave nothing that we can read
            g.ended = True
        elif not g.full:
            g.written.append(best)
            g.mirror.tokens.append(word)

    def _mask(self, at: Cursor | None) -> Bits | None:
        """The tokens that may come; good until the next call."""
        if at is None:
            return None
        self._allowed[:] = 0
        return self._allowed if at.fill(self._allowed) else None

    def _finished(self, g: _Growing) -> Draft:
        q = torch.from_numpy(np.stack(g.q)) if g.q else None
        parents = tuple(g.parents) if g.ask.seq.spec.tree_width > 1 else None
        return Draft(tuple(g.tokens), parents, (self.name,) * len(g.tokens), tuple(g.scores), q)
