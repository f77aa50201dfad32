"""Real grammars in the engine: what goes wrong in one output ends no other, and only if it comes by."""

from collections.abc import Sequence

import pytest

from paceline.config import SamplingParams, SpecConfig
from paceline.constraints import Compiler, Constraint, Json, Regex, StructuralTag, compiler
from paceline.constraints.grammars import after
from paceline.drafters import model_free
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.errors import ConstraintError
from paceline.testing import ToyTarget
from paceline.text import Tokenizer
from paceline.types import Ask, Draft, Drafter, Round, Seq
from support.grammars import small_tokenizer

PLAIN = SpecConfig(("none",), max_draft=0)
A, B, X = (ord(letter) for letter in "abx")
HARD = "((x{1,30}){1,30}y){1,20}z"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Each byte is a token."""
    return small_tokenizer(merges=())


@pytest.fixture(scope="session")
def lettered() -> Tokenizer:
    """Nothing can be written but a, b and c."""
    return small_tokenizer("abc", merges=())


class Stubborn(Drafter):
    """Always guesses the same."""

    name = "stubborn"

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tuple(tokens)

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft(self._tokens[: ask.budget], None, (self.name,) * min(ask.budget, 6)) for ask in asks]


def run(
    tokenizer: Tokenizer,
    constraints: Sequence[Constraint | StructuralTag | None],
    spec: SpecConfig,
    likes: Sequence[int] = (),
    guess: Sequence[int] = (),
) -> tuple[list[list[int]], list[Round]]:
    """Outputs, and the last round of each."""
    made = Compiler(tokenizer, tokenizer.vocab_size)
    drafters: dict[str, Drafter] = {**model_free(), "stubborn": Stubborn(guess)}
    engine = Engine(ToyTarget(tokenizer.vocab_size), drafters, Fixed(), eos=tokenizer.eos_ids)
    bias = tuple((token, 20.0) for token in likes)
    seqs = []
    for i, constraint in enumerate(constraints):
        params = SamplingParams(temperature=1.0, seed=i, max_tokens=20, logit_bias=bias)
        cursor = None if constraint is None else made.cursor(constraint)
        seqs.append(Seq(f"s{i}", [1, 2], 2, params, spec, cursor=cursor))
        engine.submit(seqs[-1])
    rounds = []
    while engine.busy:
        rounds += engine.step()
    last = {r.request: r for r in rounds}
    return [seq.output for seq in seqs], [last[seq.id] for seq in seqs]


GUESSES = SpecConfig(("stubborn",), max_draft=6, adaptive=False)


def test_a_limit_that_only_a_draft_runs_into_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    monkeypatch.setitem(compiler.LIMITS, "step_lexer_fuel", 600)
    pattern = Regex(f"(a|b|{HARD})*")
    plain, ends = run(tokenizer, [pattern] * 3, PLAIN, [A, B])
    assert [end.finish for end in ends] == ["length"] * 3
    for guess in ([X] * 6, [A, X, X, X, X, X]):
        fast, ends = run(tokenizer, [pattern] * 3, GUESSES, [A, B], guess)
        assert fast == plain
        assert [end.finish for end in ends] == ["length"] * 3


def test_a_limit_that_an_output_runs_into_ends_it_with_an_error(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    """Not with an end that looks like any other, and no other output of the same grammar."""
    monkeypatch.setitem(compiler.LIMITS, "step_lexer_fuel", 600)
    hard, easy = Regex(HARD), Regex("a+|" + HARD)
    for spec in (PLAIN, GUESSES):
        outputs, ends = run(tokenizer, [easy, hard, None, easy, hard, easy, easy], spec, [A, X], [A] * 6)
        began = [chr(output[0]) for output in outputs]
        assert {"a", "x"} == {began[i] for i in (0, 3, 5, 6)}
        assert [end.finish == "error" for end in ends] == [
            i in (1, 4) or (i != 2 and began[i] == "x") for i in range(len(ends))
        ]
        for i in (1, 4):
            assert isinstance(ends[i].error, ConstraintError)
            assert "too many" in str(ends[i].error)
            assert not set(outputs[i]) & tokenizer.eos_ids


def test_a_dead_end_ends_one_output(lettered: Tokenizer) -> None:
    """No token of this vocabulary writes what must come."""
    outputs, ends = run(lettered, [Regex("abz"), Regex("abab"), None], PLAIN)
    assert [end.finish for end in ends] == ["error", "stop", "length"]
    assert "dead end" in str(ends[0].error) or "cannot be followed" in str(ends[0].error)
    assert outputs[1] == [lettered.encode(letter, special=False)[0] for letter in "abab"]
    fast, ends = run(lettered, [Regex("abz"), Regex("abab"), None], SpecConfig(("grammar",), adaptive=False))
    assert [end.finish for end in ends] == ["error", "stop", "length"]
    assert fast[1:] == outputs[1:]


def test_reasoning_ends_inside_a_draft(tokenizer: Tokenizer) -> None:
    thinking = after("</think>", Json.of({"type": "array", "items": {"const": 1}, "maxItems": 3}))
    guess = list(b"x</think>[1, 1]")
    biased = sorted(set(guess))
    plain, ends = run(tokenizer, [thinking] * 4, PLAIN, biased)
    for start in range(6):
        fast, _ = run(tokenizer, [thinking] * 4, GUESSES, biased, guess[start:])
        assert fast == plain
    assert all(end.error is None for end in ends)


def test_a_slow_grammar_that_ends_within_a_draft_ends_the_output(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    """Its tokens are consumed late, so that its end is not known when the next one is committed."""
    pattern = Regex("abab")
    plain, _ = run(tokenizer, [pattern] * 2, PLAIN, [A, B])
    monkeypatch.setattr("paceline.constraints.cursor.DEFER_S", -1.0)
    fast, ends = run(tokenizer, [pattern] * 2, GUESSES, [A, B], [A, B, A, B, A, B])
    assert fast == plain
    assert [end.finish for end in ends] == ["stop", "stop"]


class Idle(Fixed):
    """Allows drafts in every third pass."""

    passes = 0

    def plan(self, seqs: Sequence[Seq], rows: int, waiting: int = 0) -> list[int]:
        self.passes += 1
        return super().plan(seqs, rows, waiting) if self.passes % 3 == 0 else [0] * len(seqs)


def test_what_the_grammar_forces_is_drafted_only_in_passes_with_a_budget(tokenizer: Tokenizer) -> None:
    made, spec = Compiler(tokenizer, tokenizer.vocab_size), SpecConfig(("grammar",), max_draft=2)
    drafters: dict[str, Drafter] = dict(model_free())
    engine = Engine(ToyTarget(tokenizer.vocab_size), drafters, Idle(), eos=tokenizer.eos_ids)
    engine.submit(
        Seq("s", [1, 2], 2, SamplingParams(max_tokens=40), spec, cursor=made.cursor(Regex("(ab){16}")))
    )
    rounds: list[Round] = []
    while engine.busy:
        rounds += engine.step()
    drafted = [(bool(r.budget), bool(r.asked), len(r.draft) > 2) for r in rounds[:3]]
    assert drafted == [(False, False, False), (False, False, False), (True, True, True)]
