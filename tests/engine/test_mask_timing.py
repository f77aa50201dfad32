"""Whenever masks come, and whenever tokens are consumed, an output is that of plain decoding by itself."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from paceline.config import EngineConfig, SamplingParams, SpecConfig
from paceline.constraints import Compiler, Constraint, Json, Regex, StructuralTag
from paceline.constraints.cursor import Grammar, GrammarCursor, Source
from paceline.constraints.draft_masks import words
from paceline.drafters import model_free
from paceline.engine import masking
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.errors import CacheFull
from paceline.testing import ToyTarget
from paceline.text import StopChecker
from paceline.types import Cursor, Feed, Round, Scores, Seq
from support.grammars import small_tokenizer

TOKENIZER = small_tokenizer(merges=())  # each byte is a token
VOCAB = TOKENIZER.vocab_size
NEVER, ALWAYS = 1e9, -1.0  # a time that is never exceeded, and one that always is
PLAIN = SpecConfig(("none",), max_draft=0)
DRAFTS = SpecConfig(("grammar", "suffix"), max_draft=6, adaptive=False)
CONSTRAINTS: tuple[Constraint | StructuralTag, ...] = (
    Regex("abab"),
    Regex("(ab|ba)+c?"),
    Json.of({"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 4}),
    StructuralTag("a", Regex("a[bc]a"), again=True),
    StructuralTag("ab", Regex("aba*b")),
)


class SmallCache(ToyTarget):
    """Raises CacheFull for all but a few rows."""

    def __init__(self, room: int) -> None:
        super().__init__(VOCAB)
        self._room = room

    def forward(self, feeds: Sequence[Feed], taps: Sequence[int] = ()) -> Scores:
        new = sum(len(feed.tokens) + len(feed.draft) for feed in feeds)
        if sum(map(len, self._rows.values())) + new > self._room:
            raise CacheFull("no room")
        return super().forward(feeds, taps)


class Case:
    """A request: its number decides the constraint, the limits and the stop strings."""

    def __init__(self, number: int) -> None:
        self.constraint = CONSTRAINTS[number % len(CONSTRAINTS)]
        bias = tuple((token, 14.0) for token in b'<>c/ab[]", ')
        self.params = SamplingParams(
            temperature=1.0,
            seed=number,
            max_tokens=3 + number % 9,
            min_tokens=number % 4,
            stop=("b<", "ba") if number % 3 == 0 else (),
            logit_bias=bias,
            logprobs=2 if number % 2 else None,
        )

    def seq(self, name: str, compiler: Compiler, spec: SpecConfig) -> Seq:
        seq = Seq(name, [1, 2, 3], 3, self.params, spec, cursor=compiler.cursor(self.constraint))
        if self.params.stop:
            seq.stopped_by = StopChecker(TOKENIZER, self.params.stop, min_tokens=self.params.min_tokens)
        return seq


Result = tuple[Any, ...]


def results(cases: Sequence[Case], spec: SpecConfig, target: ToyTarget) -> list[Result]:
    """The output, the finish reason, the error and the log-probabilities of each."""
    compiler = Compiler(TOKENIZER, VOCAB)
    engine = Engine(target, model_free(), Fixed(), config=EngineConfig(), eos=TOKENIZER.eos_ids)
    seqs = [case.seq(f"s{i}", compiler, spec) for i, case in enumerate(cases)]
    for seq in seqs:
        engine.submit(seq)
    rounds: list[Round] = []
    while engine.busy:
        rounds += engine.step()
    return [_result(seq, [r for r in rounds if r.request == seq.id]) for seq in seqs]


def _result(seq: Seq, rounds: Sequence[Round]) -> Result:
    tokens = [token for r in rounds for token in r.tokens]
    assert tokens == seq.output
    logprobs = [logprob for r in rounds for logprob in r.logprobs]
    return tokens, [r.finish for r in rounds if r.finish], str(rounds[-1].error), logprobs


CASES = [Case(number) for number in range(45)]


@pytest.fixture(scope="module")
def expected() -> list[Result]:
    """Each alone, decoded plainly, with nothing late."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masking, "LATE_S", NEVER)
        patch.setattr("paceline.constraints.cursor.DEFER_S", NEVER)
        alone = [results([case], PLAIN, ToyTarget(VOCAB))[0] for case in CASES]
    assert {finish for _, (finish,), *_ in alone} == {"stop", "length"}
    return alone


@pytest.mark.parametrize("room", [60, 10**6], ids=["preempted", "together"])
@pytest.mark.parametrize("spec", [PLAIN, DRAFTS], ids=["plain", "drafts"])
@pytest.mark.parametrize("quick", [NEVER, ALWAYS])
@pytest.mark.parametrize("defer", [NEVER, ALWAYS])
@pytest.mark.parametrize("late", [NEVER, ALWAYS])
def test_no_timing_shows_in_an_output(
    monkeypatch: pytest.MonkeyPatch,
    expected: list[Result],
    late: float,
    defer: float,
    quick: float,
    spec: SpecConfig,
    room: int,
) -> None:
    monkeypatch.setattr(masking, "LATE_S", late)
    monkeypatch.setattr(masking, "QUICK_S", quick)
    monkeypatch.setattr("paceline.constraints.cursor.DEFER_S", defer)
    assert results(CASES, spec, SmallCache(room)) == expected


@pytest.mark.parametrize("defer", [NEVER, ALWAYS])
@pytest.mark.parametrize("max_tokens", [3, 4, 5])
def test_a_grammar_that_ends_with_the_last_token_ends_the_output(
    monkeypatch: pytest.MonkeyPatch, defer: float, max_tokens: int
) -> None:
    monkeypatch.setattr("paceline.constraints.cursor.DEFER_S", defer)
    for spec in (PLAIN, DRAFTS):
        case, target = Case(0), ToyTarget(VOCAB)
        case.params = SamplingParams(max_tokens=max_tokens)
        [(tokens, finish, *_)] = results([case], spec, target)
        assert bytes(tokens) == b"abab"[:max_tokens]
        assert finish == ["length" if max_tokens < 4 else "stop"]


def test_slow_tokens_are_never_consumed_in_the_engines_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.constraints.cursor.DEFER_S", ALWAYS)
    settle, threads = GrammarCursor.settle, set()

    def watched(cursor: GrammarCursor) -> None:
        threads.add(threading.current_thread())
        settle(cursor)

    monkeypatch.setattr(GrammarCursor, "settle", watched)
    results(CASES[:10], DRAFTS, ToyTarget(VOCAB))
    assert threads
    assert threading.current_thread() not in threads


def test_hints_after_deferred_tokens_make_nobody_compile_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_one, compiled = Grammar.compile, []

    def counted(grammar: Grammar) -> Source:
        compiled.append(grammar)
        return compile_one(grammar)

    monkeypatch.setattr(Grammar, "compile", counted)
    monkeypatch.setattr("paceline.constraints.cursor.DEFER_S", ALWAYS)
    results([Case(1)] * 3, DRAFTS, ToyTarget(VOCAB))
    assert len(compiled) == 1


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_choices_of_a_request_can_be_masked_in_two_threads(constraint: Constraint | StructuralTag) -> None:
    """Raises "Already borrowed" where the two share a matcher."""
    cursor = Compiler(TOKENIZER, VOCAB).cursor(constraint)
    failed: list[BaseException] = []

    def fill(cursor: Cursor) -> None:
        try:
            for _ in range(2000):
                cursor.fill(np.zeros(words(VOCAB), np.uint32))
        except BaseException as problem:
            failed.append(problem)

    threads = [threading.Thread(target=fill, args=(one,)) for one in (cursor, cursor.clone())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize("late", [NEVER, ALWAYS])
@pytest.mark.parametrize("defer", [NEVER, ALWAYS])
@pytest.mark.parametrize(("room", "finish"), [(5, "error"), (6, "stop")])
def test_an_output_that_has_ended_needs_no_further_room(
    monkeypatch: pytest.MonkeyPatch, late: float, defer: float, room: int, finish: str
) -> None:
    monkeypatch.setattr(masking, "LATE_S", late)
    monkeypatch.setattr("paceline.constraints.cursor.DEFER_S", defer)
    case = Case(0)
    case.params = SamplingParams(max_tokens=9)
    for spec in (PLAIN, DRAFTS):
        [(tokens, finishes, *_)] = results([case], spec, SmallCache(room))
        assert bytes(tokens) == b"abab"[: room - 2]
        assert finishes == [finish]
