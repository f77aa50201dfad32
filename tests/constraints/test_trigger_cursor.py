"""Free text until a trigger, wherever tokens' edges fall, then a grammar."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.constraints import Choice, Compiler, Json, Lark, Regex, StructuralTag, compiler, tool_calls
from paceline.constraints.draft_masks import masks, words
from paceline.constraints.grammars import after as once_seen
from paceline.text import Tokenizer
from paceline.text.tool_calls.formats import FORMATS
from paceline.types import ROOT, Cursor, Draft
from support import examples
from support.cursors import after, allowed, row_of, said, spelled_out, tokenizer_with

EXTRA = ["</", "think", "</think", ">[", ">x", ">\n[", "x</think>", "k>", "k>[1", ">[1, ", "><"]
TOKENIZER = tokenizer_with(EXTRA, ["<mark>"])
VOCAB = TOKENIZER.vocab_size
ID = {TOKENIZER.piece(token).decode("latin-1"): token for token in range(VOCAB)}
(END,) = TOKENIZER.eos_ids
COMPILER = Compiler(TOKENIZER, VOCAB)
LIST = Json.of({"type": "array", "items": {"type": "integer"}, "maxItems": 2})
THINKING = once_seen("</think>", LIST)


def ids(*pieces: str) -> list[int]:
    return [ID[piece] for piece in pieces]


def letters(text: str) -> list[int]:
    return list(text.encode())


def shut(cursor: Cursor) -> set[int]:
    return set(range(VOCAB)) - set(allowed(cursor, VOCAB))


def everything(cursor: Cursor) -> bool:
    """But the end, and a token that holds other text and the whole trigger."""
    return shut(cursor) <= {ID["x</think>"], END}


def test_reasoning_is_free_and_what_follows_it_is_not() -> None:
    cursor = after(COMPILER, THINKING, letters("hm, [ or <think> {? "))
    assert everything(cursor)
    assert not cursor.finished
    assert cursor.forced() == cursor.canonical() == []
    for token in letters("</think"):
        assert cursor.advance(token)
    assert shut(cursor) == {ID[">x"], ID["><"], ID["x</think>"], END}
    assert cursor.advance(ID[">"])
    plain = {token for token in allowed(cursor, VOCAB) if token < 128}  # other spaces begin with other bytes
    assert plain == set(letters("[ \t\n\r\x0b\x0c"))


@pytest.mark.parametrize(
    ("pieces", "then"),
    [
        (["</", "think", ">"], "[ \n"),
        (["</think", ">["], "]-019"),
        (["</", "think", ">[1, "], "-09"),
        (["</", "t", "h", "i", "n", "k>"], "[ \n"),
        (["</", "t", "h", "i", "n", "k>[1"], ",]0"),
        (["</think", ">\n["], "]-09"),
        (["<", "</think", ">"], "[ \n"),
        (["</think", "</", "think", ">"], "[ \n"),
        (["</", "</", "think", ">"], "[ \n"),
        (["<", "/", "think", "x", "</", "think", ">"], "[ \n"),
    ],
    ids="|".join,
)
def test_the_end_of_reasoning_may_lie_anywhere_in_tokens(pieces: list[str], then: str) -> None:
    cursor = after(COMPILER, THINKING, ids(*pieces))
    found = allowed(cursor, VOCAB)
    assert set(letters(then)) <= set(found)
    assert ID["x"] not in found
    assert END not in found


@pytest.mark.parametrize("pieces", [["</", "think", ">x"], ["x</think>"], ["</think", "><"]], ids="|".join)
def test_a_token_that_ends_reasoning_and_goes_on_wrongly_is_refused(pieces: list[str]) -> None:
    cursor = after(COMPILER, THINKING, ids(*pieces[:-1]))
    assert ID[pieces[-1]] not in allowed(cursor, VOCAB)
    before = said(cursor, VOCAB)
    assert not cursor.advance(ID[pieces[-1]])
    assert said(cursor, VOCAB) == before


@pytest.mark.parametrize(
    "text", ["</thin", "</thinkx>", "<</ think>", "</think </think", "< /think>", "think>"]
)
def test_false_starts_leave_the_text_free(text: str) -> None:
    cursor = after(COMPILER, THINKING, letters(text))
    assert cursor.advance(ID["x"])
    assert everything(cursor)


def test_reasoning_that_ends_inside_a_draft_has_the_right_mask_at_each_node() -> None:
    draft = Draft((*letters("so"), *ids("</", "think", ">["), *letters("12]"), END))
    made = masks(COMPILER.cursor(THINKING), draft, words(VOCAB))
    for node in range(ROOT, len(draft) - 1):
        here = after(COMPILER, THINKING, draft.tokens[: node + 1])
        row, want = made.after(node), None if here.finished else row_of(here, VOCAB)
        assert (row is None) == (want is None)
        assert row is None or want is None or row.tolist() == want.tolist()
    rows = [made.after(node) for node in range(ROOT, len(draft))]
    counts = [None if row is None else sum(int(word).bit_count() for word in row) for row in rows]
    free = VOCAB // 32 * 32
    assert all(count is not None and count >= free - 5 for count in counts[:5])
    assert all(count is not None and count < 14 for count in counts[5:8])
    assert counts[8:] == [None, None]


def test_an_output_cannot_end_within_its_reasoning() -> None:
    for text in ("", "x", "</thi"):
        cursor = after(COMPILER, THINKING, letters(text))
        assert END not in allowed(cursor, VOCAB)
        assert not cursor.advance(END)
        assert not cursor.finished
        assert cursor.advance(ID["x"])


def test_an_output_may_end_before_a_call_and_inside_its_trigger() -> None:
    optional = replace(THINKING, must=False)
    for text in ("", "x", "</thi"):
        cursor = after(COMPILER, optional, letters(text))
        assert cursor.advance(END)
        assert cursor.finished
        assert not cursor.advance(ID["x"])


def test_the_end_of_the_grammar_is_the_end() -> None:
    cursor = after(COMPILER, THINKING, letters("</think>[1]"))
    assert cursor.finished
    with pytest.raises(AssertionError, match="nothing can follow"):
        row_of(cursor, VOCAB)


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
def test_tokens_outside_the_vocabulary_are_refused(token: int) -> None:
    for text in ("x", "</think>"):
        assert not after(COMPILER, THINKING, letters(text)).advance(token)


def test_a_trigger_that_is_given_up_for_a_new_one() -> None:
    made = Compiler(tokenizer_with(["ab", "abx"]), 259)
    switched = StructuralTag("aab", Regex("aab(x|y)"))
    long = [token for token in range(256, 259) if made._pieces[token] == b"ab"]
    cursor = after(made, switched, [97, 97, *long])
    assert allowed(cursor, 259) == letters("xy")


@settings(max_examples=examples(100))
@given(st.integers(0, 2**32), st.sampled_from([True, False]), st.sampled_from([True, False]))
def test_masks_of_random_texts_follow_from_their_bytes(seed: int, again: bool, anywhere: bool) -> None:
    """Against the definition: the first trigger is looked for in all bytes so far."""
    trigger, options = "<a>", ("<a>b", "<a>bb", "<a><a>c")
    tokenizer = tokenizer_with(["<a", "a>", "a>b", ">b", "><", "x<", "<<", "<a>", "x<a>", "<a>bb", "bb"])
    made = Compiler(tokenizer, tokenizer.vocab_size)
    switched = StructuralTag(trigger, Choice(options), again, anywhere)
    chance = random.Random(seed)
    likely = [*letters("<a>bcx"), *range(256, tokenizer.vocab_size)]
    cursor, text = made.cursor(switched), b""
    for _ in range(12):
        if cursor.finished:
            break
        token = chance.choice(likely)
        legal = token in allowed(cursor, tokenizer.vocab_size)
        piece = tokenizer.piece(token)
        free, inside = parted(text, trigger.encode(), [o.encode() for o in options], again, anywhere)
        fork = cursor.fork()
        if legal:
            assert fork.advance(token)
            if token in tokenizer.eos_ids:
                assert fork.finished
                break
            assert follows(free, inside, piece, trigger.encode(), options, anywhere)
            cursor, text = fork, text + piece
        elif not inside:  # free text is only shut to what completes a trigger wrongly
            assert trigger.encode() in free + piece


def parted(
    text: bytes, trigger: bytes, options: list[bytes], again: bool, anywhere: bool
) -> tuple[bytes, bytes]:
    """The free text at the end of which we are, or the part of the grammar's text that is there."""
    at = text.find(trigger) if anywhere else (0 if text.startswith(trigger) else -1)
    if at < 0:
        return text, b""
    inside = text[at:]
    whole = [o for o in options if inside.startswith(o)]
    longer = [o for o in options if o.startswith(inside) and o != inside]
    if whole and not longer and again:
        done = max(whole, key=len)
        return parted(inside[len(done) :], trigger, options, again, anywhere)
    return b"", inside


def follows(
    free: bytes, inside: bytes, piece: bytes, trigger: bytes, options: tuple[str, ...], anywhere: bool
) -> bool:
    if inside:
        return any(o.encode().startswith(inside + piece) for o in options)
    text = free + piece
    at = text.find(trigger) if anywhere else (0 if text.startswith(trigger) else -1)
    return at < 0 or any(o.encode().startswith(text[at:]) for o in options)


def test_free_text_may_follow_and_another_trigger() -> None:
    switched = StructuralTag("<c>", Lark('start: "<c>" /[0-9]/ "</c>"'), again=True)
    cursor = after(COMPILER, switched, letters("ab<c>1</c>"))
    assert everything(cursor)
    assert not cursor.finished
    for token in letters(" and <c>"):
        assert cursor.advance(token)
    assert allowed(cursor, VOCAB) == letters("0123456789")
    for token in letters("2</c>"):
        assert cursor.advance(token)
    assert cursor.advance(END)
    assert cursor.finished


def test_an_end_inside_the_grammar_ends_the_output_though_free_text_may_follow() -> None:
    cursor = after(COMPILER, StructuralTag("<c>", Regex("<c>1*"), again=True), letters("<c>1"))
    assert END in allowed(cursor, VOCAB)
    assert cursor.advance(END)
    assert cursor.finished


def test_a_trigger_that_must_not_appear() -> None:
    cursor = COMPILER.cursor(StructuralTag("</think>", None))
    for token in ids("</", "think"):
        assert cursor.advance(token)
    completing = {token for token in range(VOCAB) if TOKENIZER.piece(token).startswith(b">")}
    assert shut(cursor) == completing | {ID["x</think>"]}
    assert not cursor.advance(ID[">"])
    assert cursor.advance(ID["x"])
    assert shut(cursor) == {ID["x</think>"]}


def test_a_trigger_that_counts_only_at_the_start() -> None:
    switched = StructuralTag('{"a', Regex(r'\{"ab"\}'), anywhere=False)
    assert allowed(after(COMPILER, switched, letters('{"a')), VOCAB) == letters("b")
    for text in (' {"a', 'x{"a', '{{"a', '{ "a'):
        assert everything(after(COMPILER, switched, letters(text)))


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32))
def test_forks_go_their_own_ways(seed: int) -> None:
    chance = random.Random(seed)
    forks: list[tuple[Cursor, list[int]]] = [(COMPILER.cursor(THINKING), [])]
    for _ in range(20):
        cursor, tokens = chance.choice(forks)
        if chance.random() < 0.3:
            forks.append((cursor.fork(), list(tokens)))
        elif not cursor.finished:
            token = chance.choice(ids("</", "think", ">", ">[", "k>", "x", "1", "]", "[", "<", "</think"))
            if cursor.advance(token):
                tokens.append(token)
    for cursor, tokens in forks:
        assert said(cursor, VOCAB) == said(after(COMPILER, THINKING, tokens), VOCAB)


TOOL = {
    "name": "f",
    "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
}
MARKED = tokenizer_with(["<tool", "_call", "_call>", "l>\n"], ["<tool_call>", "</tool_call>"])
MARKED_VOCAB = MARKED.vocab_size
WITH_MARKS = Compiler(MARKED, MARKED_VOCAB)
AUTO = tool_calls([TOOL], "auto", FORMATS["hermes"])
CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'


def test_a_trigger_that_is_one_token() -> None:
    (mark,) = spelled_out(MARKED, "<tool_call>")
    cursor = after(WITH_MARKS, AUTO, letters("hm "))
    assert cursor.advance(mark)
    assert allowed(cursor, MARKED_VOCAB) == [10]
    assert bytes(cursor.forced()) == b'\n{"name": "f", "arguments": {"n": '


def test_a_whole_call_by_marks_and_then_free_text() -> None:
    cursor = after(WITH_MARKS, AUTO, spelled_out(MARKED, "so ", CALL))
    assert row_of(cursor, MARKED_VOCAB) is None
    for token in spelled_out(MARKED, "\n", CALL):
        assert cursor.advance(token)
    assert not cursor.finished


def test_a_trigger_spelled_out_is_refused_where_it_is_a_token_of_its_own() -> None:
    for before in ("<tool_cal", "<tool_call"):
        cursor = after(WITH_MARKS, AUTO, letters(before))
        for token in range(MARKED_VOCAB):
            completes = b"<tool_call>" in before.encode() + MARKED.piece(token)
            whole = token in MARKED.added
            assert (token in allowed(cursor, MARKED_VOCAB)) == (not completes or whole), MARKED.piece(token)


@pytest.mark.parametrize("false", ["<tool", "<tool_callx", "<<tool_cal", "< tool_call>", "<tool_cal>"])
def test_a_call_after_a_false_start(false: str) -> None:
    tokens = [*letters(false), *spelled_out(MARKED, CALL)]
    cursor = after(WITH_MARKS, AUTO, tokens)
    assert not cursor.finished


def test_none_forbids_calls_in_any_spelling() -> None:
    none = tool_calls([TOOL], "none", FORMATS["hermes"])
    (mark,) = spelled_out(MARKED, "<tool_call>")
    for before in ("", "x ", "<tool", "<<tool_call"):
        cursor = after(WITH_MARKS, none, letters(before))
        found = allowed(cursor, MARKED_VOCAB)
        assert mark not in found
        assert not cursor.advance(mark)
        assert (ord(">") in found) == (not before.endswith("_call"))


@pytest.fixture(scope="module")
def real(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_path)


@pytest.mark.model
def test_a_trigger_spelled_out_by_the_tokens_of_a_real_model(real: Tokenizer) -> None:
    made = Compiler(real, real.vocab_size)
    auto = tool_calls([TOOL], "auto", FORMATS["smollm2"])
    call = '<tool_call>[{"name": "f", "arguments": {"n": 12}}]</tool_call>'
    for split in range(1, len(call)):
        cursor = made.cursor(auto)
        tokens = [
            *real.encode("Well: " + call[:split], special=False),
            *real.encode(call[split:], special=False),
        ]
        assert all(cursor.advance(token) for token in tokens), call[:split]
        assert not cursor.finished
        assert row_of(cursor, real.vocab_size) is None
    cursor = after(made, auto, real.encode("Well: <tool_call", special=False))
    row = allowed(cursor, real.vocab_size)
    shut = [real.piece(token) for token in set(range(real.vocab_size)) - set(row)]
    assert shut
    assert all(piece.startswith(b">") and piece != b">" for piece in shut)


def test_an_end_that_is_ignored_is_text() -> None:
    auto = replace(THINKING, must=False)
    cursor = COMPILER.cursor(auto, ignore_eos=True)
    assert cursor.advance(END)
    assert not cursor.finished
    assert not cursor.fork().finished
    assert cursor.advance(ID["x"])


def broken(monkeypatch: pytest.MonkeyPatch, tag: StructuralTag) -> tuple[Cursor, list[str]]:
    """A cursor before its trigger, whose grammar another output has broken; and the compilations since."""
    made = Compiler(TOKENIZER, VOCAB)
    cursor = made.cursor(tag)
    (grammar,) = made._grammars._values.values()
    grammar._source.broken = True
    compiled: list[str] = []
    real = compiler.compile_grammar

    def counted(*given: Any) -> Any:
        compiled.append("again")
        return real(*given)

    monkeypatch.setattr(compiler, "compile_grammar", counted)
    return cursor, compiled


def test_a_committed_trigger_compiles_nothing_in_the_engines_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    cursor, compiled = broken(monkeypatch, THINKING)
    for token in ids("</think", ">["):
        assert cursor.commit(token)
    assert cursor.unsettled
    assert not cursor.finished
    assert compiled == []
    cursor.settle()
    assert compiled
    assert not cursor.unsettled
    assert allowed(cursor, VOCAB) == allowed(after(COMPILER, THINKING, ids("</think", ">[")), VOCAB)


def test_hints_beyond_a_trigger_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cursor, compiled = broken(monkeypatch, THINKING)
    hints = cursor.hints()
    assert hints.advance(ID["</think"])
    hints.advance(ID[">["])
    hints.advance(ID["k>"])
    assert compiled == []
    assert not cursor.unsettled
