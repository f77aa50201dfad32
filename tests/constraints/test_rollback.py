"""What may come depends on the text alone, not on drafts that were tried before and taken back."""

import numpy as np

from paceline.constraints import Compiler, Lark
from paceline.types import Cursor
from support.grammars import small_tokenizer

TOKENIZER = small_tokenizer()
COMPILER = Compiler(TOKENIZER, TOKENIZER.vocab_size)
TWO_WAYS = Lark('start: "x" A "y" | "z" A "w"\nA: /[ab]+/')


def after(cursor: Cursor, text: bytes) -> Cursor:
    assert all(cursor.advance(byte) for byte in text)  # the first 256 tokens are the bytes
    return cursor


def allowed(cursor: Cursor) -> set[bytes]:
    row = np.zeros((TOKENIZER.vocab_size + 31) // 32, np.uint32)
    assert cursor.fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: TOKENIZER.vocab_size]
    return {TOKENIZER.piece(int(token)) for token in np.flatnonzero(bits)}


def test_a_mask_does_not_depend_on_a_draft_that_was_taken_back() -> None:
    fresh = allowed(after(COMPILER.cursor(TWO_WAYS), b"za"))
    assert b"w" in fresh
    assert b"y" not in fresh
    cursor = COMPILER.cursor(TWO_WAYS)
    allowed(after(cursor.fork(), b"xa"))
    assert allowed(after(cursor.fork(), b"za")) == fresh
