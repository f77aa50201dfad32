"""Large grammars are compiled in another process first, which is killed for its time and its memory."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.constraints import Choice, Compiler, GrammarLimits, Json, Lark, Regex, compiler, sandbox
from paceline.constraints import cursor as cursor_module
from paceline.constraints.cursor import Grammar, GrammarCursor
from paceline.errors import Busy, ConstraintError
from support.cursors import row_of, said
from support.grammars import small_tokenizer

TOKENIZER = small_tokenizer()
VOCAB = TOKENIZER.vocab_size
A, B = ord("a"), ord("b")
CRASH = Lark("start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(60_000)) + '\nr60000: "x"')
NESTED = Regex("((((a{100}){100}){100}){100})")
WIDE = Json.of({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(400)}})


@pytest.fixture
def process_starts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    starts: list[float] = []
    real = sandbox.Sandbox._start

    def counted(self: sandbox.Sandbox) -> Any:
        starts.append(time.monotonic())
        return real(self)

    monkeypatch.setattr(sandbox.Sandbox, "_start", counted)
    return starts


def test_small_grammars_need_no_process(process_starts: list[float]) -> None:
    made = Compiler(TOKENIZER, VOCAB)
    made.cursor(Regex("a+b"))
    made.cursor(Json.of({"type": "object", "properties": {"a": {"type": "integer"}}}))
    with pytest.raises(ConstraintError):
        made.cursor(Regex("("))
    assert not process_starts


@pytest.mark.slow
def test_a_large_grammar_is_tried_once_and_followed(process_starts: list[float]) -> None:
    made = Compiler(TOKENIZER, VOCAB)
    for _ in range(2):
        cursor = made.cursor(WIDE)
        assert cursor.advance(ord("{"))
    assert len(process_starts) == 1


def test_a_loaded_compiler_has_its_tables_and_its_process_before_the_first_grammar(
    process_starts: list[float],
) -> None:
    made = Compiler(TOKENIZER, VOCAB)
    made.load()
    assert {"_tables", "_pieces"} <= vars(made).keys()
    assert made._with_byte.keys() == {b":", b">"}
    until = time.monotonic() + 60.0
    while not process_starts:  # in another thread
        assert time.monotonic() < until
        time.sleep(0.001)
    assert made.cursor(WIDE).advance(ord("{"))
    assert len(process_starts) == 1


def test_a_grammar_that_has_passed_waits_for_no_process_after_a_restart(
    process_starts: list[float], tmp_path: Path
) -> None:
    for _ in range(2):
        assert Compiler(TOKENIZER, VOCAB, folder=tmp_path / "grammars").cursor(WIDE).advance(ord("{"))
    assert len(process_starts) == 1
    (known,) = (tmp_path / "grammars").iterdir()
    assert int(known.read_text()) > 0
    known.write_text("")  # cut by a crash
    assert Compiler(TOKENIZER, VOCAB, folder=tmp_path / "grammars").cursor(WIDE).advance(ord("{"))
    assert len(process_starts) == 2


def test_other_limits_and_other_vocabularies_are_tried_anew(
    process_starts: list[float], tmp_path: Path
) -> None:
    Compiler(TOKENIZER, VOCAB, folder=tmp_path).cursor(WIDE)
    Compiler(TOKENIZER, VOCAB, GrammarLimits(seconds=2.0), folder=tmp_path).cursor(WIDE)
    Compiler(TOKENIZER, VOCAB + 1, folder=tmp_path).cursor(WIDE)
    assert len(process_starts) == 3
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_remembers_a_bounded_number_of_grammars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MAX_ACCEPTED", 3)
    known = sandbox.AcceptedGrammars(tmp_path)  # one, as in a server that runs for months
    for number in range(5):
        known.add(f"{number}", number)
        os.utime(tmp_path / f"{number}", (number, number))
    assert len(list(tmp_path.iterdir())) == 3
    assert [known.taken(f"{number}") for number in range(5)] == [None, None, 2, 3, 4]


@pytest.mark.slow
def test_a_grammar_that_crashes_the_compiler_is_refused_and_the_refusal_remembered(
    process_starts: list[float],
) -> None:
    """In this process it would be a stack overflow, which nothing catches."""
    made = Compiler(TOKENIZER, VOCAB)
    for _ in range(3):
        with pytest.raises(ConstraintError, match="too deeply"):
            made.cursor(CRASH)
    assert len(process_starts) == 1
    assert made.cursor(WIDE).advance(ord("{"))  # a new process
    assert len(process_starts) == 2


@pytest.mark.slow
def test_time_and_memory_are_bounded(process_starts: list[float]) -> None:
    stars = Regex("a*" * 50_000)  # takes the square of its length
    for limits, expected in (
        (GrammarLimits(seconds=0.3), r"0\.3 s|MB"),
        (GrammarLimits(seconds=60, memory_mb=16), "16 MB"),
    ):
        made = Compiler(TOKENIZER, VOCAB, limits)
        with pytest.raises(ConstraintError, match=expected):
            made.cursor(stars)


@pytest.mark.slow
@pytest.mark.parametrize(
    "constraint", [NESTED, Choice(("word " * 200_000,)), Json.of({"const": "x" * 20_000})]
)
def test_fixed_text_is_bounded(constraint: Any) -> None:
    made = Compiler(TOKENIZER, VOCAB)
    with pytest.raises(ConstraintError, match=r"at most 8,192|MB|limit"):
        made.cursor(constraint)


def test_fixed_text_within_the_bound_is_taken() -> None:
    assert Compiler(TOKENIZER, VOCAB).cursor(Choice(("ab" * 1000,))).advance(A)
    with pytest.raises(ConstraintError, match="at most 100"):
        Compiler(TOKENIZER, VOCAB, GrammarLimits(forced_bytes=100)).cursor(Choice(("ab" * 100,)))


def test_too_many_waiting_grammars_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Semaphore(0), threading.Event()

    def waits(self: sandbox.Sandbox, message: Any) -> tuple[str | None, int, int]:
        entered.release()
        leave.wait(60)
        return None, 0, 0

    monkeypatch.setattr(sandbox.Sandbox, "_compile", waits)
    tried = sandbox.Sandbox(sandbox.SandboxSetup("", 1, [], 1, 1.0, 1))
    threads = [threading.Thread(target=tried.compile, args=("x", {})) for _ in range(sandbox.MAX_WAITING)]
    for thread in threads:
        thread.start()
    assert entered.acquire(timeout=60)
    while tried._waiting._value:
        time.sleep(0.001)
    with pytest.raises(Busy):
        tried.compile("x", {})
    leave.set()
    for thread in threads:
        thread.join()


def tried_process(made: Compiler) -> Any:
    process = made._sandbox._process
    assert process is not None
    return process


@pytest.mark.slow
def test_a_process_that_keeps_much_memory_is_ended(
    process_starts: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Compiler(TOKENIZER, VOCAB)
    made.cursor(WIDE)
    process = tried_process(made)
    assert process.poll() is None
    monkeypatch.setattr(sandbox, "MAX_HELD", -1)
    with pytest.raises(ConstraintError):
        made.cursor(NESTED)
    assert process.poll() is not None
    assert made._sandbox._process is None
    monkeypatch.undo()
    assert made.cursor(Json.of({"const": "x" * 6000})).advance(ord('"'))  # a new process


@pytest.mark.slow
def test_an_idle_process_is_ended_and_the_next_grammar_has_a_new_one(
    process_starts: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "IDLE_S", 0.01)
    made = Compiler(TOKENIZER, VOCAB)
    made.cursor(WIDE)
    deadline = time.monotonic() + 60
    while made._sandbox._process is not None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert made.cursor(Json.of({"const": "x" * 6000})).advance(ord('"'))
    assert len(process_starts) == 2


def test_a_timer_that_a_grammar_has_overtaken_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(sandbox.Sandbox, "_compile", lambda self, message: (None, 0, 0))
    tried = sandbox.Sandbox(sandbox.SandboxSetup("", 1, [], 1, 1.0, 1))
    tried.compile("x", {})
    first = tried._idle
    tried.compile("y", {})
    second = tried._idle
    assert first is not None
    assert second is not None
    monkeypatch.setattr(sandbox.Sandbox, "close", lambda self: closed.append(True))
    tried.end_idle(first)
    assert not closed
    tried.end_idle(second)
    assert closed
    second.cancel()


def compiling(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of threads that compile from now on."""
    names: list[str] = []
    real = compiler.compile_grammar

    def counted(*given: Any) -> Any:
        names.append(threading.current_thread().name)
        return real(*given)

    monkeypatch.setattr(compiler, "compile_grammar", counted)
    return names


def broken(cursor: Any) -> None:
    cursor._source.broken = True


def test_neither_commit_nor_hints_compile_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    names = compiling(monkeypatch)
    made = Compiler(TOKENIZER, VOCAB)
    cursor, other = made.cursor(Regex("a[ab]*")), made.cursor(Regex("a[ab]*"))
    broken(cursor)
    before = len(names)
    assert cursor.hints().forced() == []
    assert not cursor.hints().fork().advance(A)
    assert cursor.commit(A)
    assert cursor.commit(B)
    assert len(names) == before
    assert other.advance(A)
    assert other.advance(B)
    assert said(cursor, VOCAB) == said(other, VOCAB)
    assert len(names) > before


class Failing:
    """A matcher that meets a limit."""

    def deep_copy(self) -> "Failing":
        return self

    def try_consume_tokens(self, tokens: list[int]) -> int:
        return 0

    def is_stopped(self) -> bool:
        return False

    def is_error(self) -> bool:
        return True

    def get_error(self) -> str:
        return "too many states"


def test_an_error_while_a_token_is_committed_is_left_to_the_next_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = compiling(monkeypatch)
    made = Compiler(TOKENIZER, VOCAB)
    cursor, other = made.cursor(Regex("a[ab]*")), made.cursor(Regex("a[ab]*"))
    cursor._matcher = Failing()  # type: ignore[attr-defined]
    before = len(names)
    assert cursor.commit(A)
    assert len(names) == before
    assert other.advance(A)
    assert said(cursor, VOCAB) == said(other, VOCAB)


def test_an_error_while_a_text_is_checked_breaks_no_other_check() -> None:
    made = Compiler(TOKENIZER, VOCAB)
    cursor, fits = made.cursor(Regex("a[ab]*")), made.checker(Regex("a[ab]*"))
    assert isinstance(cursor, GrammarCursor)
    cursor._matcher = Failing()  # type: ignore[assignment]
    assert not cursor.completed_by([A])
    assert cursor._source.broken
    assert [fits(text) for text in ("ab", "", "b", "abc")] == [True, False, False, False]


def test_tokens_after_a_slow_mask_are_consumed_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.constraints.cursor.DEFER_S", -1.0)
    made = Compiler(TOKENIZER, VOCAB)
    cursor = made.cursor(Regex("ab(ab)?"))
    assert isinstance(cursor, GrammarCursor)
    row_of(cursor, VOCAB)
    for token in (A, B):
        assert cursor.commit(token)
    assert cursor._deferred == (A, B)
    assert cursor.hints().forced() == []
    cursor.settle()
    assert not cursor._deferred
    plain = made.cursor(Regex("ab(ab)?"))
    assert plain.advance(A)
    assert plain.advance(B)
    assert said(cursor, VOCAB) == said(plain, VOCAB)


def test_a_deferred_token_that_completes_the_text_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.constraints.cursor.DEFER_S", -1.0)
    cursor = Compiler(TOKENIZER, VOCAB).cursor(Regex("ab"))
    row_of(cursor, VOCAB)
    for token in (A, B):
        assert cursor.commit(token)
    assert not cursor.finished
    cursor.settle()
    assert cursor.finished


@pytest.fixture
def consumed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All masks count as slow: the tokens that are consumed without holding Python's lock."""
    monkeypatch.setattr(cursor_module, "DEFER_S", -1.0)
    tokens: list[int] = []
    real = cursor_module._consume

    def counted(matcher: Any, tokenizer: Any, token: int) -> bool:
        tokens.append(token)
        return real(matcher, tokenizer, token)

    monkeypatch.setattr(cursor_module, "_consume", counted)
    return tokens


def test_drafts_of_a_slow_grammar_are_followed_without_holding_pythons_lock(consumed: list[int]) -> None:
    made, pattern = Compiler(TOKENIZER, VOCAB), Regex("[ac][bc]a?")
    cursor = made.cursor(pattern)
    row_of(cursor, VOCAB)
    fork = cursor.fork()
    assert not fork.advance(B)
    assert fork.advance(A)
    assert not fork.advance(A)  # no mask is known here
    assert fork.advance(B)
    assert consumed == [A, B]
    plain = made.cursor(pattern)
    assert said(cursor, VOCAB) == said(plain, VOCAB)
    assert plain.advance(A)
    assert plain.advance(B)
    assert said(fork, VOCAB) == said(plain, VOCAB)


def test_a_mask_that_the_matcher_knows_does_not_make_a_grammar_quick(
    monkeypatch: pytest.MonkeyPatch, consumed: list[int]
) -> None:
    cursor = Compiler(TOKENIZER, VOCAB).cursor(Regex("[ac][bc]"))
    row_of(cursor, VOCAB)
    monkeypatch.setattr(cursor_module, "DEFER_S", 1000.0)
    row_of(cursor, VOCAB)
    assert cursor.advance(A)
    assert consumed == [A]


def test_drafters_learn_nothing_of_a_slow_grammar(consumed: list[int]) -> None:
    """Their questions are answered in the engine's thread."""
    cursor = Compiler(TOKENIZER, VOCAB).cursor(Regex("[ac][bc]"))
    assert cursor.hints().advance(A)
    row_of(cursor, VOCAB)
    assert not cursor.hints().advance(A)
    assert not consumed


def test_a_grammar_that_has_grown_counts_as_larger() -> None:
    tables: Any = Compiler(TOKENIZER, VOCAB)._tables
    grammar = Grammar(lambda: compiler.compile_grammar("start: /a/", tables), tables, 100)
    grammar.took(0.0001)
    assert grammar.size == 100
    grammar.took(1.0)
    assert grammar.size > 50 << 20
