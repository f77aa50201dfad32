"""What two models call the same: how one reads the other's text, and which tokens both have."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from paceline.drafters.draft_model.exact_encoder import Spelling
from paceline.drafters.draft_model.retokenizer import Transcript
from paceline.sampling import Floats, Ids

if TYPE_CHECKING:
    from paceline.text import Tokenizer

# Marks that mean the same in models of different families.
_ALIKE: Final = (
    ("<|im_start|>", "<start_of_turn>", "<|start_header_id|>"),
    ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "</s>"),
    ("<|endoftext|>", "<eos>", "<|end_of_text|>", "</s>"),
)


class Telling(Protocol):
    """How a draft model reads the target's tokens."""

    def tell(self, seq_id: str, tokens: Sequence[int]) -> list[int]: ...  # in the draft model's tokens
    def forget(self, seq_id: str) -> None: ...


class Words(Telling, Protocol):
    """And how it says them."""

    def row(self, logits: Floats) -> Floats: ...  # in the target's vocabulary; -inf: no word for it
    def word(self, token: int) -> int | None: ...  # the draft model's id of the target's token, if it has one


class SameWords:
    """One tokenizer; the vocabularies may be padded to different sizes."""

    def __init__(self, own_size: int, target_size: int) -> None:
        self._own_size = own_size
        self._target_size = target_size

    def tell(self, seq_id: str, tokens: Sequence[int]) -> list[int]:
        return list(tokens)

    def forget(self, seq_id: str) -> None:
        return

    def row(self, logits: Floats) -> Floats:
        missing = max(0, self._target_size - len(logits))
        return np.pad(logits[: self._target_size], (0, missing), constant_values=-np.inf)

    def word(self, token: int) -> int | None:
        return token if token < self._own_size else None


class Dictionary:
    """Everything about two tokenizers that every sequence shares."""

    def __init__(self, draft: "Tokenizer", target: "Tokenizer") -> None:
        self.draft = draft
        self.target = target
        self.marks = _marks(draft, target)
        self.first = [draft.bos_id] if draft.adds_bos and draft.bos_id is not None else []
        self.piece = target.piece

    @cached_property
    def spelling(self) -> Spelling:
        return Spelling(self.draft)

    @cached_property
    def target_spelling(self) -> Spelling:
        return Spelling(self.target)

    @cached_property
    def target_mark(self) -> Mapping[int, int]:
        """The target's mark for each of the draft model's."""
        back: dict[int, int] = {}
        for token, mark in self.marks.items():
            for own in mark:
                if own not in back or self.draft.piece(own) == self.target.piece(token):
                    back[own] = token
        return back

    @cached_property
    def shared(self) -> Mapping[int, int]:
        """The target's tokens that the draft model has too, and the draft model's ids of them."""
        ours = _by_bytes(self.target, self.target_spelling)
        theirs = _by_bytes(self.draft, self.spelling)
        same = {token: theirs[piece] for piece, token in ours.items() if piece in theirs}
        return same | {token: own for own, token in self.target_mark.items()}


class Retelling:
    """Two tokenizers: the text is read as the draft model would write it."""

    def __init__(self, dictionary: Dictionary) -> None:
        self._dictionary = dictionary
        self._told: dict[str, Transcript] = {}

    def tell(self, seq_id: str, tokens: Sequence[int]) -> list[int]:
        return self._told.setdefault(seq_id, Transcript(self._dictionary)).tell(tokens)

    def forget(self, seq_id: str) -> None:
        self._told.pop(seq_id, None)


class SharedWords(Retelling):
    """The draft model says what both have a token for, and nothing else."""

    def __init__(self, dictionary: Dictionary, target_size: int) -> None:
        super().__init__(dictionary)
        self._target_size = target_size
        self._theirs: Ids = np.array([*dictionary.shared.keys()], np.int64)
        self._own: Ids = np.array([*dictionary.shared.values()], np.int64)

    def row(self, logits: Floats) -> Floats:
        row = np.full(self._target_size, -np.inf, np.float32)
        row[self._theirs] = logits[self._own]
        return row

    def word(self, token: int) -> int | None:
        return self._dictionary.shared.get(token)


def _by_bytes(tokenizer: "Tokenizer", spelling: Spelling) -> dict[bytes, int]:
    """Text tokens by what they say; of several that say the same, the one that text is encoded with."""
    found: dict[bytes, int] = {}
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.piece(token)
        if not piece or token in tokenizer.control:
            continue
        if piece not in found or spelling.tokens(piece) == [token]:
            found[piece] = token
    return found


def _marks(draft: "Tokenizer", target: "Tokenizer") -> dict[int, list[int]]:
    """What the draft model reads for the target's marks; those it has nothing like are text to it."""
    own = {draft.piece(token).decode(errors="replace"): token for token in draft.control}
    marks: dict[int, list[int]] = {}
    for token in sorted(target.control):
        name = target.piece(token).decode(errors="replace")
        alike = (name, *(other for group in _ALIKE if name in group for other in group))
        if target.adds_bos and token == target.bos_id:
            marks[token] = []  # the draft model's own begin, if any, comes first anyway
        elif found := [own[n] for n in alike if n in own]:
            marks[token] = found[:1]
    return marks
