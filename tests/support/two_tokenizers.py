"""Two small tokenizers that cut the same text differently, and models that know what the text says."""

from collections.abc import Sequence

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from paceline.drafters.draft_model.vocab_mapping import TokenizerPair
from paceline.sampling import Doubles, gumbel, noise_key
from paceline.testing import ToyTarget
from paceline.text import Tokenizer
from paceline.text.vocab.vocabulary import Vocabulary, byte_alphabet

PASSAGE = b"the cat sat on the mat, then the hat ran at a rat; hens heat ten teas. "
WORDS = r" ?[a-z]+| ?[^\sa-z]+|\s+(?!\S)|\s+"
TARGET_WORDS = ("th", "he", "at", "the", " the", "en", ", ", "cat", " s", "ten", " ten", "ea", "hea")
DRAFT_WORDS = ("at", "he", " he", "the", " c", " cat", "an", "te", "ten", " s", "hat", "mat", "  ", "   ")


def tokenizer(
    words: Sequence[str],
    marks: Sequence[str],
    letters: bytes = bytes(range(256)),
    bos: str | None = None,
    cuts_words: bool = True,
) -> Tokenizer:
    """These bytes, these words, each two tokens without it, and these marks; `bos` begins every prompt."""
    spelled = {byte: letter for letter, byte in byte_alphabet().items()}
    names = [spelled[byte] for byte in letters]
    merges: list[tuple[str, str]] = []
    for word in words:
        name = "".join(spelled[byte] for byte in word.encode())
        known = models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges)
        left, right = (token.value for token in known.tokenize(name))
        merges.append((left, right))
        names.append(name)
    ids = {name: i for i, name in enumerate((*names, *marks))}
    backend = Backend(models.BPE(vocab=ids, merges=merges))
    by_word = pre_tokenizers.Split(Regex(WORDS), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([by_word, to_bytes]) if cuts_words else to_bytes
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(marks))
    control = frozenset(ids[mark] for mark in marks)
    return Tokenizer(
        Vocabulary(
            backend=backend,
            spelling="byte-level",
            size=len(ids),
            control=control,
            added=control,
            bos_id=None if bos is None else ids[bos],
            adds_bos=bos is not None,
            eos_ids=frozenset({ids[marks[0]]}),
            strips_first_space=False,
            names={},
            templates={},
        )
    )


def pair(letters: bytes = bytes(range(256))) -> TokenizerPair:
    """A draft tokenizer and the target's: other words, other marks, other ids."""
    target = tokenizer(TARGET_WORDS, ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|odd|>"), letters)
    marks = ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
    return TokenizerPair(tokenizer(DRAFT_WORDS, marks, letters[::-1], "<bos>"), target)


class Reader(ToyTarget):
    """Knows a passage: the longest token that goes on with it is the likeliest, whatever the vocabulary."""

    def __init__(self, tokens: Tokenizer, passage: bytes = PASSAGE, seed: int = 0) -> None:
        super().__init__(tokens.vocab_size)
        self._tokens = tokens
        self._passage = passage
        self._noise = seed

    def logits(self, text: Sequence[int]) -> Doubles:
        read = sum(len(self._tokens.piece(t)) for t in text if t not in self._tokens.control)
        at = read % len(self._passage)
        ahead = (self._passage * 2)[at : at + 16]
        pieces = [self._tokens.piece(token) for token in range(self.vocab_size)]
        known = [6.0 + 2 * len(p) if p and ahead.startswith(p) else 0.0 for p in pieces]
        return np.array(known) + 0.7 * gumbel(noise_key(self._noise, 0, 5, read), np.arange(self.vocab_size))
