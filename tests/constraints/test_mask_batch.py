"""Masks computed together are those of each cursor by itself, bit by bit."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.constraints import (
    Choice,
    Compiler,
    Constraint,
    Json,
    Lark,
    Regex,
    StructuralTag,
    compiler,
    mask_batch,
)
from paceline.constraints.draft_masks import UNREACHABLE, Masks, masks, words
from paceline.constraints.mask_batch import MatcherCopy, fill_batch
from paceline.types import Cursor, Draft
from support import examples
from support.cursors import after, random_token, row_of, tokenizer_with

TOKENIZER = tokenizer_with(["ab", "bc", "abc", "ca", "aa", '["', '"]', '", "'])
VOCAB = TOKENIZER.vocab_size + 40  # a target may have more than its tokenizer
WIDTH = words(VOCAB)
(END,) = TOKENIZER.eos_ids
COMPILER = Compiler(TOKENIZER, VOCAB)
CONSTRAINTS: list[Constraint | StructuralTag] = [
    Regex("a(bc)?a*"),
    Regex("abca(aab|bcb)abcab"),
    Choice(("abc", "abcabc", "aab", "c")),
    Json.of({"type": "array", "items": {"enum": ["a", "ab", None]}, "maxItems": 3}),
    Lark('start: item+ "c"\nitem: "a" item "b" | "ab"'),
    StructuralTag("ab", Regex("ab(ca|bc)c?"), again=True),
    StructuralTag("ab", None),
]


def begun(constraint: Constraint | StructuralTag, chance: random.Random) -> list[int]:
    """Some tokens of an output."""
    cursor, tokens = COMPILER.cursor(constraint), list[int]()
    for _ in range(chance.randrange(5)):
        if not cursor.finished:
            tokens.append(random_token(cursor, VOCAB, chance, END))
            cursor.advance(tokens[-1])
    return tokens


def chain(cursor: Cursor, chance: random.Random, nodes: int) -> tuple[int, ...]:
    """Mostly valid tokens, ends among them."""
    at, tokens = cursor.fork(), list[int]()
    for _ in range(nodes):
        token = chance.randrange(VOCAB)
        if not at.finished and chance.random() < 0.9:
            token = random_token(at, VOCAB, chance, END if chance.random() < 0.7 else None)
            at.advance(token)
        tokens.append(token)
    return tuple(tokens)


def together(cursors: Sequence[Cursor], chains: Sequence[tuple[int, ...]]) -> list[Masks | None]:
    copies = [cursor.matcher_copy() for cursor in cursors]
    asked = [(copy, tokens) for copy, tokens in zip(copies, chains, strict=True) if copy is not None]
    found = iter(fill_batch(asked, WIDTH))
    return [None if copy is None else next(found) for copy in copies]


def equal(a: Masks, b: Masks) -> bool:
    return len(a.rows) == len(b.rows) and all(
        x is y or (isinstance(x, np.ndarray) and isinstance(y, np.ndarray) and x.tolist() == y.tolist())
        for x, y in zip(a.rows, b.rows, strict=True)
    )


@settings(max_examples=examples(120))
@given(
    st.lists(st.tuples(st.sampled_from(CONSTRAINTS), st.integers(0, 7)), min_size=1, max_size=6),
    st.integers(0, 2**32),
)
def test_masks_of_random_chains(outputs: list[tuple[Constraint | StructuralTag, int]], seed: int) -> None:
    chance = random.Random(seed)
    texts = [begun(constraint, chance) for constraint, _ in outputs]
    cursors = [
        after(COMPILER, constraint, text) for (constraint, _), text in zip(outputs, texts, strict=True)
    ]
    kept = [
        (cursor, nodes) for cursor, (_, nodes) in zip(cursors, outputs, strict=True) if not cursor.finished
    ]
    chains = [chain(cursor, chance, nodes) for cursor, nodes in kept]
    found = together([cursor for cursor, _ in kept], chains)
    for (cursor, _), tokens, made in zip(kept, chains, found, strict=True):
        assert made is None or equal(made, masks(cursor, Draft(tokens), WIDTH))


def test_only_ends_dead_ends_and_errors_are_left_to_the_cursor() -> None:
    """And the cursor has not moved."""
    cursor = COMPILER.cursor(Regex("a(bc)?a*"))
    a, b = ord("a"), ord("b")
    valid, forbidden, ended = together([cursor] * 3, [(a, a), (a, b, b, a), (a, END)])
    assert valid is not None
    assert equal(valid, masks(cursor, Draft((a, a)), WIDTH))
    assert forbidden is not None
    assert forbidden.rows[3:] == [UNREACHABLE, UNREACHABLE]
    assert ended is None
    assert together([COMPILER.cursor(Choice(("a",)))], [(a,)]) == [None]
    assert row_of(cursor, VOCAB) is not None
    assert cursor.advance(a)


def test_a_dead_end_is_left_to_the_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask allows nothing: no token of this model spells what must come."""
    copy = COMPILER.cursor(Regex("ab")).matcher_copy()
    monkeypatch.setattr(mask_batch, "_executor", NoTokens)
    assert fill_batch([(copy, ()), (copy, (ord("a"),))], WIDTH) == [None, None]


class NoTokens:
    """An executor that allows none."""

    def unsafe_compute_mask_ptr(self, *_: object) -> None: ...
    def unsafe_compute_mask_ptr_with_draft_token(self, *_: object) -> None: ...


def test_free_text_and_ended_outputs_have_no_copy() -> None:
    trigger = COMPILER.cursor(StructuralTag("ab", Regex("ab(ca|bc)c?"), again=True))
    assert trigger.matcher_copy() is None
    assert all(trigger.advance(token) for token in b"ab")
    assert isinstance(trigger.matcher_copy(), MatcherCopy)
    for written, ends in ((b"c", False), (b"caa", False), (b"cac", True), (b"cacab", True)):
        (made,) = together([trigger], [tuple(written)])
        assert made is None if ends else made and equal(made, masks(trigger, Draft(tuple(written)), WIDTH))
    assert after(COMPILER, Regex("ab"), [ord("a"), ord("b")]).matcher_copy() is None


def test_an_error_is_left_to_the_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    hard = Regex("((x{1,30}){1,30}y){1,20}z")
    monkeypatch.setitem(compiler.LIMITS, "step_lexer_fuel", 400)
    made = Compiler(TOKENIZER, VOCAB)
    cursor, tokens = made.cursor(hard), (ord("x"),) * 5
    assert together([cursor], [tokens]) == [None]
    assert cursor.matcher_copy() is None, "an error in a copy may have broken the grammar"
    rows = masks(cursor, Draft(tokens), WIDTH)
    assert isinstance(rows.rows[0], np.ndarray)
    assert rows.rows[0].tolist() == masks(made.cursor(hard), Draft(), WIDTH).rows[0].tolist()  # type: ignore[union-attr]


def test_after_slow_masks_each_cursor_is_asked_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_batch, "SLOW_S", -1.0)
    cursor = COMPILER.cursor(Regex("a(bc)?a*"))
    assert together([cursor], [()]) != [None]
    assert cursor.matcher_copy() is None
    row_of(cursor, VOCAB)
    assert cursor.matcher_copy() is not None
