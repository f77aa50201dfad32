"""The masks of a draft are those of each of its prefixes, found one by one."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.constraints import Choice, Compiler, Constraint, Json, Regex, StructuralTag, compiler
from paceline.constraints.draft_masks import FREE, UNREACHABLE, Masks, allows, masks, words
from paceline.errors import ConstraintError
from paceline.testing import ToyCursor
from paceline.types import ROOT, Bits, Cursor, Draft
from support import examples
from support.cursors import after, random_token, row_of, tokenizer_with

TOKENIZER = tokenizer_with(["ab", "bc", "abc", "ca", "aa", '["', '"]', '", "'])
VOCAB = TOKENIZER.vocab_size
WORDS = words(VOCAB)
(END,) = TOKENIZER.eos_ids
COMPILER = Compiler(TOKENIZER, VOCAB)
CONSTRAINTS: list[Constraint | StructuralTag] = [
    Regex("a(bc)?a*"),
    Regex("abca(aab|bcb)abcab"),
    Choice(("abc", "abcabc", "aab", "c")),
    Json.of({"type": "array", "items": {"enum": ["a", "ab", None]}, "maxItems": 3}),
    StructuralTag("ab", Regex("ab(ca|bc)c?"), again=True),
    StructuralTag("ab", None),
]


def grown(root: Cursor, chance: random.Random, vocab: int, nodes: int, wide: bool) -> Draft:
    """A tree of mostly legal guesses."""
    places: dict[int, Cursor | None] = {ROOT: root}
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(nodes):
        parent = chance.choice(list(places)) if wide else node - 1
        at = places[parent]
        token = chance.randrange(vocab)
        if at is not None and not at.finished and chance.random() < 0.9:
            token = random_token(at, vocab, chance, END if chance.random() < 0.7 else None)
        here = None if at is None or at.finished else at.fork()
        places[node] = here if here is not None and here.advance(token) else None
        tokens.append(token)
        parents.append(parent)
    return Draft(tuple(tokens), tuple(parents) if wide else None)


def check(made: Masks, draft: Draft, fresh: Callable[[], Cursor], width: int) -> None:
    """Row by row, by a cursor of its own for each; ends and illegal guesses as the text of `masks` says."""
    for node in range(ROOT, len(draft)):
        cursor, state = fresh(), "legal"
        for i in draft.path(node):
            row: Bits = np.zeros(width, np.uint32)
            if cursor.finished:
                state = "over"
                break
            if (cursor.fill(row) and not allows(row, draft.tokens[i])) or not cursor.advance(draft.tokens[i]):
                state = "illegal"
                break
        found = made.rows[node + 1]
        if state == "illegal":
            assert found is UNREACHABLE
        elif state == "over" or cursor.finished:
            assert found is None
        else:
            row = np.zeros(width, np.uint32)
            want = row if cursor.fill(row) else None
            assert (want is None) == (found is None)
            assert want is None or (isinstance(found, np.ndarray) and found.tolist() == want.tolist())


@settings(max_examples=examples(120))
@given(st.sampled_from(CONSTRAINTS), st.integers(0, 2**32), st.integers(0, 12), st.booleans())
def test_masks_of_random_trees(constraint: Constraint, seed: int, nodes: int, wide: bool) -> None:
    chance = random.Random(seed)
    prefix: list[int] = []
    cursor = COMPILER.cursor(constraint)
    for _ in range(chance.randrange(3)):
        if not cursor.finished:
            prefix.append(random_token(cursor, VOCAB, chance, END))
            cursor.advance(prefix[-1])
    if cursor.finished:
        return
    draft = grown(cursor, chance, VOCAB, nodes, wide)
    made = masks(cursor, draft, WORDS)
    assert len(made.rows) == len(draft) + 1
    check(made, draft, lambda: after(COMPILER, constraint, prefix), WORDS)


def random_rules(seed: int) -> Callable[[tuple[int, ...]], set[int] | None]:
    def may(tokens: tuple[int, ...]) -> set[int] | None:
        rng = random.Random(f"{seed} {tokens}")
        if tokens and rng.random() < 0.15:
            return set()
        return None if rng.random() < 0.15 else set(rng.sample(range(6), rng.choice([1, 2, 3])))

    return may


@settings(max_examples=examples(120))
@given(st.integers(0, 2**32), st.integers(0, 12), st.booleans())
def test_masks_of_random_trees_with_a_cursor_that_distrusts(seed: int, nodes: int, wide: bool) -> None:
    """It asserts that nobody asks what follows its end."""
    may = random_rules(seed)
    rng = random.Random(seed)
    parents = tuple(rng.randrange(ROOT, i) if i else ROOT for i in range(nodes)) if wide else None
    draft = Draft(tuple(rng.randrange(6) for _ in range(nodes)), parents)
    root = ToyCursor(may, 5)
    made = masks(root, draft, 1)
    assert root.tokens == ()
    check(made, draft, lambda: ToyCursor(may, 5), 1)


def test_each_position_is_masked_once() -> None:
    root = ToyCursor(lambda t: {1, 2} if len(t) < 5 else set())
    masks(root, Draft((1, 2, 1, 2), (ROOT, ROOT, 0, 2)), 1)
    assert sorted(root.filled) == [(), (1,), (1, 1), (1, 1, 2), (2,)]


def test_a_row_after_an_invalid_token_raises_and_is_never_stale() -> None:
    made = masks(COMPILER.cursor(Regex("abc")), Draft((ord("x"), ord("b"), ord("c"))), WORDS)
    assert made.after(ROOT) is not None
    for node in range(3):
        with pytest.raises(ConstraintError, match="forbids is not known"):
            made.after(node)


def test_no_mask_is_computed_after_an_end_inside_a_draft() -> None:
    cursor = COMPILER.cursor(Regex("ab*"))
    made = masks(cursor, Draft((ord("a"), END, ord("b"), END)), WORDS)
    assert made.after(0) is not None
    assert [made.after(node) for node in (1, 2, 3)] == [None] * 3
    assert not cursor.finished


class Stuck(ToyCursor):
    def advance(self, token: int) -> bool:
        return token != 3 and super().advance(token)


class Failing(ToyCursor):
    def fill(self, row: Bits) -> bool:
        if self.tokens[-1:] == (2,):
            raise ConstraintError("too much work")
        return super().fill(row)


def test_an_error_is_raised_where_it_is_and_nowhere_else() -> None:
    root = Failing(lambda t: {1, 2, 3} if len(t) < 5 else set())
    made = masks(root, Draft((1, 2, 3, 1, 3), (ROOT, ROOT, 1, 0, 3)), 1)
    with pytest.raises(ConstraintError, match="too much work"):
        made.after(1)
    with pytest.raises(ConstraintError, match="forbids is not known"):
        made.after(2)
    assert all(made.after(node) is not None for node in (ROOT, 0, 3, 4))


def test_a_legal_token_that_is_then_refused_says_so() -> None:
    made = masks(Stuck(lambda _: {1, 3}), Draft((1, 3, 1)), 1)
    with pytest.raises(ConstraintError, match="allowed token 3 and then could not take it"):
        made.after(1)
    with pytest.raises(ConstraintError, match="forbids is not known"):
        made.after(2)


def test_a_limit_inside_a_draft_leaves_the_other_rows_right(monkeypatch: pytest.MonkeyPatch) -> None:
    hard = Regex("((x{1,30}){1,30}y){1,20}z")
    monkeypatch.setitem(compiler.LIMITS, "step_lexer_fuel", 400)
    made = Compiler(TOKENIZER, VOCAB)
    x = ord("x")
    draft = Draft((x, x, x, x, x, x), (ROOT, 0, 1, 2, 3, 0))
    rows = masks(made.cursor(hard), draft, WORDS)
    failed = [node for node in range(ROOT, len(draft)) if isinstance(rows.rows[node + 1], ConstraintError)]
    assert failed
    assert failed[0] > 0
    for node in (ROOT, 0, 5):
        row, want = rows.after(node), row_of(after(made, hard, [x] * len(draft.path(node))), VOCAB)
        assert row is not None
        assert want is not None
        assert row.tolist() == want.tolist()


def test_without_rows_anything_may_come() -> None:
    assert FREE.after(ROOT) is None
    assert FREE.after(7) is None
