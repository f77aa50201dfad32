"""Shared by tests of cursors."""

import random
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from paceline.constraints import Compiler, Constraint, StructuralTag
from paceline.constraints.draft_masks import allows, words
from paceline.text import Tokenizer
from paceline.text.vocab.vocabulary import Vocabulary, byte_alphabet
from paceline.types import Bits, Cursor


def row_of(cursor: Cursor, vocab: int) -> Bits | None:
    """None: any token may come."""
    row: Bits = np.zeros(words(vocab), np.uint32)
    return row if cursor.fill(row) else None


def allowed(cursor: Cursor, vocab: int) -> list[int]:
    row = row_of(cursor, vocab)
    return [token for token in range(vocab) if row is None or allows(row, token)]


def after(compiler: Compiler, constraint: Constraint | StructuralTag, tokens: Sequence[int]) -> Cursor:
    """A new cursor that has read these tokens."""
    cursor = compiler.cursor(constraint)
    for token in tokens:
        assert cursor.advance(token), (token, tokens)
    return cursor


def said(cursor: Cursor, vocab: int) -> tuple[bool, tuple[int, ...] | None, list[int], list[int]]:
    """All that a cursor can be asked."""
    row = None if cursor.finished else row_of(cursor, vocab)
    return cursor.finished, None if row is None else tuple(row.tolist()), cursor.forced(), cursor.canonical()


def random_token(cursor: Cursor, vocab: int, chance: random.Random, dull: int | None = None) -> int:
    """A legal token; an end only if there is nothing else."""
    tokens = allowed(cursor, vocab)
    lively = [token for token in tokens if token != dull]
    return chance.choice(lively or tokens)


def spelled_out(tokenizer: Tokenizer, *texts: str) -> list[int]:
    """Tokens of texts that are encoded one by one, marks as marks."""
    return [token for text in texts for token in tokenizer.encode(text, special=True, bos=False)]


def tokenizer_with(
    tokens: Sequence[str] = (), marks: Sequence[str] = (), normal_form: str = "", end: str = "<eos>"
) -> Tokenizer:
    """All bytes, the given tokens in addition, which no text is cut into, marks as single tokens, one end."""
    letters = sorted(byte_alphabet(), key=lambda c: byte_alphabet()[c])
    spelled = {byte: letter for letter, byte in byte_alphabet().items()}
    longer = ["".join(spelled[byte] for byte in token.encode()) for token in tokens]
    ids = {name: i for i, name in enumerate([*letters, *longer, *marks, end])}
    backend = Backend(models.BPE(vocab=ids, merges=[]))
    backend.normalizer = getattr(normalizers, normal_form)() if normal_form else None
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*marks, end])
    ends = frozenset({ids[end]})
    return Tokenizer(
        Vocabulary(
            backend=backend,
            spelling="byte-level",
            size=len(ids),
            control=ends,
            added=ends | {ids[mark] for mark in marks},
            bos_id=None,
            adds_bos=False,
            eos_ids=ends,
            strips_first_space=False,
            names={},
            templates={},
        )
    )
