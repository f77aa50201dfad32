"""Answers of a tiny model to recorded requests, with what the prefix cache would hold."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from paceline.advise.advice import FREE_LISTS, AdviceConfig, FittedDrafter, TrainingGain, advise_routes
from paceline.advise.advice import Engine as Advisor
from paceline.advise.pass_times import PassTimes
from paceline.advise.replay import Decoding, RecordedOutput, Simulation
from paceline.advise.target_outputs import (
    PLAIN_TOKENS,
    OutputLimits,
    TargetOutput,
    prompt_row_ms,
    reading_times,
    target_outputs,
)
from paceline.advise.traffic import TracedRequest, Traffic, turns_before
from paceline.config import EngineConfig, SpecConfig
from paceline.drafters import model_free
from paceline.engine.control import Fixed
from paceline.llm import LLM
from paceline.types import Ask, Draft, Drafter, Seq
from support.servers import toy_chat_model

LIMITS = OutputLimits(max_tokens=24)
WORDS = ("one", "two", "three", "four", "five", "six")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = toy_chat_model(tmp_path_factory.mktemp("toy"))
    return path


def toy(model: Path) -> LLM:
    config = EngineConfig("cpu", cache_mb=64)
    return LLM(str(model), spec=SpecConfig(("ngram",), 8, adaptive=False), config=config)


def turns(count: int) -> list[TracedRequest]:
    """One conversation."""
    words = [{"role": role, "content": f"a word {i}"} for i in range(count) for role in ("user", "assistant")]
    return [
        TracedRequest(f"c#{i}", "chat", "c", {"messages": words[: 2 * i + 1], "temperature": 0.8})
        for i in range(count)
    ]


def answered(model: Path, requests: list[TracedRequest], chosen: list[TracedRequest]) -> list[TargetOutput]:
    found, left_out = target_outputs(toy(model), chosen, LIMITS, before=turns_before(requests))
    assert not left_out
    return found


def test_the_turn_before_is_read_first(model: Path) -> None:
    """A turn from the middle of a conversation finds as much in the cache as if all had been answered."""
    requests = turns(4)
    everything = answered(model, requests, requests)
    (alone,) = answered(model, requests, requests[3:])
    (cold,) = target_outputs(toy(model), requests[3:], LIMITS)[0]
    assert everything[0].recorded.cached == cold.recorded.cached == 0
    assert alone.recorded.cached == everything[3].recorded.cached > 0
    assert alone.recorded.output == everything[3].recorded.output == cold.recorded.output


def test_prompts_that_are_too_long_count_together(model: Path) -> None:
    """Those beyond the model's context, whose errors tell each one's length, too."""
    llm, (short, *_) = toy(model), turns(1)
    words = [{"role": "user", "content": "a word " * 3000 * (n + 1)} for n in range(2)]
    long = [replace(short, id=f"{n}", body={"messages": [one]}) for n, one in enumerate(words)]
    _, left_out = target_outputs(llm, long, LIMITS)
    assert left_out == {f"prompts of more than {llm.target.max_context - 1:,} tokens": 2}
    _, left_out = target_outputs(llm, [short], OutputLimits(max_prompt=1))
    assert left_out == {"prompts of more than 1 tokens": 1}


@pytest.mark.parametrize("anonymous", [False, True])
def test_the_replay_of_a_stranger_finds_nothing_of_other_requests(model: Path, anonymous: bool) -> None:
    first = replace(turns(1)[0], anonymous=anonymous)
    outputs = answered(model, [], [first, replace(first, id="again", conversation="again", body=first.body)])
    same = [
        replace(one, recorded=replace(one.recorded, output=outputs[0].recorded.output)) for one in outputs
    ]
    assert [one.recorded.seq.anonymous for one in same] == [anonymous] * 2
    made = Simulation(
        SpecConfig(("suffix",), 8), toy(model).target, model_free(), Fixed(), PassTimes(lambda n, c: 1.0)
    )
    alone, after = made.run([one.recorded for one in same])
    assert (after.passes < alone.passes) is not anonymous


def test_a_replay_of_answers_has_their_rounds(model: Path) -> None:
    llm, requests = toy(model), turns(6)
    outputs, _ = target_outputs(llm, requests, LIMITS, before=turns_before(requests))
    times, drafters = PassTimes(lambda n, c: 1.0), {"ngram": llm.drafters["ngram"]}
    made = Simulation(llm.spec, llm.target, drafters, Fixed(), times)
    for one, done in zip(outputs, made.run([one.recorded for one in outputs]), strict=True):
        assert done.passes == len(one.rounds) - 1
        assert done.tokens == sum(len(r.tokens) for r in one.rounds[1:])
    assert fmean(len(r.tokens) for one in outputs for r in one.rounds) > 1  # else nothing was compared


def test_passes_of_one_row_are_timed_right_after_each_answer(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, requests = toy(model), turns(6)
    submitted: list[str] = []
    submit = llm.engine.submit

    def noted(seq: Seq, slots: int = 1) -> None:
        submitted.append("plain" if not seq.spec.drafters else "drafted")
        submit(seq, slots)

    monkeypatch.setattr(llm.engine, "submit", noted)
    outputs, _ = target_outputs(llm, requests, LIMITS)
    assert submitted == ["drafted", "plain"] * 6
    for one in outputs:
        assert len(one.plain) == min(PLAIN_TOKENS, len(one.recorded.output)) - 1
        assert all(p.rows == 1 and p.ms > 0 for p in one.plain)


def test_a_row_of_a_prompt_takes_what_is_left_of_the_time_to_the_first_token(model: Path) -> None:
    """A pass takes its time whether or not a prompt is in it."""
    (one,), _ = target_outputs(toy(model), turns(1), LIMITS)
    rows = one.recorded.seq.prompt_len
    timed = replace(one, prefill_ms=10.0 + 2 * rows)
    assert prompt_row_ms([timed], lambda rows, context: 10.0) == pytest.approx(2)
    assert prompt_row_ms([timed], lambda rows, context: 1e6) == 0
    assert prompt_row_ms([replace(timed, rounds=())], lambda rows, context: 10.0) == 0


def test_lists_of_drafters_are_compared_at_the_planned_load(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer outputs than run at once twice over: copies of them are other tenants'."""
    llm, simulated = toy(model), list[tuple[tuple[str, ...], int, int, int]]()
    run = Simulation.run

    def noted(self: Simulation, outputs: Sequence[RecordedOutput]) -> list[Decoding]:
        tenants = len({one.seq.tenant for one in outputs})
        simulated.append((self._spec.drafters, self._concurrency, len(outputs), tenants))
        return run(self, outputs)

    monkeypatch.setattr(Simulation, "run", noted)
    curve = lambda rows, context: 5.0 + rows  # noqa: E731
    advisor = Advisor(llm, Fixed, Fixed, curve, lambda body: "chat")
    config = AdviceConfig(concurrency=3, limits=LIMITS)
    (one,) = advise_routes(advisor, Traffic(tuple(turns(2))), config)
    compared = [found for found in simulated if found[1] == 3]
    assert {found[0] for found in compared} >= {(), *FREE_LISTS}
    assert {found[2:] for found in compared} == {(6, 3)}
    assert one.concurrency == 3
    at = {point.concurrency: point for point in one.loads}
    assert set(at) == {1, 3, 4, 16}
    assert (at[3].speedup, at[3].tokens_per_pass) == (one.best.speedup.value, one.best.tokens_per_pass.value)


def test_intervals_of_whole_turns_show_how_reading_times_differ(model: Path) -> None:
    """Six texts are drafted alike; half of them took long to be read, so that their turns gain little."""
    llm = toy(model)
    requests = [
        TracedRequest(
            word,
            "chat",
            word,
            {"messages": [{"role": "user", "content": word}]},
            model=llm.name,
            tenant=word,
            output_ids=(40, 41, 42) * 8,
            prefill_s=prefill_s,
        )
        for word, prefill_s in zip(WORDS, (0.0, 20.0) * 3, strict=True)
    ]
    curve = lambda rows, context: 50.0 + rows / 8  # noqa: E731
    advisor = Advisor(llm, Fixed, Fixed, curve, lambda body: "chat")
    (one,) = advise_routes(advisor, Traffic(tuple(requests)), AdviceConfig(limits=LIMITS))
    decoding, turns = one.best.speedup, one.best.turn_speedup
    assert decoding.value > 2
    assert decoding.high - decoding.low < 0.05 * decoding.value
    assert turns.low + 0.01 < turns.value < turns.high - 0.05


def test_a_turn_that_was_not_timed_is_read_in_the_mean_time(model: Path) -> None:
    (one,), _ = target_outputs(toy(model), turns(1), LIMITS)
    timed = [replace(one, prefill_ms=ms) for ms in (10.0, None, 30.0)]
    assert reading_times(timed) == [10, 20, 30]
    assert reading_times([replace(one, prefill_ms=None)]) == [0]


class Oracle(Drafter):
    """Drafts what was written, in conversations that it knows."""

    name = "block"

    def __init__(self, known: Sequence[TracedRequest]) -> None:
        self._texts = {request.id: request.output_ids for request in known}

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        rests = [self._rest(ask.seq)[: ask.budget] for ask in asks]
        return [Draft(rest, None, (self.name,) * len(rest)) for rest in rests]

    def _rest(self, seq: Seq) -> tuple[int, ...]:
        name, *_ = seq.tenant.split()  # and the number of a copy
        return self._texts.get(name, ())[len(seq.tokens) - seq.prompt_len :]


def test_hidden_states_are_read_for_the_fitted_drafter_as_well(model: Path) -> None:
    llm, fitted = toy(model), Oracle([])
    fitted.taps = (1, 2)
    curve = lambda rows, context: 50.0  # noqa: E731
    advisor = Advisor(llm, Fixed, Fixed, curve, lambda body: "chat")
    assert advisor.taps() == []
    assert replace(advisor, fitted=FittedDrafter(fitted, frozenset())).taps() == [1, 2]


def test_what_training_brings_is_measured_on_conversations_it_has_not_seen(model: Path) -> None:
    """No token of a text repeats an earlier one, so that only the fitted drafter has something to draft."""
    llm, random = toy(model), Random(0)
    requests = [
        TracedRequest(
            word,
            "chat",
            word,
            {"messages": [{"role": "user", "content": word}]},
            model=llm.name,
            tenant=word,
            output_ids=tuple(random.sample(range(40, 190), 24)),
        )
        for word in WORDS
    ]

    def gain(known: Sequence[TracedRequest], seen: Sequence[TracedRequest]) -> TrainingGain | None:
        curve = lambda rows, context: 50.0 + rows / 8  # noqa: E731
        fitted = FittedDrafter(Oracle(known), frozenset(request.opening for request in seen))
        advisor = Advisor(llm, Fixed, Fixed, curve, lambda body: "chat", fitted=fitted)
        (one,) = advise_routes(advisor, Traffic(tuple(requests)), AdviceConfig(limits=LIMITS))
        assert not any("block" in candidate.drafters for candidate in one.candidates)
        return one.training

    by_heart, in_general = gain(requests[:4], requests[:4]), gain(requests, requests[:4])
    assert by_heart is not None
    assert in_general is not None
    assert (in_general.outputs, in_general.conversations) == (2, 2)
    assert by_heart.tokens_per_pass.value < 1.5
    assert by_heart.gain.value < 1.2
    assert in_general.tokens_per_pass.value > 4
    assert in_general.gain.value > 3
    assert gain(requests, requests) is None
