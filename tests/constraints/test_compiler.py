"""From a constraint to a cursor, for any tokenizer; what was compiled is kept, within bounds."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.constraints import Choice, Compiler, Json, Lark, Regex, StructuralTag, check, compiler
from paceline.constraints.compiler import _LruCache
from paceline.constraints.draft_masks import allows
from paceline.errors import ConstraintError
from paceline.text import Tokenizer
from support.cursors import after, allowed, row_of, said, tokenizer_with

MARKED = tokenizer_with(["ab"], ["<mark>"])
VOCAB = MARKED.vocab_size
LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}


@pytest.mark.parametrize(
    "constraint",
    [
        Json.of(LOOP),
        Json.of(False),
        Json.of({"type": "integer", "minimum": 5, "maximum": 3}),
        Json.of({"enum": []}),
        Json.of(
            {"type": "object", "required": ["a"], "properties": {"a": False}, "additionalProperties": False}
        ),
        Lark("start: start"),
        Regex("["),
        Lark("x: /a/"),
    ],
)
def test_what_nothing_fits_is_refused_at_once(constraint: Any) -> None:
    with pytest.raises(ConstraintError, match="cannot be enforced"):
        Compiler(MARKED, VOCAB).cursor(constraint)
    with pytest.raises(ConstraintError, match="cannot be enforced"):
        check(constraint)


@pytest.mark.parametrize(("name", "most"), [("max_grammar_size", 10), ("initial_lexer_fuel", 10)])
def test_limits_on_the_grammar_itself(monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> None:
    monkeypatch.setitem(compiler.LIMITS, name, most)
    with pytest.raises(ConstraintError, match="cannot be enforced"):
        Compiler(MARKED, VOCAB).cursor(Json.of({"type": "object", "properties": {"abc": {"type": "string"}}}))


def test_equal_constraints_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real = compiler.compile_grammar

    def counted(grammar: str, *given: Any) -> Any:
        calls.append(grammar)
        return real(grammar, *given)

    monkeypatch.setattr(compiler, "compile_grammar", counted)
    made = Compiler(MARKED, VOCAB)
    for _ in range(3):
        made.cursor(Regex("a+"))
        made.cursor(StructuralTag("<", Regex("<b")))
    assert len(calls) == 2


def test_a_refusal_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real = compiler.compile_grammar

    def counted(grammar: str, *given: Any) -> Any:
        calls.append(grammar)
        return real(grammar, *given)

    monkeypatch.setattr(compiler, "compile_grammar", counted)
    made, texts = Compiler(MARKED, VOCAB), set()
    for _ in range(3):
        with pytest.raises(ConstraintError, match="cannot be enforced") as caught:
            made.cursor(Regex("("))
        texts.add(str(caught.value))
    assert len(calls) == len(texts) == 1


def test_remembered_refusals_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_REFUSED", 3)
    made = Compiler(MARKED, VOCAB)
    for i in range(5):
        with pytest.raises(ConstraintError):
            made.cursor(Regex(f"({i}"))
    assert len(made._refused) == 3


@dataclass
class Held:
    """A value of a cache."""

    name: str
    size: int = 1


def test_the_oldest_goes_first() -> None:
    cache: _LruCache[str, Held] = _LruCache(2, 100, lambda held: held.size)
    for key in ("a", "b"):
        cache.get(key, lambda: Held("old"))
    cache.get("a", lambda: Held("new"))
    cache.get("c", lambda: Held("old"))
    assert cache.get("a", lambda: Held("new")).name == "old"
    assert cache.get("b", lambda: Held("new")).name == "new"


def test_large_values_count_by_their_size() -> None:
    cache: _LruCache[int, Held] = _LruCache(100, 10, lambda held: held.size)
    for key in range(4):
        cache.get(key, lambda: Held("old", 4))
    assert [cache.get(key, lambda: Held("new", 4)).name for key in (3, 2)] == ["old", "old"]
    cache.get(9, lambda: Held("old", 50))  # more than there is room for: kept alone
    assert cache.get(9, lambda: Held("new", 50)).name == "old"
    assert cache.get(3, lambda: Held("new", 4)).name == "new"


def test_a_value_that_has_grown_goes_when_the_next_one_comes() -> None:
    cache: _LruCache[str, Held] = _LruCache(100, 10, lambda held: held.size)
    cache.get("a", lambda: Held("old")).size = 50
    cache.get("b", lambda: Held("old"))
    assert cache.get("a", lambda: Held("new")).name == "new"


def test_marks_in_fixed_text_are_single_tokens() -> None:
    made = Compiler(MARKED, VOCAB)
    (mark,) = MARKED.encode("<mark>", special=True, bos=False)
    assert made.spell("a<mark>b") == f'"a" <[{mark}]> "b"'
    assert made.spell("") == '""'
    assert made.spell('"\n\\') == '"\\"\\n\\\\"'
    assert made.spell("é") == '"é"'


@pytest.mark.parametrize("constraint", [Json.of({"type": "string"}), Regex("(.|\n)*"), Choice(("<mark>",))])
def test_marks_are_never_text(constraint: Any) -> None:
    cursor = Compiler(MARKED, VOCAB).cursor(constraint)
    for token in cursor.forced() or [ord('"')]:
        row = row_of(cursor, VOCAB)
        assert row is not None
        assert not any(allows(row, mark) for mark in MARKED.added - MARKED.eos_ids)
        assert cursor.advance(token)


@pytest.mark.parametrize("more", [1, 31, 32, 33, 500])
def test_padding_beyond_the_vocabulary_is_never_allowed(more: int) -> None:
    made = Compiler(MARKED, VOCAB + more)
    for constraint in (Json.of({}), Regex("(.|\n)*"), Lark("start: /(.|\n)+/")):
        cursor = made.cursor(constraint)
        assert max(allowed(cursor, (VOCAB + more + 31) // 32 * 32)) < VOCAB
        assert not cursor.advance(VOCAB)
        assert not cursor.advance(VOCAB + more - 1)


def test_padding_is_free_text_like_any_other() -> None:
    made = Compiler(MARKED, VOCAB + 40)
    cursor = made.cursor(StructuralTag("ab", Regex("abc")))
    assert cursor.advance(ord("a"))
    assert cursor.advance(VOCAB + 39)
    assert not cursor.advance(VOCAB + 40)


NFD, NFC = "e\u0301te\u0301", "\u00e9t\u00e9"


@pytest.mark.parametrize("form", ["NFC", "NFKC"])
def test_a_tokenizer_with_a_normal_form_can_write_text_in_another(form: str) -> None:
    """As its encoder would change the text, the grammar must not be cut into tokens by it."""
    tokenizer = tokenizer_with(["ab"], normal_form=form)
    made = Compiler(tokenizer, tokenizer.vocab_size)
    schema = {
        "type": "object",
        "properties": {NFD: {"enum": [NFD, NFC + "!", "\ufb01"]}},
        "required": [NFD],
        "additionalProperties": False,
    }
    for value in (NFD, NFC + "!", "\ufb01"):
        written = f'{{"{NFD}": "{value}"}}'.encode()
        cursor = made.cursor(Json.of(schema))
        assert bytes(cursor.forced())[:8] == written[:8]
        for token in written:
            assert token in allowed(cursor, tokenizer.vocab_size)
            assert cursor.advance(token)
        assert cursor.finished


@pytest.mark.large
def test_a_real_tokenizer_with_a_normal_form_can_write_text_in_another(qwen_path: Path) -> None:
    tokenizer = Tokenizer.load(qwen_path)
    made = Compiler(tokenizer, tokenizer.vocab_size)
    schema = {
        "type": "object",
        "properties": {NFD: {"enum": [NFD]}},
        "required": [NFD],
        "additionalProperties": False,
    }
    cursor = made.cursor(Json.of(schema))
    tokens: list[int] = []
    while not cursor.finished:
        found = allowed(cursor, tokenizer.vocab_size)
        tokens.append(found[0])
        assert cursor.advance(found[0])
    assert tokenizer.decode(tokens) == f'{{"{NFD}": "{NFD}"}}'


@pytest.mark.large
def test_reasoning_that_ends_inside_a_token_of_a_real_model(qwen_path: Path) -> None:
    from paceline.constraints.grammars import after as once_seen

    tokenizer = Tokenizer.load(qwen_path)
    made = Compiler(tokenizer, tokenizer.vocab_size)
    thinking = once_seen("</think>", Json.of({"type": "object", "properties": {"a": {"const": 1}}}))
    tokens = tokenizer.encode("hm</think>{", special=False)
    assert tokenizer.piece(tokens[-1]) == b">{"
    cursor = after(made, thinking, tokens[:-1])
    found = {
        tokenizer.piece(token) for token in set(range(tokenizer.vocab_size)) - set(allowed(cursor, 151936))
    }
    assert b">" not in found
    assert b">{" not in found
    assert b">{{" in found
    assert b">," in found
    assert cursor.advance(tokens[-1])
    assert said(cursor, tokenizer.vocab_size)[1] is not None


@pytest.mark.parametrize(
    "constraint", [Choice(("a<mark>b",)), Json.of({"const": "<mark><eos>"}), Regex("<eos>")]
)
def test_text_that_must_come_and_reads_like_a_mark_is_written_as_text(constraint: Any) -> None:
    """The end of the output among them."""
    cursor = Compiler(MARKED, VOCAB).cursor(constraint)
    certain = cursor.forced()
    assert not MARKED.added & set(certain)
    for token in certain:
        assert allowed(cursor, VOCAB) == [token]
        assert cursor.advance(token)
    assert cursor.finished


def check_marks_as_text(tokenizer: Tokenizer) -> None:
    made = Compiler(tokenizer, tokenizer.vocab_size)
    text = "a <tool_call>\n<|im_start|></tool_call><|im_end|> b"
    cursor = made.cursor(Choice((text,)))
    tokens: list[int] = []
    while not cursor.finished:
        found = allowed(cursor, tokenizer.vocab_size)
        tokens.append(found[0])
        assert len(found) == 1
        assert cursor.advance(found[0])
    assert tokenizer.decode(tokens) == text
    assert not {t for t in tokens if tokenizer.piece(t).startswith(b"<") and len(tokenizer.piece(t)) > 4}


@pytest.mark.model
def test_marks_as_text_in_a_real_vocabulary(smollm2_path: Path) -> None:
    check_marks_as_text(Tokenizer.load(smollm2_path))


@pytest.mark.large
def test_marks_as_text_in_a_larger_vocabulary(qwen_path: Path) -> None:
    check_marks_as_text(Tokenizer.load(qwen_path))


def test_a_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConstraintError, match="pip install llguidance"):
        check(Regex("a"))
