import inspect
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch

from paceline.config import EngineConfig, SamplingParams, SpecConfig
from paceline.drafters import model_free
from paceline.drafters.draft_model import ModelDrafter
from paceline.drafters.ngram import Ngram
from paceline.engine import drafting
from paceline.engine.control import Fixed, Rate
from paceline.engine.engine import Engine
from paceline.errors import Busy, CacheFull, PromptTooLong, UsageError
from paceline.testing import ToyTarget
from paceline.types import Ask, Draft, Drafter, Feed, Finish, Round, Scores, Seq


class Heard:
    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self.ends: list[tuple[str, Finish]] = []

    def round(self, r: Round) -> None:
        self.rounds.append(r)

    def finish(self, seq: Seq, reason: Finish) -> None:
        self.ends.append((seq.id, reason))


def engine(target: ToyTarget | None = None, **options: object) -> Engine:
    return Engine(target or ToyTarget(), model_free(), Fixed(), **options)  # type: ignore[arg-type]


def a_seq(name: str = "a", prompt: int = 3, spec: SpecConfig | None = None, max_tokens: int = 10) -> Seq:
    return Seq(name, [1] * prompt, prompt, SamplingParams(max_tokens=max_tokens), spec or SpecConfig())


def test_step_fits_on_one_screen() -> None:
    assert len(inspect.getsource(Engine.step).splitlines()) <= 40


def test_prompt_that_does_not_fit_is_refused() -> None:
    target = ToyTarget()
    target.max_context = 8
    with pytest.raises(PromptTooLong, match=r"8 tokens.*holds 8"):
        engine(target).submit(a_seq(prompt=8))


def test_output_ends_where_the_context_does() -> None:
    target = ToyTarget()
    target.max_context = 8
    e = engine(target)
    seq = a_seq(prompt=3, max_tokens=100)
    e.submit(seq)
    while e.busy:
        last = e.step()
    assert len(seq.tokens) == 8
    assert last[0].finish == "length"


def test_unknown_drafter_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(UsageError, match=r"'sufix'.*ngram.*suffix"):
        engine().submit(a_seq(spec=SpecConfig(("sufix",))))


def test_prompt_is_computed_in_pieces_beside_decoding() -> None:
    heard = Heard()
    target = ToyTarget()
    e = engine(target, sinks=[heard], config=EngineConfig(prefill_chunk=4))
    e.submit(a_seq("short", 2, max_tokens=6))
    e.submit(a_seq("long", 11, max_tokens=2))
    while e.busy:
        e.step()
    long = [r.tokens for r in heard.rounds if r.request == "long"]
    assert [len(t) > 0 for t in long[:4]] == [False, False, False, True]  # 2, 4, 4 and 1 rows
    assert heard.rounds[0].batch == 2
    assert dict(heard.ends) == {"short": "length", "long": "length"}


def test_more_sequences_than_fit_wait() -> None:
    e = engine(config=EngineConfig(max_batch=2))
    seqs = [a_seq(f"s{i}", 2 + i, max_tokens=3) for i in range(5)]
    for s in seqs:
        e.submit(s)
    assert len(e.step()) == 2
    while e.busy:
        e.step()
    assert [len(s.output) for s in seqs] == [3] * 5


def test_outputs_of_a_request_find_room_together() -> None:
    """Two run, two wait; those of a request that was let in come in whoever waits."""
    e = engine(config=EngineConfig(max_batch=2, max_waiting=2))
    e.submit(a_seq("a"))
    e.step()
    with pytest.raises(Busy, match="4 more"):
        e.submit(a_seq("b"), slots=4)
    e.submit(a_seq("b"), slots=3)
    e.submit(a_seq("c"))
    with pytest.raises(Busy, match="1 more"):
        e.submit(a_seq("d"))
    for name in ("b1", "b2"):
        e.submit(a_seq(name), slots=0)
    assert (e.running, e.waiting) == (1, 4)


def test_a_request_that_is_too_large_for_the_queue_is_let_in_when_it_is_alone() -> None:
    e = engine(config=EngineConfig(max_batch=2, max_waiting=2))
    e.submit(a_seq("a"), slots=9)
    with pytest.raises(Busy):
        e.submit(a_seq("b"), slots=9)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_cancel_frees_the_sequence(steps: int) -> None:
    heard = Heard()
    target = ToyTarget()
    e = engine(target, sinks=[heard])
    e.submit(a_seq("a"))
    e.submit(a_seq("b"))
    for _ in range(steps):
        e.step()
    e.cancel("a")
    e.cancel("nobody")
    assert heard.ends == [("a", "cancelled")]
    while e.busy:
        e.step()
    assert not target._rows


def test_rounds_name_the_drafter_of_each_token() -> None:
    heard = Heard()
    e = engine(sinks=[heard])
    seq = a_seq(max_tokens=60, spec=SpecConfig(("ngram",), adaptive=False))
    e.submit(seq)
    while e.busy:
        e.step()
    assert [t for r in heard.rounds for t in r.tokens] == seq.output
    sources = [s for r in heard.rounds for s in r.sources]
    assert len(sources) == len(seq.output)
    assert {"ngram", "target"} == set(sources)


def test_drafts_outside_the_targets_vocabulary_are_cut_off() -> None:
    class Beyond(Drafter):
        name = "beyond"

        def draft(self, asks: Sequence[Ask]) -> list[Draft]:
            return [Draft((1, 999, 2), None, ("beyond",) * 3)]

    heard = Heard()
    e = Engine(ToyTarget(), {"beyond": Beyond()}, Fixed(), [heard])
    e.submit(a_seq(spec=SpecConfig(("beyond",))))
    while e.busy:
        e.step()
    assert {len(r.draft) for r in heard.rounds} == {0, 1}


class SmallTarget(ToyTarget):
    """Holds a number of rows, all sequences together."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._limit = rows

    def forward(self, feeds: Sequence[Feed], taps: Sequence[int] = ()) -> Scores:
        held = sum(len(rows) for rows in self._rows.values())
        if held + sum(len(f.tokens) + len(f.draft) for f in feeds) > self._limit:
            raise CacheFull("full")
        return super().forward(feeds, taps)


def outputs(e: Engine, seqs: Sequence[Seq]) -> tuple[list[list[int]], dict[str, Round]]:
    ends: dict[str, Round] = {}
    for s in seqs:
        e.submit(s)
    while e.busy:
        ends |= {r.request: r for r in e.step() if r.finish}
    return [s.output for s in seqs], ends


def test_where_the_cache_is_full_the_last_to_come_wait() -> None:
    def some() -> list[Seq]:
        return [a_seq(f"s{i}", 4, SpecConfig((), 0), max_tokens=5) for i in range(3)]

    wanted, _ = outputs(engine(), some())
    got, ends = outputs(engine(SmallTarget(20)), some())
    assert got == wanted
    assert {r.finish for r in ends.values()} == {"length"}


def test_a_sequence_the_cache_cannot_hold_ends_alone_with_its_error() -> None:
    target = SmallTarget(16)
    small, large = a_seq("small", 3, max_tokens=4), a_seq("large", 30, max_tokens=4)
    _, ends = outputs(engine(target), [small, large])
    assert ends["small"].finish == "length"
    assert ends["large"].finish == "error"
    assert isinstance(ends["large"].error, CacheFull)
    assert not target._rows


def test_a_sequence_that_cannot_be_opened_ends_alone_with_its_error() -> None:
    class Picky(ToyTarget):
        def open(self, seq: Seq) -> int:
            if seq.id == "bad":
                raise PromptTooLong("too long")
            return super().open(seq)

    target = Picky()
    _, ends = outputs(engine(target), [a_seq("bad"), a_seq("good")])
    assert (ends["bad"].finish, ends["good"].finish) == ("error", "length")
    assert not target._rows


def test_a_draft_model_that_cannot_hold_the_text_costs_no_request() -> None:
    short = ToyTarget()
    short.max_context = 8
    for model in (short, SmallTarget(6)):
        drafters: dict[str, Drafter] = {"model": ModelDrafter(model, 24)}
        e = Engine(ToyTarget(), drafters, Fixed())
        long = a_seq("long", 12, SpecConfig(("model",)))
        got, _ = outputs(e, [long, a_seq("short", 3, SpecConfig(("model",)))])
        assert [len(tokens) for tokens in got] == [10, 10]
        assert not model._rows


def test_drafts_are_dropped_before_a_sequence_is_preempted() -> None:
    """What fits without a draft must not fail because of one."""
    spec = SpecConfig(("ngram",), max_draft=8, adaptive=False)
    wanted, _ = outputs(engine(), [a_seq("a", 6, spec, max_tokens=12)])
    got, ends = outputs(engine(SmallTarget(18)), [a_seq("a", 6, spec, max_tokens=12)])
    assert got == wanted
    assert ends["a"].finish == "length"


def test_who_cannot_go_on_goes_back_to_waiting_and_loses_nothing() -> None:
    def some() -> list[Seq]:
        return [a_seq(f"s{i}", 8, SpecConfig((), 0), max_tokens=8) for i in range(3)]

    target = SmallTarget(20)
    got, ends = outputs(engine(target), some())
    assert got == outputs(engine(), some())[0]
    assert {r.finish for r in ends.values()} == {"length"}
    assert not target._rows


class PrefixTarget(SmallTarget):
    """Finds these many tokens of a sequence in its prefix cache, and what it computed of it before."""

    def __init__(self, rows: int, cached: dict[str, int]) -> None:
        super().__init__(rows)
        self._cached = cached

    def open(self, seq: Seq) -> int:
        super().open(seq)
        found = min(self._cached.get(seq.id, 0), len(seq.tokens) - 1)
        self._rows[seq.id] = list(seq.tokens[:found])
        return found

    def close(self, seq_id: str) -> None:
        self._cached[seq_id] = max(self._cached.get(seq_id, 0), len(self._rows[seq_id]))
        super().close(seq_id)


def test_a_prompt_that_fits_is_read_though_later_ones_hold_cached_prefixes() -> None:
    """They have no part in the pass that finds the cache full."""
    target = PrefixTarget(60, {f"s{i}": 10 for i in range(3)})
    big = a_seq("big", 50, SpecConfig((), 0), max_tokens=4)
    later = [a_seq(f"s{i}", 40, SpecConfig((), 0), max_tokens=4) for i in range(3)]
    e = engine(target, config=EngineConfig(prefill_chunk=8))
    _, ends = outputs(e, [big, *later])
    assert {name: r.finish for name, r in ends.items()} == dict.fromkeys(("big", "s0", "s1", "s2"), "length")
    assert [seq.preemptions > 0 for seq in (big, *later)] == [False, True, True, True]
    assert [seq.cached for seq in later] == [10] * 3
    assert not target._rows


def test_tokens_that_a_preempted_sequence_computed_itself_are_no_hits() -> None:
    target = PrefixTarget(20, {})
    seqs = [a_seq(f"s{i}", 8, SpecConfig((), 0), max_tokens=8) for i in range(3)]
    outputs(engine(target), seqs)
    assert any(seq.preemptions for seq in seqs)
    assert [seq.cached for seq in seqs] == [0, 0, 0]


def test_a_cancel_in_the_middle_of_a_pass_waits_for_its_end() -> None:
    class Meddler(Drafter):
        name = "meddler"

        def draft(self, asks: Sequence[Ask]) -> list[Draft]:
            e.cancel("a")
            return [Draft((1,))] * len(asks)

    heard, target = Heard(), ToyTarget()
    e = Engine(target, {"meddler": Meddler()}, Fixed(), [heard])
    good = a_seq("b", spec=SpecConfig(("meddler",)))
    outputs(e, [a_seq("a", spec=SpecConfig(("meddler",))), good])
    assert ("a", "cancelled") in heard.ends
    assert len(good.output) == 10
    assert not target._rows


def test_strange_requests_are_refused_before_they_run() -> None:
    e = engine()
    with pytest.raises(UsageError, match="prompt=99"):
        e.submit(Seq("a", [1, 99], 2))
    with pytest.raises(UsageError, match="logit_bias=50"):
        e.submit(Seq("a", [1], 1, SamplingParams(logit_bias=((50, 1.0),))))
    e.submit(a_seq("a"))
    with pytest.raises(ValueError, match="here already"):
        e.submit(a_seq("a"))


def test_lists_of_drafters_in_ever_new_orders_are_not_all_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "MAX_LISTS", 4)
    controller = Rate()
    e = Engine(ToyTarget(), model_free(), controller)
    e.submit(first := a_seq("first", spec=SpecConfig(("ngram",)), max_tokens=40))
    plain, _ = outputs(engine(), [a_seq(spec=SpecConfig(()))])
    for number, names in enumerate(permutations(("suffix", "ngram", "recycle", "none"))):
        e.submit(seq := a_seq(str(number), spec=SpecConfig(names)))
        e.step()
        while any(running.id == seq.id for running in e._scheduler.running()):
            e.step()
        assert seq.output == plain[0]
        assert len(e._drafting._lists) <= 4
        assert controller._texts.keys() <= {"first", seq.id}
        assert len(controller._gains) <= 8  # by drafter, in whatever order
    assert len(first.output) == 40


class Sampled(Drafter):
    """Samples from a flat distribution, and says that it is unsure."""

    name = "sampled"

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        count = asks[0].budget
        q = torch.full((count, ToyTarget().vocab_size), 1 / ToyTarget().vocab_size)
        return [Draft((1,) * count, None, (), (0.01,) * count, q) for _ in asks]


@pytest.mark.parametrize("accept", ["residual", "block"])
def test_no_threshold_drops_sampled_tokens_and_each_has_its_drafter_as_source(accept: Any) -> None:
    """The rule of acceptance needs every token that was sampled, likely or not."""
    e = Engine(ToyTarget(), {"sampled": Sampled(), "ngram": Ngram()}, Fixed())
    spec = SpecConfig(("sampled", "ngram"), max_draft=3, threshold=0.5, accept=accept)
    e.submit(replace(a_seq("a", 3, spec, max_tokens=9), params=SamplingParams(max_tokens=9, temperature=1.0)))
    rounds = e.step()
    assert [r.draft.sources for r in rounds] == [("sampled",) * 3]


def a_prefill(name: str, prompt: int) -> Seq:
    seq = a_seq(name, prompt, SpecConfig(("none",), max_draft=0))
    seq.prefill = True
    return seq


def test_a_prefill_reads_its_prompt_and_generates_nothing() -> None:
    heard, target = Heard(), ToyTarget()
    e = engine(target, sinks=[heard], config=EngineConfig(prefill_chunk=4))
    seq = a_prefill("a", 10)
    e.submit(seq)
    while e.busy:
        e.step()
    assert [r.rows for r in heard.rounds] == [4, 4, 2]
    assert [r.finish for r in heard.rounds] == [None, None, "length"]
    assert (seq.computed, seq.output, heard.ends) == (10, [], [("a", "length")])


def test_a_prefill_makes_way_for_one_that_generates_and_then_goes_on() -> None:
    heard = Heard()
    e = engine(sinks=[heard], config=EngineConfig(prefill_chunk=4, max_batch=1))
    e.submit(a_prefill("ahead", 20))
    e.step()
    e.submit(a_seq("user", 3, max_tokens=2))
    while e.busy:
        e.step()
    assert [name for name, _ in heard.ends] == ["user", "ahead"]
    user = [i for i, r in enumerate(heard.rounds) if r.request == "user"]
    assert user[0] == 1
    assert [r.finish for r in heard.rounds if r.request == "ahead"][-1] == "length"


def test_a_prefill_can_be_cancelled() -> None:
    heard = Heard()
    e = engine(sinks=[heard], config=EngineConfig(prefill_chunk=4))
    e.submit(a_prefill("a", 20))
    e.step()
    e.cancel("a")
    assert not e.busy
    assert heard.ends == [("a", "cancelled")]
