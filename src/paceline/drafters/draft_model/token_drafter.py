"""Speculative decoding with a draft model (Leviathan et al., arXiv 2211.17192), token by token.

Under `match` the draft model uses the very noise the target will use for the same token ids, so the two agree
far more often than two independent samples would. Under the residual rules it samples with coins of its own
and reports q. Where the output has a grammar, it samples only among grammar-valid tokens. Where its tokenizer
differs, it samples only among the tokens that both vocabularies have: q is its distribution over them.
"""

from dataclasses import dataclass, field

import numpy as np

from paceline.drafters.draft_model.base import ModelRunnerDrafter
from paceline.drafters.draft_model.vocab_mapping import SameVocab, VocabMap
from paceline.drafters.support.draft_builder import DraftBuilder
from paceline.drafters.support.draft_sampling import sample_tokens
from paceline.errors import ConstraintError
from paceline.sampling import Floats
from paceline.types import ROOT, Ask, Bits, Cursor, Draft, Seq, Target


@dataclass(slots=True)
class _Chain:
    """A draft in progress: a chain, with siblings beside its nodes if the tree may be wide."""

    ask: Ask
    draft_seq: Seq  # in the draft model's tokens; ends with the chain so far
    written: list[int]  # in the target's tokens: the ask's `after`, then the chain so far
    nodes: DraftBuilder = field(default_factory=DraftBuilder)
    tip: int = ROOT  # the chain's last node
    at: Cursor | None = None  # the grammar state after the chain so far
    chance: float = 1.0  # P(the chain so far is accepted), by the draft model's probabilities
    ended: bool = False  # nothing follows, the next token is forced, or one more is not worth a pass

    @property
    def full(self) -> bool:
        return self.ended or len(self.nodes) >= self.ask.budget

    def advance(self, token: int) -> None:
        """Moves past the new tip. Whether the chain ends there depends on no later sample: q stays right."""
        if self.at is not None:
            self.ended = self.ended or not self.at.advance(token) or self.at.finished
            self.ended = self.ended or (self.ask.forced_budget > 0 and bool(self.at.forced()))


class ModelDrafter(ModelRunnerDrafter[_Chain]):
    def __init__(
        self,
        model: Target,
        target_vocab: int,
        prefill_chunk: int = 256,
        vocab: VocabMap | None = None,
        cost: float = 0.0,
        name: str = "model",
    ) -> None:
        """cost: of a pass, as a share of the target's; a chain less likely than that is not extended."""
        self.name = name
        self._cost = cost
        self._vocab = vocab or SameVocab(model.vocab_size, target_vocab)
        super().__init__(model, self._vocab, prefill_chunk)
        self._allowed: Bits = np.zeros((target_vocab + 31) // 32, np.uint32)

    def _start(self, ask: Ask, draft_seq: Seq) -> _Chain:
        at = None if ask.cursor is None else ask.cursor.fork()
        return _Chain(ask, draft_seq, list(ask.after), at=at, ended=at is not None and at.finished)

    def _extend(self, state: _Chain, row: Floats) -> None:
        """Adds one node to the chain, and the next best tokens as its siblings."""
        seq, nodes = state.ask.seq, state.nodes
        width = min(seq.spec.tree_width, state.ask.budget - len(nodes))
        try:
            mask = self._mask(state.at)
        except ConstraintError:  # raised again if the output gets here
            state.ended = True
            return
        sampled = sample_tokens(self._vocab.target_logits(row), seq, state.written, width, mask)
        parent, state.tip = state.tip, len(nodes)
        for token, chance in zip(sampled.tokens, sampled.chances, strict=True):
            nodes.add(parent, token, chance)
        nodes.q.extend(sampled.q)
        best = sampled.tokens[0]
        if self._cost:
            state.chance *= sampled.chances[0]
            state.ended = state.chance < self._cost  # this node stays whatever its token, so q stays right
        state.advance(best)
        draft_token = self._vocab.draft_token(best)
        if draft_token is None:  # a mask may leave only tokens the draft model does not have
            state.ended = True
        elif not state.full:
            state.written.append(best)
            state.draft_seq.tokens.append(draft_token)

    def _mask(self, at: Cursor | None) -> Bits | None:
        """The grammar-valid tokens; valid until the next call."""
        if at is None:
            return None
        self._allowed[:] = 0
        return self._allowed if at.fill(self._allowed) else None

    def _draft(self, state: _Chain) -> Draft:
        return state.nodes.draft(self.name)
