"""Prefixes that come from slower memory in pieces: nobody waits for them, and no text changes."""

from collections.abc import Sequence
from math import inf

from paceline.config import EngineConfig, SamplingParams, SpecConfig
from paceline.drafters import model_free
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.testing import ToyTarget
from paceline.types import Ask, Draft, Drafter, Round, Seq

PIECE = 10  # tokens


class StoredTarget(ToyTarget):
    """Has the first tokens of some prompts in slow memory: a piece costs 1 ms, by the timer it is given."""

    def __init__(self, stored: dict[str, int], broken_after: int = 10**6) -> None:
        super().__init__()
        self.stored, self.broken_after = stored, broken_after
        self.now_ns = 0
        self.calls: list[tuple[str, float]] = []

    def restore(self, seq_id: str, seconds: float) -> tuple[int, bool]:
        self.calls.append((seq_id, seconds))
        seq, rows = self._seqs[seq_id], self._rows[seq_id]
        goal = min(self.stored.get(seq_id, 0), self.broken_after)
        spent = 0.0
        while len(rows) < goal:
            rows.extend(seq.tokens[len(rows) : min(goal, len(rows) + PIECE)])
            self.now_ns += 1_000_000
            spent += 0.001
            if spent >= seconds:
                break
        return len(rows), len(rows) < goal


class Noting(Drafter):
    name = "noting"

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.ended: list[str] = []

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft() for _ in asks]

    def begin(self, seq: Seq) -> None:
        self.begun.append((seq.id, seq.computed))

    def end(self, seq: Seq) -> None:
        self.ended.append(seq.id)


def a_seq(name: str, prompt: int = 100, max_tokens: int = 6) -> Seq:
    tokens = [len(name) + i % 7 for i in range(prompt)]
    params = SamplingParams(max_tokens=max_tokens, seed=1)
    return Seq(name, tokens, prompt, params, SpecConfig(("noting",)))


def an_engine(target: ToyTarget, drafter: Noting) -> Engine:
    timer = (lambda: target.now_ns) if isinstance(target, StoredTarget) else (lambda: 0)
    settings = EngineConfig(prefill_beside_ms=3)
    return Engine(target, {**model_free(), "noting": drafter}, Fixed(), config=settings, timer=timer)


def run(engine: Engine, seqs: Sequence[Seq]) -> list[Round]:
    for seq in seqs:
        engine.submit(seq)
    rounds = []
    while engine.busy:
        rounds += engine.step()
    return rounds


def test_alone_it_is_loaded_at_once_and_drafters_learn_of_it_then() -> None:
    target, drafter, seq = StoredTarget({"a": 93}), Noting(), a_seq("a")
    plain = a_seq("a")
    run(an_engine(ToyTarget(), Noting()), [plain])
    run(an_engine(target, drafter), [seq])
    assert seq.tokens == plain.tokens
    assert target.calls == [("a", inf)]
    assert drafter.begun == [("a", 93)]
    assert drafter.ended == ["a"]
    assert (seq.cached, seq.cached_on_disk) == (93, 93)


def test_beside_others_it_comes_in_pieces_and_they_go_on() -> None:
    target, drafter = StoredTarget({"late": 90}), Noting()
    engine = an_engine(target, drafter)
    early, late = a_seq("early", 5, max_tokens=30), a_seq("late")
    engine.submit(early)
    engine.step()
    engine.submit(late)
    for passes in range(1, 4):
        before = len(early.tokens)
        engine.step()
        assert len(early.tokens) == before + 1
        assert len(target._rows["late"]) >= 30 * passes
    run(engine, [])
    assert [seconds for name, seconds in target.calls if name == "late"] == [0.003] * 3
    assert (late.cached, late.cached_on_disk) == (90, 90)
    alone = a_seq("late")
    run(an_engine(ToyTarget(), Noting()), [alone])
    assert late.tokens == alone.tokens


def test_several_share_the_time_of_a_pass_and_who_has_nothing_stored_does_not_wait() -> None:
    target, drafter = StoredTarget({"b": 90, "c": 90}), Noting()
    engine = an_engine(target, drafter)
    seqs = [a_seq("a", 5, max_tokens=30), a_seq("b"), a_seq("c"), a_seq("d", 5)]
    for seq in seqs:
        engine.submit(seq)
    engine.step()
    assert [name for name, _ in drafter.begun] == ["a", "d"]
    assert [len(target._rows[name]) for name in "bc"] == [30, 10]
    run(engine, [])
    assert dict(drafter.begun) == {"a": 0, "b": 90, "c": 90, "d": 0}


def test_what_turns_out_to_be_damaged_is_computed() -> None:
    target, drafter, seq = StoredTarget({"a": 93}, broken_after=40), Noting(), a_seq("a")
    run(an_engine(target, drafter), [seq])
    plain = a_seq("a")
    run(an_engine(ToyTarget(), Noting()), [plain])
    assert seq.tokens == plain.tokens
    assert (seq.cached, seq.cached_on_disk) == (40, 40)


def test_one_that_is_cancelled_while_it_is_loaded_was_never_begun() -> None:
    target, drafter = StoredTarget({"late": 90}), Noting()
    engine = an_engine(target, drafter)
    engine.submit(a_seq("early", 5, max_tokens=30))
    engine.step()
    engine.submit(a_seq("late"))
    engine.step()
    engine.replace_drafter(drafter)  # which begins those that run
    late = next(seq for seq in engine._scheduler.running() if seq.id == "late")
    assert late.cached_on_disk == 30
    engine.cancel("late")
    assert late.cached_on_disk == late.cached == 0
    run(engine, [])
    assert [name for name, _ in drafter.begun] == ["early", "early"]
    assert drafter.ended == ["early"]
    assert not target._rows


def test_hits_of_the_disk_are_never_more_than_all_hits() -> None:
    """Also of one that is preempted while it is loaded, and finds it all in memory later."""
    target, drafter = StoredTarget({"late": 90}), Noting()
    engine, late = an_engine(target, drafter), a_seq("late")
    engine.submit(a_seq("early", 5, max_tokens=30))
    engine.step()
    engine.submit(late)
    engine.step()
    assert engine._preempt() is late
    run(engine, [])
    assert late.cached_on_disk <= late.cached
    assert sorted(drafter.ended) == ["early", "late"]
