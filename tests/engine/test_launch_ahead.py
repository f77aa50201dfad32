"""Passes that run beside the host: the next one is launched before the rounds of the last are reported."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import EngineConfig, SamplingParams, SpecConfig
from paceline.drafters import model_free
from paceline.engine import engine as engine_module
from paceline.engine.control import Fixed, Rate
from paceline.engine.engine import Engine
from paceline.errors import CacheFull, ModelError, ShuttingDown, TimedOut
from paceline.testing import ToyCursor, ToyTarget
from paceline.types import Ask, Controller, Draft, Drafter, Feed, Finish, Round, Scores, Seq

PLAIN = SpecConfig((), max_draft=0)


class RunningTarget(ToyTarget):
    """Its passes run beside the host."""

    fails_at = -1
    room = 10**6  # rows that fit into the cache

    def forward(self, feeds: Sequence[Feed], taps: Sequence[int] = ()) -> Scores:
        rows = {seq_id: len(rows) for seq_id, rows in self._rows.items()}
        if sum(rows.values()) + sum(len(feed.tokens) + len(feed.draft) for feed in feeds) > self.room:
            raise CacheFull("full")
        if self.passes == self.fails_at:
            raise ModelError("the device is gone")
        return replace(super().forward(feeds, taps), running=True)


class Heard:
    """Every round that a sink receives, and the ends."""

    def __init__(self) -> None:
        self.events: list[Round | tuple[str, Finish]] = []

    def round(self, r: Round) -> None:
        self.events.append(r)

    def finish(self, seq: Seq, reason: Finish) -> None:
        self.events.append((seq.id, reason))


def a_seq(name: str, max_tokens: int = 9, spec: SpecConfig | None = None, prompt: int = 3) -> Seq:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=len(name) + prompt)
    return Seq(name, [1 + i % 5 for i in range(prompt)], prompt, params, spec or SpecConfig(max_draft=4))


def engine(target: ToyTarget, *sinks: Heard, max_batch: int = 16) -> Engine:
    config = EngineConfig(max_batch=max_batch, prefill_chunk=8)
    return Engine(target, model_free(), Fixed(), sinks, config)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is."""
    monkeypatch.setattr(engine_module, "MAX_AWAY_NS", 10**18)


def plain_text(seq: Seq) -> list[int]:
    e, alone = engine(ToyTarget()), replace(seq, tokens=list(seq.tokens), spec=PLAIN)
    e.submit(alone)
    while e.busy:
        e.step()
    return alone.output


actions = st.lists(
    st.tuples(st.integers(0, 6), st.sampled_from(["submit", "submit", "cancel"]), st.integers(1, 20)),
    min_size=1,
    max_size=8,
)


@given(actions, st.integers(1, 4))
def test_texts_and_reports_are_those_of_plain_decoding(
    script: list[tuple[int, str, int]], max_batch: int
) -> None:
    """Whatever arrives and is cancelled while a pass is on its way."""
    target, heard = RunningTarget(), Heard()
    e, cancelled = engine(target, heard, max_batch=max_batch), set()
    seqs: list[Seq] = []
    returned: list[Round] = []
    for steps, action, size in script:
        if action == "submit":
            seqs.append(a_seq(f"s{len(seqs)}", size, prompt=2 + size))
            e.submit(seqs[-1])
        elif seqs:
            name = seqs[size % len(seqs)].id
            cancelled.add(name)
            e.cancel(name)
        for _ in range(steps * e.busy):
            returned += e.step()
    while e.busy:
        returned += e.step()
    for seq in seqs:
        whole = plain_text(replace(seq, tokens=seq.tokens[: seq.prompt_len]))
        assert seq.output == (whole[: len(seq.output)] if seq.id in cancelled else whole)
        of_seq = [event for event in heard.events if isinstance(event, Round) and event.request == seq.id]
        assert of_seq == [r for r in returned if r.request == seq.id]
        assert [token for r in of_seq for token in r.tokens] == seq.output
        ends = [i for i, event in enumerate(heard.events) if isinstance(event, tuple) and event[0] == seq.id]
        assert len(ends) == 1
        assert all(heard.events.index(r) < ends[0] for r in of_seq)
    assert not target._rows


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.9, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"temperature": 0.9, "stop_tokens": (3, 5)},
        {"temperature": 0.9, "logit_bias": ((4, 2.0), (4, 1.0)), "logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 1.2},
    ],
)
def test_penalties_ends_and_logprobs_are_those_of_plain_decoding(params: dict[str, Any]) -> None:
    """Two together, of which one is stopped by its caller: text and scores of each are its own."""

    def texts(
        target: ToyTarget, spec: SpecConfig, controller: Controller | None = None
    ) -> list[tuple[list[int], list[object]]]:
        e = Engine(target, model_free(), controller or Fixed())
        a, b = (a_seq(name, 24, spec, prompt=4 + len(name)) for name in ("a", "bb"))
        b.stopped_by = lambda token: len(b.output) == 11
        for seq in (a, b):
            seq.params = replace(seq.params, **params)
            e.submit(seq)
        rounds: list[Round] = []
        while e.busy:
            rounds += e.step()
        return [
            (seq.output, [scored for r in rounds if r.request == seq.id for scored in r.logprobs])
            for seq in (a, b)
        ]

    plain = texts(ToyTarget(), PLAIN)
    assert texts(RunningTarget(), SpecConfig(max_draft=4)) == plain
    assert texts(RunningTarget(), SpecConfig(max_draft=4), Rate()) == plain
    assert texts(RunningTarget(), PLAIN) == plain
    assert all(len(scored) == (len(text) if "logprobs" in params else 0) for text, scored in plain)


def test_the_next_pass_is_on_its_way_when_a_step_returns() -> None:
    target = RunningTarget()
    e = engine(target)
    e.submit(a_seq("a", 4, PLAIN))
    passes = []
    while e.busy:
        e.step()
        passes.append(target.passes)
    assert passes == [2, 3, 4, 4]


def test_a_target_that_blocks_runs_one_pass_for_each_step() -> None:
    target = ToyTarget()
    e = engine(target)
    e.submit(a_seq("a", 4, PLAIN))
    e.step()
    assert target.passes == 1


def test_nothing_is_launched_ahead_of_an_arrival_or_for_a_slow_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = RunningTarget()
    e = engine(target, max_batch=1)
    e.submit(a_seq("a", 4, PLAIN))
    e.submit(a_seq("b", 4, PLAIN))
    e.step()
    assert target.passes == 1  # b waits
    e.cancel("b")
    monkeypatch.setattr(engine_module, "MAX_AWAY_NS", -1)
    e.step()
    assert target.passes == 2


def test_nothing_is_launched_ahead_where_masks_decide() -> None:
    target, cursor = RunningTarget(), ToyCursor(lambda tokens: {1, 2} if len(tokens) < 4 else set())
    e = engine(target)
    e.submit(replace(a_seq("a", 9, PLAIN), cursor=cursor))
    e.step()
    assert target.passes == 1
    e = engine(target := RunningTarget())
    seq = a_seq("a", 9, PLAIN)
    e.submit(replace(seq, params=replace(seq.params, min_tokens=3, stop_tokens=(7,))))
    e.step()
    assert target.passes == 1


def test_the_rounds_before_a_failed_pass_are_not_lost() -> None:
    target = RunningTarget()
    target.fails_at = 2
    e, seq = engine(target), a_seq("a", 9, PLAIN)
    e.submit(seq)
    assert sum(len(r.tokens) for _ in range(2) for r in e.step()) == 2 == len(seq.output)
    with pytest.raises(ModelError):
        e.step()
    target.fails_at = -1
    assert [r.finish for r in e.give_up(ShuttingDown())] == ["error"]
    assert not target._rows


def test_rows_of_a_pass_are_dropped_with_its_sequences() -> None:
    target = RunningTarget()
    e, seq = engine(target), a_seq("a", 9, PLAIN)
    e.submit(seq)
    e.step()
    e.give_up(ShuttingDown())
    again = a_seq("b", 3, PLAIN)
    e.submit(again)
    while e.busy:
        assert all(r.request == "b" for r in e.step())
    assert again.output == plain_text(a_seq("b", 3, PLAIN))


def test_the_time_of_a_caller_is_not_that_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes a microsecond, the caller a second."""
    now = [0]

    def clock() -> int:
        now[0] += 1000
        return now[0]

    e = engine(RunningTarget())
    monkeypatch.setattr(e, "_timer", clock)
    e.submit(a_seq("a", 6, PLAIN))
    times = []
    while e.busy:
        times += [r.target_us for r in e.step()]
        now[0] += 10**9
    assert max(times[1:]) < 20


class Greedy(Drafter):
    """Drafts as much as it may."""

    name = "greedy"

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft((1,) * ask.budget) for ask in asks]


def test_a_draft_planned_ahead_ends_where_the_output_does() -> None:
    e = Engine(RunningTarget(), {"greedy": Greedy()}, Fixed())
    seq = a_seq("a", 9, SpecConfig(("greedy",), max_draft=6))
    e.submit(seq)
    rounds = []
    while e.busy:
        rounds += e.step()
    assert len(rounds) > 2
    assert all(r.start + len(r.draft) < seq.prompt_len + 9 for r in rounds)


@pytest.mark.parametrize("names", [("a",), ("a", "bb", "ccc")])
def test_a_cache_that_is_full_ahead_is_found_full_after_the_rounds_before(names: tuple[str, ...]) -> None:
    """Whoever steps while the engine is busy gets every end, and sinks get it last."""
    target, heard = RunningTarget(), Heard()
    target.room = 12
    e = engine(target, heard)
    seqs = {name: a_seq(name, 6 if len(names) > 1 else 20) for name in names}
    for seq in seqs.values():
        e.submit(seq)
    returned: list[Round] = []
    while e.busy:
        returned += e.step()
    assert [event for event in heard.events if isinstance(event, Round)] == returned
    for name, seq in seqs.items():
        of_seq = [r for r in returned if r.request == name]
        assert [r.finish for r in of_seq if r.finish] == ["length" if len(names) > 1 else "error"]
        assert of_seq[-1].finish
        assert heard.events.index(of_seq[-1]) < heard.events.index((name, of_seq[-1].finish))
        assert seq.output == plain_text(a_seq(name, len(seq.output)))
    if len(names) > 1:
        assert any(seq.preemptions for seq in seqs.values())
    assert not target._rows


def test_the_failure_of_a_pass_that_nobody_is_in_any_more_is_nobodys() -> None:
    target = RunningTarget()
    target.fails_at = 1
    e = engine(target)
    e.submit(a_seq("a", 9, PLAIN))
    e.step()
    e.cancel("a")
    target.fails_at = -1
    e.submit(again := a_seq("b", 3, PLAIN))
    while e.busy:
        e.step()
    assert again.output == plain_text(a_seq("b", 3, PLAIN))


def test_the_time_of_a_request_is_up_though_passes_follow_one_another() -> None:
    now = [0.0]
    e = Engine(RunningTarget(), model_free(), Fixed(), clock=lambda: now[0])
    seq = replace(a_seq("a", 900, PLAIN), deadline=5.0)
    e.submit(seq)
    rounds: list[Round] = []
    while e.busy:
        rounds += e.step()
        now[0] += 1.0
    assert isinstance(rounds[-1].error, TimedOut)
    assert len(seq.output) <= 7  # one pass was on its way


def test_a_sink_hears_of_no_round_before_it_listens() -> None:
    e, heard = engine(RunningTarget()), Heard()
    e.submit(a_seq("a", 9, PLAIN))
    e.step()
    e.listen(heard)
    later = e.step() + e.step()
    while e.busy:
        later += e.step()
    assert [event for event in heard.events if isinstance(event, Round)] == later


class Noted(Fixed):
    """What it learns and forgets, in order."""

    def __init__(self) -> None:
        self.events: list[Round | str] = []

    def learn(self, rounds: Sequence[Round]) -> None:
        self.events += rounds

    def forget(self, drafter: str) -> None:
        self.events.append(drafter)


def test_a_drafter_is_forgotten_after_its_last_rounds_are_learned() -> None:
    """Those of the pass on its way are verified all the same: its drafts are the old drafter's."""
    noted = Noted()
    e = Engine(RunningTarget(), {"greedy": Greedy()}, noted)
    seq = a_seq("a", 12, SpecConfig(("greedy",), max_draft=3))
    e.submit(seq)
    before = e.step() + e.step()
    e.replace_drafter(Greedy())
    assert noted.events == [*before, "greedy"]
    while e.busy:
        e.step()
    assert seq.output == plain_text(a_seq("a", 12))


class Prepared(Drafter):
    """Notes what it is told and asked, in order."""

    name = "prepared"

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.passes = 0  # that have run beside it

    def prepare(self, seq: Seq) -> None:
        self.calls.append(("prepare", len(seq.tokens)))

    def idle(self) -> None:
        self.passes += 1

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        self.calls += [("draft", len(ask.seq.tokens)) for ask in asks]
        return [Draft(()) for _ in asks]


def test_drafters_prepare_for_a_prompt_while_it_is_read() -> None:
    """Where a pass does not run beside the host, that would only delay the first token."""
    for target, prepared in ((RunningTarget(), True), (ToyTarget(), False)):
        drafter = Prepared()
        e = Engine(target, {"prepared": drafter}, Fixed(), config=EngineConfig(prefill_chunk=8))
        e.submit(a_seq("s", 3, SpecConfig(("prepared",)), prompt=20))
        while e.busy:
            e.step()
        assert (("prepare", 20) in drafter.calls) == prepared
        assert all(length == 20 for call, length in drafter.calls if call == "prepare")
        assert drafter.calls[0] == ("prepare" if prepared else "draft", 20)
        assert drafter.passes == (target.passes if prepared else 0)
