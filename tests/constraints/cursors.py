"""What tests of cursors share."""

import random
from collections.abc import Sequence

import numpy as np

from paceline.constraints import Compiler, Constraint, Switched
from paceline.constraints.walk import allows, words
from paceline.text import Tokenizer
from paceline.types import Bits, Cursor


def row_of(cursor: Cursor, vocab: int) -> Bits | None:
    """None: any token may come."""
    row: Bits = np.zeros(words(vocab), np.uint32)
    return row if cursor.fill(row) else None


def allowed(cursor: Cursor, vocab: int) -> list[int]:
    row = row_of(cursor, vocab)
    return [token for token in range(vocab) if row is None or allows(row, token)]


def after(compiler: Compiler, constraint: Constraint | Switched, tokens: Sequence[int]) -> Cursor:
    """A new cursor that has read these tokens."""
    cursor = compiler.cursor(constraint)
    for token in tokens:
        assert cursor.advance(token), (token, tokens)
    return cursor


def said(cursor: Cursor, vocab: int) -> tuple[bool, tuple[int, ...] | None, list[int], list[int]]:
    """All that a cursor can be asked."""
    row = None if cursor.finished else row_of(cursor, vocab)
    return cursor.finished, None if row is None else tuple(row.tolist()), cursor.forced(), cursor.spelled()


def random_token(cursor: Cursor, vocab: int, chance: random.Random, dull: int | None = None) -> int:
    """A legal token; an end only if there is nothing else."""
    tokens = allowed(cursor, vocab)
    lively = [token for token in tokens if token != dull]
    return chance.choice(lively or tokens)


def spelled_out(tokenizer: Tokenizer, *texts: str) -> list[int]:
    """Tokens of texts that are encoded one by one, marks as marks."""
    return [token for text in texts for token in tokenizer.encode(text, special=True, bos=False)]
