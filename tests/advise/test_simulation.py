"""A simulation takes the passes that the engine takes: it is the engine, without a model."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.advise.pass_times import PassTimes
from paceline.advise.replay import Decoding, RecordedOutput, ReplayClock, ReplayTarget, Simulation
from paceline.advise.target_outputs import TargetOutput, host_factor, host_ms
from paceline.advise.traffic import TokenizedRequest, TracedRequest
from paceline.config import SamplingParams, SpecConfig
from paceline.drafters import model_free
from paceline.engine import masking
from paceline.engine.control import Fixed, Rate
from paceline.engine.engine import Engine
from paceline.testing import ToyCursor, ToyTarget
from paceline.types import NO_DRAFT, Ask, Draft, Drafter, Feed, HiddenRows, Round, Scores, Seq

PROMPTS = ([1, 2, 3, 4, 1, 2, 3], [5, 6, 5, 6, 5], [7, 1, 2, 3, 9, 9, 9], [2, 3, 4, 1, 2])
MAX_TOKENS = 40


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a mask may be late, and then the engine drops the draft."""
    monkeypatch.setattr(masking, "LATE_S", 60.0)


def rules(text: tuple[int, ...]) -> set[int] | None:
    """Every third token has no alternative, the one after it is one of a few."""
    if len(text) % 3 == 1:
        return {(sum(text) * 7) % 20}
    return set(range(8)) if len(text) % 3 == 2 else None


def sequences(spec: SpecConfig, constrained: bool) -> list[Seq]:
    params = SamplingParams(max_tokens=MAX_TOKENS, seed=3, temperature=0.4, top_k=2)
    return [
        Seq(f"s{i}", list(p), len(p), params, spec, cursor=ToyCursor(rules) if constrained else None)
        for i, p in enumerate(PROMPTS)
    ]


def engine_run(spec: SpecConfig, constrained: bool) -> tuple[list[Seq], list[list[Round]]]:
    """One output after the other, each with its rounds."""
    engine = Engine(ToyTarget(memory=1), model_free(), Fixed())
    seqs, rounds = sequences(spec, constrained), []
    for seq in seqs:
        engine.submit(seq)
        own: list[Round] = []
        while engine.busy:
            own += engine.step()
        rounds.append(own)
    return seqs, rounds


def recorded(seqs: Sequence[Seq], constrained: bool) -> list[RecordedOutput]:
    fresh = sequences(SpecConfig(), constrained)
    return [RecordedOutput(new, tuple(done.output)) for new, done in zip(fresh, seqs, strict=True)]


def cost(rows: int, context: int) -> float:
    return 10.0 + rows


TIMES = PassTimes(cost)


def simulate(outputs: Sequence[RecordedOutput], spec: SpecConfig, concurrency: int = 1) -> list[Decoding]:
    """Nothing but passes takes any time."""
    target = ToyTarget(memory=1)
    made = Simulation(spec, target, model_free(), Fixed(), TIMES, host_factor=0.0, concurrency=concurrency)
    return made.run(outputs)


@pytest.mark.parametrize("constrained", [False, True], ids=["free", "grammar"])
@pytest.mark.parametrize("length", [1, 4, 8])
@pytest.mark.parametrize("drafters", [("grammar", "suffix", "ngram"), ("ngram",), ("grammar", "suffix")])
def test_passes_and_tokens_are_those_of_the_engine(
    drafters: tuple[str, ...], length: int, constrained: bool
) -> None:
    spec = SpecConfig(drafters, length, adaptive=False)
    seqs, rounds = engine_run(spec, constrained)
    done = simulate(recorded(seqs, constrained), spec)
    decoding = [own[1:] for own in rounds]
    assert [d.passes for d in done] == [len(own) for own in decoding]
    assert [d.tokens for d in done] == [sum(len(r.tokens) for r in own) for own in decoding]
    accepted = [sum(len(r.path) for r in own) for own in decoding]
    assert [sum(d.by_source.values()) for d in done] == accepted
    assert sum(accepted) > 10  # else nothing was compared


def test_a_pass_costs_what_the_curve_says() -> None:
    spec = SpecConfig(("none",), max_draft=0)
    seqs, _ = engine_run(spec, constrained=False)
    for d in simulate(recorded(seqs, constrained=False), spec):
        assert d.tokens == d.passes == MAX_TOKENS - 1
        assert d.target_ms == d.ms == pytest.approx(11 * d.passes)


def test_outputs_at_once_share_passes() -> None:
    """All four prompts are in the first pass."""
    spec = SpecConfig(("none",), max_draft=0)
    seqs, _ = engine_run(spec, constrained=False)
    done = simulate(recorded(seqs, constrained=False), spec, concurrency=4)
    assert [d.ms for d in done] == pytest.approx([(10 + 4) * (MAX_TOKENS - 1)] * 4)


def test_each_output_in_a_pass_reads_a_context_of_its_own() -> None:
    spec = SpecConfig(("none",), max_draft=0)
    seqs, _ = engine_run(spec, constrained=False)
    times = PassTimes(lambda rows, context: 10 + rows + context)
    made = Simulation(spec, ToyTarget(memory=1), model_free(), Fixed(), times, host_factor=0.0, concurrency=4)
    prompts = sum(map(len, PROMPTS))
    expected = sum(10 + 4 + prompts + 4 * i for i in range(MAX_TOKENS - 1))
    assert [d.ms for d in made.run(recorded(seqs, constrained=False))] == pytest.approx([expected] * 4)


def test_no_more_outputs_at_once_than_there_are_places() -> None:
    spec = SpecConfig(("none",), max_draft=0)
    seqs, _ = engine_run(spec, constrained=False)
    alone, pairs = (simulate(recorded(seqs, constrained=False), spec, concurrency=n) for n in (1, 2))
    assert [d.passes for d in pairs] == [d.passes for d in alone]
    assert sum(d.ms for d in alone) == pytest.approx(4 * 11 * (MAX_TOKENS - 1))
    assert sum(d.ms for d in pairs) == pytest.approx(4 * 12 * (MAX_TOKENS - 1))


def test_what_the_prefix_cache_held_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that ends the prompt has as many rows as it had: a draft of it is cut to the same room."""
    seq = Seq("a", list(range(24)) * 2, 48, SamplingParams(max_tokens=4), SpecConfig((), max_draft=0))
    rows: list[int] = []  # of each pass
    forward = ReplayTarget.forward

    def counted(target: ReplayTarget, feeds: Sequence[Feed], taps: Sequence[int] = ()) -> Scores:
        rows.append(sum(len(feed.tokens) + len(feed.draft) for feed in feeds))
        return forward(target, feeds, taps)

    monkeypatch.setattr(ReplayTarget, "forward", counted)
    for cached, read in ((0, 48), (40, 8), (48, 1)):
        rows.clear()
        one = RecordedOutput(seq, (1, 2, 3), cached=cached)
        Simulation(seq.spec, ToyTarget(), {}, Fixed(), TIMES).run([one])
        assert rows == [read, 1, 1]


@pytest.mark.parametrize(("prompt_row_ms", "read", "beside"), [(0.5, 4 + 11, 4 + 11), (0.0, 18, 19)])
def test_rows_of_prompts_have_a_time_of_their_own(prompt_row_ms: float, read: int, beside: int) -> None:
    clock = ReplayClock(host_factor=0.0)
    target = ReplayTarget(ToyTarget(), PassTimes(cost, prompt_row_ms), clock)
    for name in ("a", "b"):
        seq = Seq(name, [1] * 17, 17)
        target.add(name, RecordedOutput(seq, (1, 2), cached=16 if name == "b" else 0))
        target.open(seq)
    target.forward([Feed("a", [1] * 8, scored=False)])
    assert clock() == read * 1e6
    target.keep("a", 8)
    target.forward([Feed("a", [1] * 8, scored=False), Feed("b", [1])])
    assert clock() == (read + beside) * 1e6


def test_an_output_ends_where_it_was_recorded_to_end_and_its_drafts_may_go_on() -> None:
    """A client went away after seven tokens of forty: the engine could not know, and drafted as ever."""
    spec = SpecConfig(("ngram",), 8, adaptive=False)
    seq = Seq("a", [1, 2, 3, 4] * 6, 24, SamplingParams(max_tokens=MAX_TOKENS), spec)
    (done,) = simulate([RecordedOutput(seq, (1, 2, 3, 4, 1, 2, 3))], spec)
    assert (done.tokens, done.passes) == (0, 0)  # all of it was accepted with the prompt
    (done,) = simulate([RecordedOutput(seq, (9, 1, 2, 3, 4, 1, 2))], spec)
    assert done.tokens == 6


def test_an_output_that_left_its_grammar_goes_on_without_one() -> None:
    def only_ones(text: tuple[int, ...]) -> set[int] | None:
        return {1} if len(text) % 5 else None

    spec = SpecConfig(("grammar",), 4, adaptive=False)
    params = SamplingParams(max_tokens=MAX_TOKENS)
    follows, left = (
        simulate([RecordedOutput(Seq("a", [5], 1, params, spec, cursor=ToyCursor(only_ones)), out)], spec)
        for out in ((1,) * 30, (1,) * 29 + (2,))
    )
    assert follows[0].by_source["grammar"] > 20
    assert not left[0].by_source
    assert left[0].passes == 29


def test_everything_but_passes_takes_longer_between_them_than_in_a_replay() -> None:
    """The controller knows: drafts that take ten passes are not made."""
    seqs, _ = engine_run(SpecConfig(("none",), max_draft=0), constrained=False)
    outputs, spec = recorded(seqs, constrained=False), SpecConfig(("ngram",), 8)
    accepted = []
    for factor in (1.0, 10_000.0):
        made = Simulation(spec, ToyTarget(memory=1), model_free(), Rate(cost), TIMES, host_factor=factor)
        done = made.run(outputs)
        accepted.append(sum(sum(d.by_source.values()) for d in done))
        assert all(d.host_ms > 0 for d in done)
    assert accepted[1] < accepted[0] / 4


def test_the_time_outside_of_the_target_is_that_of_a_round_after_the_first() -> None:
    r = Round("a", 8, ("ngram",), NO_DRAFT, (), (1,), 8, 1, 1, 90, 1000)
    tokenized = TokenizedRequest(TracedRequest("a", "", "a", {}), (1,), (2,), "")
    output = RecordedOutput(Seq("a", [1], 1), (2,))
    some = [TargetOutput(tokenized, output, None, (r,) * n, ms) for n, ms in ((3, 2.4), (2, 1.2), (1, 0.0))]
    assert host_ms(some) == pytest.approx(0.2)  # two rounds of 1.2, one of 1.2; the last has only a prompt
    assert host_ms([]) == 0


def written(draft_us: Sequence[int]) -> TargetOutput:
    """An answer with these rounds after its first."""
    rounds = [Round("a", 8, ("ngram",), NO_DRAFT, (), (1,), 8, 1, 1, us, 1000) for us in (50_000, *draft_us)]
    tokenized = TokenizedRequest(TracedRequest("a", "", "a", {}), (1,), (2,), "")
    return TargetOutput(tokenized, RecordedOutput(Seq("a", [1], 1), (2,)), None, tuple(rounds))


def test_drafting_that_waited_for_a_core_once_does_not_count() -> None:
    replayed = [Decoding(4, passes, 1.0, 0.0, 0.03 * passes, {}) for passes in (1, 2, 3, 0)]
    outputs = [written([90] * 4), written([90, 100_000]), written([60, 120, 90]), written([])]
    assert host_factor(outputs, replayed) == pytest.approx(3)


def test_where_nothing_is_known_of_drafting_it_takes_the_time_of_the_replay() -> None:
    replayed = [Decoding(4, 2, 1.0, 0.0, 0.06, {})]
    idle = [Decoding(4, 2, 1.0, 0.0, 0.0, {})]
    assert host_factor([written([90])], idle) == 1
    assert host_factor([written([90])], []) == 1
    assert host_factor([written([])], replayed) == 1
    assert host_factor([written([10])], replayed) == 1  # no less


def test_a_controller_stops_drafts_that_are_never_accepted() -> None:
    class Wrong(Drafter):
        name = "wrong"

        def draft(self, asks: Sequence[Ask]) -> list[Draft]:
            return [Draft((23,) * ask.budget) for ask in asks]

    seqs, _ = engine_run(SpecConfig(("none",), max_draft=0), constrained=False)
    outputs, spec = recorded(seqs, constrained=False), SpecConfig(("wrong",), 8)
    target, drafters = ToyTarget(memory=1), {"wrong": Wrong()}
    fixed = Simulation(replace(spec, adaptive=False), target, drafters, Fixed(), TIMES).run(outputs)
    planned = Simulation(spec, target, drafters, Rate(cost), TIMES).run(outputs)
    plain_ms = 11 * sum(d.tokens for d in planned)
    assert sum(d.target_ms for d in fixed) > 1.6 * plain_ms
    assert sum(d.target_ms for d in planned) < 1.2 * plain_ms


def test_a_draft_in_the_pass_that_ends_the_prompt_counts_as_in_the_engine() -> None:
    spec, params = SpecConfig(("ngram",), 8, adaptive=False), SamplingParams(max_tokens=30)
    engine = Engine(ToyTarget(memory=1), model_free(), Fixed())
    seq = Seq("a", [3], 1, params, spec)
    engine.submit(seq)
    while engine.busy:
        engine.step()
    prompt = list(seq.tokens)  # each token follows from the one before: the prompt ends in a loop
    again = Seq("b", prompt, len(prompt), params, spec)
    engine.submit(again)
    rounds: list[Round] = []
    while engine.busy:
        rounds += engine.step()
    assert len(rounds[0].tokens) > 1
    before = Seq("b", prompt[:31], 31, params, spec)
    (done,) = simulate([RecordedOutput(before, tuple(again.output))], spec)
    assert (done.passes, done.tokens) == (len(rounds) - 1, 30 - len(rounds[0].tokens))


def test_heads_see_the_hidden_states_of_every_committed_row_once() -> None:
    import torch

    class Head(Drafter):
        name, taps = "head", (2,)

        def __init__(self) -> None:
            self.rows: dict[str, list[float]] = {}

        def draft(self, asks: Sequence[Ask]) -> list[Draft]:
            return [Draft((ask.seq.tokens[-1],) * ask.budget) for ask in asks]

        def on_hidden(self, hidden_rows: Sequence[HiddenRows]) -> None:
            for rows in hidden_rows:
                seen = self.rows.setdefault(rows.seq.id, [])
                assert rows.start == len(seen)
                seen += rows.hidden[2][:, 0].tolist()

    seqs, _ = engine_run(SpecConfig(("none",), max_draft=0), constrained=False)
    outputs = [
        RecordedOutput(one.seq, one.output, {2: torch.arange(len(seq.tokens)).float().unsqueeze(1)})
        for one, seq in zip(recorded(seqs, constrained=False), seqs, strict=True)
    ]
    head, spec = Head(), SpecConfig(("head",), 3, adaptive=False)
    for concurrency in (1, 3):
        head.rows.clear()
        target = ToyTarget(memory=1)
        Simulation(spec, target, {"head": head}, Fixed(), TIMES, concurrency=concurrency).run(outputs)
        for i, seq in enumerate(seqs):
            assert head.rows[f"simulation {i}"] == list(range(len(seq.tokens) - 1))
