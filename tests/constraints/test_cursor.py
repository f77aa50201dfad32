"""What may follow is a function of the tokens before, whatever way a cursor came there."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.constraints import Choice, Compiler, Constraint, Json, Lark, Regex, compiler
from paceline.constraints.draft_masks import allows
from paceline.errors import ConstraintError
from paceline.text import Tokenizer
from paceline.types import Cursor
from support import examples
from support.cursors import after, allowed, random_token, row_of, said
from support.grammars import small_tokenizer

TOKENIZER = small_tokenizer()
VOCAB = TOKENIZER.vocab_size
COMPILER = Compiler(TOKENIZER, VOCAB)
(END,) = TOKENIZER.eos_ids
BY_NAME = {TOKENIZER.decode([token]): token for token in range(97, VOCAB)}
A, B, C, X = (ord(letter) for letter in "abcx")

GRAMMARS: dict[str, Constraint] = {
    "optional end": Regex("a(bc)?a*"),
    "forced runs": Regex("abca(aab|bcb)abcab"),
    "alternatives": Regex("(ab|abc|b)c[abc]{0,3}"),
    "loop": Regex("(ab|ca)+"),
    "choice": Choice(("abc", "abcabc", "aab", "c")),
    "JSON": Json.of({"type": "array", "items": {"enum": ["a", "ab", None]}, "maxItems": 3}),
    "object": Json.of(
        {
            "type": "object",
            "properties": {"abc": {"type": "integer"}, "b": {"type": "string", "maxLength": 2}},
            "required": ["abc"],
            "additionalProperties": False,
        }
    ),
    "recursive": Lark('start: "a" start "b" | "c"'),
}


def check_walks(of: Compiler, constraint: Constraint, vocab: int, end: int, seed: int, moves: int) -> None:
    """Several forks of one cursor, moved in turn, each against a cursor of its own."""
    chance = random.Random(seed)
    forks: list[tuple[Cursor, list[int]]] = [(of.cursor(constraint), [])]
    for _ in range(moves):
        cursor, tokens = chance.choice(forks)
        if chance.random() < 0.3 and len(forks) < 5:
            forks.append((cursor.fork(), list(tokens)))
        elif not cursor.finished:
            tokens.append(random_token(cursor, vocab, chance, end if chance.random() < 0.8 else None))
            assert cursor.advance(tokens[-1])
    chance.shuffle(forks)
    for cursor, tokens in forks:
        assert said(cursor, vocab) == said(after(of, constraint, tokens), vocab)


@settings(max_examples=examples(150))
@given(st.sampled_from(sorted(GRAMMARS)), st.integers(0, 2**32))
def test_what_may_follow_depends_on_the_tokens_before_and_on_nothing_else(name: str, seed: int) -> None:
    check_walks(COMPILER, GRAMMARS[name], VOCAB, END, seed, 25)


@settings(max_examples=examples(100))
@given(st.sampled_from(sorted(GRAMMARS)), st.integers(0, 2**32))
def test_forced_tokens_are_the_only_ones_that_may_come(name: str, seed: int) -> None:
    chance = random.Random(seed)
    cursor = COMPILER.cursor(GRAMMARS[name])
    for _ in range(chance.randrange(6)):
        if not cursor.finished:
            cursor.advance(random_token(cursor, VOCAB, chance, END))
    ahead = cursor.fork()
    for token in cursor.forced():
        assert allowed(ahead, VOCAB) == [token]
        assert ahead.advance(token)


@settings(max_examples=examples(60))
@given(st.sampled_from(sorted(GRAMMARS)), st.integers(0, 2**32))
def test_every_legal_token_can_be_taken_and_a_refused_one_moves_nothing(name: str, seed: int) -> None:
    chance = random.Random(seed)
    cursor = COMPILER.cursor(GRAMMARS[name])
    for _ in range(6):
        if cursor.finished:
            break
        before = said(cursor, VOCAB)
        for token in allowed(cursor, VOCAB):
            assert cursor.fork().advance(token)
        for token in chance.sample(range(VOCAB), 20):
            fork = cursor.fork()
            if not fork.advance(token):
                assert said(fork, VOCAB) == before
        assert said(cursor, VOCAB) == before
        cursor.advance(random_token(cursor, VOCAB, chance, END))


@settings(max_examples=examples(60))
@given(st.sampled_from(sorted(GRAMMARS)), st.integers(0, 2**32))
def test_tokens_taken_in_one_call_are_those_taken_one_by_one(name: str, seed: int) -> None:
    chance, cursor = random.Random(seed), COMPILER.cursor(GRAMMARS[name])
    ahead, tokens = cursor.fork(), list[int]()
    for _ in range(chance.randrange(8)):
        tokens.append(chance.randrange(VOCAB + 2))
        if not ahead.finished and chance.random() < 0.9:
            tokens[-1] = random_token(ahead, VOCAB, chance, END if chance.random() < 0.5 else None)
            ahead.advance(tokens[-1])
    one_by_one, at_once = cursor.fork(), cursor.fork()
    taken = Cursor.advance_along(one_by_one, tokens)
    assert at_once.advance_along(tokens) == taken
    assert at_once.finished == one_by_one.finished
    if not at_once.finished:
        assert allowed(at_once, VOCAB) == allowed(one_by_one, VOCAB)
        vars(at_once)["_behind"] = True  # as after an error: all tokens are fed to a new matcher
        assert allowed(at_once, VOCAB) == allowed(one_by_one, VOCAB)
    assert allowed(cursor, VOCAB) == allowed(COMPILER.cursor(GRAMMARS[name]), VOCAB)


def test_a_fork_goes_its_own_way() -> None:
    cursor = COMPILER.cursor(Regex("a(b|c)a"))
    assert cursor.advance(A)
    left, right = cursor.fork(), cursor.fork()
    assert left.advance(B)
    assert right.advance(C)
    assert allowed(left, VOCAB) == [A]
    assert allowed(cursor, VOCAB) == [B, C, BY_NAME["ca"]]
    assert left.advance(A)
    assert left.finished
    assert not right.finished


@pytest.mark.parametrize("token", [-1, -(2**40), VOCAB, VOCAB + 1, 2**31, 2**70])
def test_tokens_outside_the_vocabulary_are_refused(token: int) -> None:
    cursor = COMPILER.cursor(Regex("a*"))
    before = said(cursor, VOCAB)
    assert not cursor.advance(token)
    assert said(cursor, VOCAB) == before


def test_the_mask_after_the_stop_token_is_never_made() -> None:
    for tokens in ([A, B, C], [A, END]):
        cursor = after(COMPILER, Regex("a(bc)?"), tokens)
        assert cursor.finished
        assert cursor.forced() == cursor.canonical() == []
        assert not cursor.advance(A)
        assert not cursor.advance(END)
        with pytest.raises(AssertionError, match="nothing can follow"):
            cursor.fill(np.zeros(9, np.uint32))


def test_an_end_is_taken_only_where_the_text_is_complete() -> None:
    cursor = COMPILER.cursor(Regex("ab*"))
    assert not cursor.advance(END)
    assert cursor.advance(A)
    assert END in allowed(cursor, VOCAB)
    fork = cursor.fork()
    assert fork.advance(END)
    assert fork.finished
    assert not cursor.finished


class Spy:
    """A matcher that tells which tokens it was shown."""

    def __init__(self, matcher: object, shown: list[int]) -> None:
        self._matcher = matcher
        self._shown = shown

    def __getattr__(self, name: str) -> object:
        return getattr(self._matcher, name)

    def deep_copy(self) -> "Spy":
        return Spy(self._matcher.deep_copy(), self._shown)  # type: ignore[attr-defined]

    def try_consume_tokens(self, tokens: list[int]) -> int:
        self._shown += tokens
        return int(self._matcher.try_consume_tokens(tokens))  # type: ignore[attr-defined]


def test_ends_are_not_shown_to_the_matcher(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []
    real = compiler.compile_grammar
    monkeypatch.setattr(compiler, "compile_grammar", lambda *given: Spy(real(*given), shown))
    cursor = Compiler(TOKENIZER, VOCAB).cursor(Regex("ab*"))
    assert cursor.advance(A)
    for _ in range(3):
        fork = cursor.fork()
        assert fork.advance(END)
        assert cursor.advance(B)
    assert shown == [A, B, B, B]


def test_rewinding_over_an_end_keeps_the_position() -> None:
    """A matcher that stands at an end does not count an end that it reads, and would go back too far."""
    cursor = COMPILER.cursor(Regex("abc(abc)?(ab)?"))
    for token in (A, B, C):
        assert cursor.advance(token)
        for _ in range(3):
            end = cursor.fork()
            assert end.advance(END) == (token == C)
            assert said(cursor, VOCAB) == said(
                after(COMPILER, Regex("abc(abc)?(ab)?"), cursor_text(token)), VOCAB
            )


def cursor_text(last: int) -> list[int]:
    return [A, B, C][: [A, B, C].index(last) + 1]


def test_a_dead_end_is_an_error() -> None:
    """The mask allows nothing: no token of this model spells what must come."""
    cursor = COMPILER.cursor(Regex("ab"))
    cursor._query = lambda *_: None  # type: ignore[attr-defined]
    with pytest.raises(ConstraintError, match="dead end"):
        cursor.fill(np.zeros(9, np.uint32))


HARD = Regex("((x{1,30}){1,30}y){1,20}z")


def first_error(cursor: Cursor) -> tuple[int, str]:
    """How many tokens were written until the grammar could not be followed."""
    for written in range(200):
        try:
            row_of(cursor, VOCAB)
        except ConstraintError as error:
            return written, str(error)
        assert cursor.advance(X)
    raise AssertionError("no error")


LIMITS = [("step_lexer_fuel", 400), ("max_lexer_states", 30)]


@pytest.mark.parametrize(("name", "most"), LIMITS)
def test_limit_errors_do_not_look_like_an_end(monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> None:
    monkeypatch.setitem(compiler.LIMITS, name, most)
    cursor = Compiler(TOKENIZER, VOCAB).cursor(HARD)
    written, reason = first_error(cursor)
    assert written > 1
    assert "cannot be followed any further: lexer error: too many" in reason
    assert not cursor.finished
    assert not cursor.fork().advance(END)
    with pytest.raises(ConstraintError, match="too many"):
        row_of(cursor, VOCAB)


@pytest.mark.parametrize(("name", "most"), LIMITS)
def test_an_error_does_not_poison_other_positions(
    monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    monkeypatch.setitem(compiler.LIMITS, name, most)
    made = Compiler(TOKENIZER, VOCAB)
    cursor = made.cursor(HARD)
    assert cursor.advance(X)
    before, other = cursor.fork(), made.cursor(HARD)
    at_first = said(other, VOCAB)
    first_error(cursor)
    assert said(other, VOCAB) == said(made.cursor(HARD), VOCAB) == at_first
    assert other.advance(X)
    assert said(before, VOCAB) == said(other, VOCAB)
    with pytest.raises(ConstraintError, match="too many"):
        row_of(cursor, VOCAB)
    assert before.advance(X)


@pytest.mark.parametrize(("name", "most"), LIMITS)
def test_an_error_spoils_no_output_to_come(monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> None:
    monkeypatch.setitem(compiler.LIMITS, name, most)
    made = Compiler(TOKENIZER, VOCAB)
    assert len({first_error(made.cursor(HARD)) for _ in range(4)}) == 1


def test_what_many_outputs_cost_together_is_held_against_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All copies of a matcher share one count of states."""
    monkeypatch.setitem(compiler.LIMITS, "max_lexer_states", 120)
    made = Compiler(TOKENIZER, VOCAB)
    pattern = Regex("[abc]*a[abc]{8}b")
    chance = random.Random(5)
    for _ in range(30):
        cursor = made.cursor(pattern)
        for _ in range(8):
            cursor.advance(random_token(cursor, VOCAB, chance, END))
            row_of(cursor, VOCAB)


def test_no_drafts_where_the_grammar_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compiler.LIMITS, "step_lexer_fuel", 400)
    cursor = Compiler(TOKENIZER, VOCAB).cursor(HARD)
    first_error(cursor)
    assert cursor.forced() == []
    assert cursor.canonical() == []


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["first", "second", "e\u0301t\u00e9"]},
        "counts": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
        "more": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["name", "kind", "counts", "more"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def real(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_path)


@pytest.fixture(scope="module")
def real_compiler(real: Tokenizer) -> Compiler:
    return Compiler(real, real.vocab_size)


@pytest.mark.model
@pytest.mark.parametrize("seed", range(4))
def test_the_same_on_a_real_vocabulary(real_compiler: Compiler, real: Tokenizer, seed: int) -> None:
    end = min(real.eos_ids)
    for constraint in (Json.of(SCHEMA), Regex("(yes|no|maybe so){1,3}!")):
        check_walks(real_compiler, constraint, real.vocab_size, end, seed, 25)


@pytest.mark.model
def test_forced_tokens_on_a_real_vocabulary(real_compiler: Compiler, real: Tokenizer) -> None:
    text = json.dumps({"name": "a b", "kind": "second", "counts": [1, 22], "more": None})
    cursor = real_compiler.cursor(Json.of(SCHEMA))
    runs = 0
    for token in real.encode(text, special=False):
        ahead = cursor.fork()
        for certain in cursor.forced():
            assert allowed(ahead, real.vocab_size) == [certain]
            assert ahead.advance(certain)
            runs += 1
        assert cursor.advance(token)
    assert cursor.finished
    assert runs > 20


@pytest.mark.model
def test_special_tokens_are_never_text(real_compiler: Compiler, real: Tokenizer) -> None:
    cursor = real_compiler.cursor(Json.of({"type": "string"}))
    assert cursor.advance(real.encode('"', special=False)[0])
    row = row_of(cursor, real.vocab_size)
    assert row is not None
    assert not [token for token in real.added if allows(row, token)]
    assert sum(int(word).bit_count() for word in row) > real.vocab_size // 2


@pytest.mark.model
def test_padding_beyond_the_vocabulary_is_never_allowed(real: Tokenizer) -> None:
    padded = real.vocab_size + 100
    made = Compiler(real, padded)
    for constraint in (Json.of({"type": "string"}), Regex("(.|\n)*")):
        cursor = made.cursor(constraint)
        for _ in range(2):
            row = row_of(cursor, padded)
            assert row is not None
            assert not [token for token in range(real.vocab_size, len(row) * 32) if allows(row, token)]
            cursor.advance(real.encode('"', special=False)[0])
        assert not cursor.advance(real.vocab_size + 3)
