"""Mapping between the vocabularies of a draft model and its target.

The draft model may have the target's tokenizer (SameVocab) or another one. Then it reads the target's text in
its own tokens (TextRetokenizer), and proposes only tokens that both vocabularies have (SharedVocab:
token-level intersection, as in vLLM's vocab_mapping).
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from paceline.drafters.draft_model.exact_encoder import ExactEncoder
from paceline.drafters.draft_model.retokenizer import IncrementalRetokenizer
from paceline.sampling import Floats, Ids

if TYPE_CHECKING:
    from paceline.text import Tokenizer

# Special tokens with the same meaning in models of different families.
_EQUIVALENT_SPECIALS: Final = (
    ("<|im_start|>", "<start_of_turn>", "<|start_header_id|>"),
    ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "</s>"),
    ("<|endoftext|>", "<eos>", "<|end_of_text|>", "</s>"),
)


class Retokenizer(Protocol):
    """Turns the target's tokens into the draft model's, sequence by sequence."""

    def retokenize(self, seq_id: str, tokens: Sequence[int]) -> list[int]: ...
    def forget(self, seq_id: str) -> None: ...


class VocabMap(Retokenizer, Protocol):
    """And maps what the draft model proposes back to the target's vocabulary."""

    def target_logits(self, logits: Floats) -> Floats: ...  # [target vocab]; -inf: no such draft token
    def draft_token(self, token: int) -> int | None: ...  # its id in the draft model, if any


class SameVocab:
    """One tokenizer; the vocabularies may be padded to different sizes."""

    def __init__(self, draft_size: int, target_size: int) -> None:
        self._draft_size = draft_size
        self._target_size = target_size

    def retokenize(self, seq_id: str, tokens: Sequence[int]) -> list[int]:
        return list(tokens)

    def forget(self, seq_id: str) -> None:
        return

    def target_logits(self, logits: Floats) -> Floats:
        missing = max(0, self._target_size - len(logits))
        return np.pad(logits[: self._target_size], (0, missing), constant_values=-np.inf)

    def draft_token(self, token: int) -> int | None:
        return token if token < self._draft_size else None


class TokenizerPair:
    """The draft model's and the target's tokenizer, and all that every sequence shares about them."""

    def __init__(self, draft: "Tokenizer", target: "Tokenizer") -> None:
        self.draft = draft
        self.target = target
        self.specials = _specials(draft, target)  # target special token -> what the draft model reads for it
        self.bos = [draft.bos_id] if draft.adds_bos and draft.bos_id is not None else []
        self.piece = target.piece

    @cached_property
    def draft_encoder(self) -> ExactEncoder:
        return ExactEncoder(self.draft)

    @cached_property
    def target_encoder(self) -> ExactEncoder:
        return ExactEncoder(self.target)

    @cached_property
    def target_special(self) -> Mapping[int, int]:
        """The target's special token for each of the draft model's."""
        back: dict[int, int] = {}
        for token, draft_ids in self.specials.items():
            for own in draft_ids:
                if own not in back or self.draft.piece(own) == self.target.piece(token):
                    back[own] = token
        return back

    @cached_property
    def shared(self) -> Mapping[int, int]:
        """The vocabulary intersection: target token -> the draft model's id of it."""
        targets = _by_bytes(self.target, self.target_encoder)
        drafts = _by_bytes(self.draft, self.draft_encoder)
        same = {token: drafts[piece] for piece, token in targets.items() if piece in drafts}
        return same | {token: own for own, token in self.target_special.items()}


class TextRetokenizer:
    """Two tokenizers: the draft model reads the text in the tokens it would itself use."""

    def __init__(self, pair: TokenizerPair) -> None:
        self._pair = pair
        self._seqs: dict[str, IncrementalRetokenizer] = {}

    def retokenize(self, seq_id: str, tokens: Sequence[int]) -> list[int]:
        return self._seqs.setdefault(seq_id, IncrementalRetokenizer(self._pair)).update(tokens)

    def forget(self, seq_id: str) -> None:
        self._seqs.pop(seq_id, None)


class SharedVocab(TextRetokenizer):
    """The draft model proposes tokens of the vocabulary intersection, and nothing else."""

    def __init__(self, pair: TokenizerPair, target_size: int) -> None:
        super().__init__(pair)
        self._target_size = target_size
        self._target_ids: Ids = np.array([*pair.shared.keys()], np.int64)
        self._draft_ids: Ids = np.array([*pair.shared.values()], np.int64)

    def target_logits(self, logits: Floats) -> Floats:
        row = np.full(self._target_size, -np.inf, np.float32)
        row[self._target_ids] = logits[self._draft_ids]
        return row

    def draft_token(self, token: int) -> int | None:
        return self._pair.shared.get(token)


def _by_bytes(tokenizer: "Tokenizer", encoder: ExactEncoder) -> dict[bytes, int]:
    """Text tokens by their bytes; of several with the same bytes, the one that the encoder uses."""
    tokens: dict[bytes, int] = {}
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.piece(token)
        if not piece or token in tokenizer.control:
            continue
        if piece not in tokens or encoder.encode(piece) == [token]:
            tokens[piece] = token
    return tokens


def _specials(draft: "Tokenizer", target: "Tokenizer") -> dict[int, list[int]]:
    """The draft model's tokens for the target's special ones; those without an equivalent are text to it."""
    own = {draft.piece(token).decode(errors="replace"): token for token in draft.control}
    specials: dict[int, list[int]] = {}
    for token in sorted(target.control):
        name = target.piece(token).decode(errors="replace")
        equivalent = (name, *(other for group in _EQUIVALENT_SPECIALS if name in group for other in group))
        if target.adds_bos and token == target.bos_id:
            specials[token] = []  # the draft model's own BOS, if any, comes first anyway
        elif ids := [own[n] for n in equivalent if n in own]:
            specials[token] = ids[:1]
    return specials
