"""A sequence whose masks are slow waits for them alone; its text is the same, and nothing else is delayed."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from paceline.config import EngineConfig, SamplingParams, SpecConfig
from paceline.constraints.draft_masks import Masks, masks
from paceline.drafters import model_free
from paceline.engine import engine as engine_module
from paceline.engine import masking
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.errors import ConstraintError
from paceline.testing import ToyCursor, ToyTarget
from paceline.types import Ask, Bits, Draft, Drafter, Round, Seq

VOCAB = 40
GUESSES = SpecConfig(("allowed",), max_draft=4, adaptive=False)


def pattern(output: tuple[int, ...]) -> set[int]:
    """Some tokens, which depend on the output so far."""
    return {(3 * len(output) + i) % VOCAB for i in range(5)}


class Allowed(Drafter):
    """Drafts tokens that the pattern allows."""

    name = "allowed"

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._draft(len(ask.seq.tokens) - ask.seq.prompt_len, ask.budget) for ask in asks]

    def _draft(self, written: int, budget: int) -> Draft:
        tokens = tuple(3 * (written + i) % VOCAB for i in range(budget))
        return Draft(tokens, None, (self.name,) * budget)


class SlowCursor(ToyCursor):
    """Calls a function before each mask, with the output so far."""

    def __init__(self, before: Callable[[tuple[int, ...]], Any]) -> None:
        super().__init__(pattern)
        self._before = before

    def fill(self, row: Bits) -> bool:
        self._before(self.tokens)
        return super().fill(row)


def an_engine(**settings: float) -> Engine:
    drafters: dict[str, Drafter] = {**model_free(), "allowed": Allowed()}
    return Engine(ToyTarget(VOCAB), drafters, Fixed(), config=EngineConfig(**settings))  # type: ignore[arg-type]


def a_seq(name: str, cursor: ToyCursor | None, max_tokens: int = 12, spec: SpecConfig = GUESSES) -> Seq:
    return Seq(
        name,
        [1, 2, 3],
        3,
        SamplingParams(seed=7, temperature=1.0, max_tokens=max_tokens),
        spec,
        cursor=cursor,
    )


def run(engine: Engine) -> list[Round]:
    rounds = []
    while engine.busy:
        rounds += engine.step()
    return rounds


def expected_output() -> list[int]:
    engine, seq = an_engine(), a_seq("plain", ToyCursor(pattern), spec=SpecConfig(("none",), max_draft=0))
    engine.submit(seq)
    run(engine)
    return seq.output


def test_others_go_on_while_a_mask_is_computed() -> None:
    """The mask waits for the other sequence to end: an engine that waited for the mask would never end."""
    other_ended = threading.Event()
    engine = an_engine()
    slow = a_seq("slow", SlowCursor(lambda _: other_ended.wait(60) or pytest.fail("the engine waits")))
    other = a_seq("other", None, 30)
    engine.submit(slow)
    engine.submit(other)
    rounds = []
    while engine.busy:
        rounds += engine.step()
        if any(r.request == "other" and r.finish for r in rounds):
            other_ended.set()
    assert {r.request: r.finish for r in rounds if r.finish} == {"slow": "length", "other": "length"}
    assert slow.output == expected_output()


def test_other_constrained_sequences_go_on_too() -> None:
    other_ended = threading.Event()
    engine = an_engine()
    slow = a_seq("slow", SlowCursor(lambda _: other_ended.wait(60) or pytest.fail("the engine waits")))
    other = a_seq("other", ToyCursor(pattern))
    engine.submit(slow)
    engine.submit(other)
    rounds = []
    while engine.busy:
        rounds += engine.step()
        if any(r.request == "other" and r.finish for r in rounds):
            other_ended.set()
    assert slow.output == other.output == expected_output()


class TogetherCursor(ToyCursor):
    """Has its masks computed with those of others."""

    def __init__(self) -> None:
        super().__init__(pattern)

    def matcher_copy(self) -> Any:
        return self.fork()


def filled(asked: Sequence[tuple[ToyCursor, Sequence[int]]], width: int) -> list[Masks | None]:
    return [masks(cursor, Draft(tuple(tokens)), width) for cursor, tokens in asked]


def test_masks_of_a_pass_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is left to its cursor changes nothing for the others."""
    sizes = list[int]()

    def some_filled(asked: Sequence[tuple[ToyCursor, Sequence[int]]], width: int) -> list[Masks | None]:
        sizes.append(len(asked))
        return [None, *filled(asked, width)[1:]]

    monkeypatch.setattr(engine_module, "fill_batch", some_filled)
    count = engine_module.MANY_MASKS
    engine, seqs = an_engine(), [a_seq(f"{i}", TogetherCursor()) for i in range(count)]
    seqs.append(a_seq("alone", ToyCursor(pattern)))
    for seq in seqs:
        engine.submit(seq)
    run(engine)
    assert all(seq.output == expected_output() for seq in seqs)
    assert sizes
    assert set(sizes) == {count}


def test_few_masks_are_computed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "fill_batch", lambda asked, width: pytest.fail("together"))
    engine, seqs = an_engine(), [a_seq(f"{i}", TogetherCursor()) for i in range(engine_module.MANY_MASKS - 1)]
    for seq in seqs:
        engine.submit(seq)
    run(engine)
    assert all(seq.output == expected_output() for seq in seqs)


def test_a_mask_that_is_slow_among_others_delays_only_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those with it are computed by themselves, and so are all until it has ended."""
    monkeypatch.setattr(masking, "LATE_S", 0.002)
    monkeypatch.setattr(engine_module, "MANY_MASKS", 1)
    ended, calls = threading.Event(), list[int]()

    def slow_filled(asked: Sequence[tuple[ToyCursor, Sequence[int]]], width: int) -> list[Masks | None]:
        calls.append(len(asked))
        ended.wait(60)
        return filled(asked, width)

    monkeypatch.setattr(engine_module, "fill_batch", slow_filled)
    engine, seqs = an_engine(), [a_seq(f"{i}", TogetherCursor()) for i in range(3)]
    for seq in seqs:
        engine.submit(seq)
    run(engine)
    batch = engine._masking._batch
    assert batch.running
    ended.set()
    assert all(seq.output == expected_output() for seq in seqs)
    assert calls == [3]
    deadline = time.monotonic() + 10
    while any(future._state != "CANCELLED_AND_NOTIFIED" for future in batch.futures):
        assert time.monotonic() < deadline, "the late ones have not seen that nobody waits for them"
        time.sleep(0.001)
    assert not caplog.records


def test_masks_that_fail_together_are_computed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(asked: Sequence[object], width: int) -> list[Masks | None]:
        raise ValueError("broken")

    monkeypatch.setattr(engine_module, "fill_batch", fails)
    engine, seq = an_engine(), a_seq("one", TogetherCursor())
    engine.submit(seq)
    run(engine)
    assert seq.output == expected_output()


@pytest.mark.parametrize("late_after", [0, 1, 3, 7])
def test_a_late_mask_changes_no_text(monkeypatch: pytest.MonkeyPatch, late_after: int) -> None:
    monkeypatch.setattr(masking, "LATE_S", 0.002)
    slow = a_seq("slow", SlowCursor(lambda output: time.sleep(0.02 if len(output) >= late_after else 0)))
    engine = an_engine()
    engine.submit(slow)
    run(engine)
    assert slow.output == expected_output()


def test_drafts_come_back_once_masks_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "LATE_S", 0.02)
    engine, late = an_engine(), threading.Event()

    def hold(output: tuple[int, ...]) -> None:
        assert len(output) != 1 or late.wait(60), "the engine waits"

    engine.submit(a_seq("slow", SlowCursor(hold), 200))
    was_slow = []
    while engine.busy:
        engine.step()
        was_slow.append(engine._masking.slow("slow"))
        if was_slow[-1]:
            late.set()
    assert False in was_slow[was_slow.index(True) : -1]  # the last step ended the output, and forgot it


def test_an_output_whose_masks_take_too_long_in_all_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(masking, "LATE_S", 0.001)
    engine, other = an_engine(max_grammar_s=0.01), a_seq("other", None, 5)

    def spin(_: tuple[int, ...]) -> None:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass

    engine.submit(a_seq("slow", SlowCursor(spin), 100))
    engine.submit(other)
    ends = {r.request: r for r in run(engine) if r.finish}
    assert ends["other"].finish == "length"
    assert ends["slow"].finish == "error"
    assert isinstance(ends["slow"].error, ConstraintError)
    assert "max_grammar_s" in str(ends["slow"].error)


def test_a_mask_that_fails_in_any_way_ends_its_own_output(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """As a panic of a native library."""

    def fail(_: tuple[int, ...]) -> None:
        raise Panic

    engine, other = an_engine(), a_seq("other", None, 5)
    engine.submit(a_seq("broken", SlowCursor(fail)))
    engine.submit(other)
    ends = {r.request: r.finish for r in run(engine) if r.finish}
    assert ends == {"broken": "error", "other": "length"}


def test_a_held_sequence_can_be_cancelled() -> None:
    cancelled = threading.Event()
    engine = an_engine()
    engine.submit(a_seq("slow", SlowCursor(lambda _: cancelled.wait(60) and None)))
    while not engine._masking.held("slow"):
        engine.step()
    engine.cancel("slow")
    cancelled.set()
    assert not engine.busy
    assert not engine._masking._late
    assert not engine._masking._slow


def test_an_idle_engine_waits_for_masks_that_are_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is ready may be of a preempted sequence: waiting for it would never end."""
    waiting, ended, waited = masking.Masking(10.0), threading.Event(), list[int]()
    waiting.ahead("preempted", lambda late: Masks([None]))
    waiting.ahead("held", lambda late: Masks([None]) if ended.wait(60) else Masks([]))
    while waiting.held("preempted"):
        time.sleep(0.001)
    monkeypatch.setattr(masking, "wait", lambda futures, *_: waited.append(len(futures)))
    waiting.wait()
    assert waited == [1]
    ended.set()
