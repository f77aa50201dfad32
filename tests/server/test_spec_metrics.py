from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import SamplingParams, SpecConfig
from paceline.drafters import model_free
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.server.request_log import request_timings, spec_work, speculative_metrics
from paceline.testing import ToyTarget
from paceline.trace.record import RequestStats
from paceline.types import NO_DRAFT, ROOT, Draft, Round, Seq


def a_round(draft: Draft = NO_DRAFT, kept: tuple[int, ...] = (), cut: bool = False, batch: int = 1) -> Round:
    tokens = (*(draft.tokens[i] for i in kept), *(() if cut else (0,)))
    return Round("a", 5, ("ngram",), draft, kept, tokens, len(draft), batch, 9, 300, 6000)


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    size = draw(st.integers(1, 12))
    tokens = tuple(range(size))
    if draw(st.booleans()):
        return Draft(tokens, None, ("ngram",) * size)
    parents = tuple(draw(st.integers(ROOT, i - 1)) for i in range(size))
    return Draft(tokens, parents, ("suffix",) * size)


@st.composite
def rounds(draw: st.DrawFn) -> Round:
    """With a draft, without one, cut by a stop, or a piece of a prompt."""
    kind = draw(st.sampled_from(["drafted", "plain", "prompt"]))
    if kind == "prompt":
        return a_round(cut=True)
    if kind == "plain":
        return a_round()
    draft = draw(drafts())
    path = draft.path(draw(st.integers(ROOT, len(draft) - 1)))
    return a_round(draft, path, cut=bool(path) and draw(st.booleans()))


def check_as_aiperf_does(spec: dict[str, Any]) -> None:
    histogram = spec["acceptance_histogram"]
    assert type(histogram) is list
    assert all(type(count) is int and count >= 0 for count in histogram)
    assert len(histogram) == spec["num_spec_tokens"] + 1
    assert sum(histogram) == spec["num_spec_steps"]
    assert sum(j * count for j, count in enumerate(histogram)) == spec["num_accepted_draft_tokens"]
    assert spec["num_accepted_draft_tokens"] <= spec["num_draft_tokens"]
    assert 1 <= spec["mean_acceptance_length"] <= spec["num_spec_tokens"] + 1
    assert 0 <= spec["draft_acceptance_rate"] <= 1
    if "per_step_accepted" in spec:
        accepted, drafted = spec["per_step_accepted"], spec["per_step_drafted"]
        assert len(accepted) == len(drafted) == spec["num_spec_steps"]
        assert sum(accepted) == spec["num_accepted_draft_tokens"]
        assert sum(drafted) == spec["num_draft_tokens"]
        assert all(a <= d for a, d in zip(accepted, drafted, strict=True))


@given(st.lists(rounds(), max_size=20), st.booleans(), st.integers(0, 16))
def test_any_rounds_pass_the_checks(given_rounds: list[Round], detailed: bool, max_draft: int) -> None:
    spec = speculative_metrics(given_rounds, detailed, max_draft)
    check_as_aiperf_does(spec)
    assert ("per_step_drafted" in spec) == detailed
    assert spec["num_draft_tokens"] == sum(len(r.draft) for r in given_rounds)
    assert spec["num_accepted_draft_tokens"] == sum(len(r.path) for r in given_rounds)


def test_the_numbers_of_three_rounds() -> None:
    chain = Draft((7, 8, 9), None, ("ngram",) * 3)
    tree = Draft((1, 2, 3, 4), (ROOT, ROOT, 1, 2), ("suffix",) * 4)
    spec = speculative_metrics([a_round(chain, (0,)), a_round(), a_round(tree, (1, 2, 3))], detailed=True)
    assert spec == {
        "mean_acceptance_length": 3.0,
        "draft_acceptance_rate": 4 / 7,
        "acceptance_histogram": [0, 1, 0, 1, 0],
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 7,
        "num_spec_tokens": 4,
        "per_step_accepted": [1, 3],
        "per_step_drafted": [3, 4],
    }


def test_an_output_without_drafts_has_finite_numbers() -> None:
    spec = speculative_metrics([a_round(cut=True), a_round()], detailed=False, max_draft=3)
    assert spec["acceptance_histogram"] == [0, 0, 0, 0]
    assert (spec["mean_acceptance_length"], spec["draft_acceptance_rate"]) == (1.0, 0.0)
    assert speculative_metrics([], detailed=False)["acceptance_histogram"] == [0]


def test_rounds_of_a_real_engine_pass_the_checks() -> None:
    engine = Engine(ToyTarget(memory=1), model_free(), Fixed())
    seq = Seq("a", [1, 2] * 8, 16, SamplingParams(max_tokens=60), SpecConfig(("suffix", "ngram")))
    engine.submit(seq)
    heard = [r for _ in range(200) if engine.busy for r in engine.step()]
    spec = speculative_metrics(heard, detailed=True, max_draft=seq.spec.max_draft)
    check_as_aiperf_does(spec)
    assert spec["num_accepted_draft_tokens"] > 0
    plain = sum(1 for r in heard if r.tokens and not len(r.draft))
    assert plain + spec["num_spec_steps"] + spec["num_accepted_draft_tokens"] == len(seq.output)


def test_a_share_of_the_passes() -> None:
    work = spec_work([a_round(batch=3), a_round(batch=1)])
    assert work.method == "ngram"
    assert work.draft_s == pytest.approx(400e-6)
    assert work.verify_s == pytest.approx(8e-3)
    assert spec_work([]).method == ""


def a_finished(tokens: int, first_token_s: float | None = 0.5) -> RequestStats:
    decode_s = 0.9 if tokens > 1 else 0.0
    return RequestStats(
        prompt_tokens=10,
        cached_tokens=4,
        output_tokens=tokens,
        queue_s=0.2,
        first_token_s=first_token_s,
        decode_s=decode_s,
        seconds=1.5,
        finish="stop",
    )


def test_timings_are_vllms() -> None:
    assert request_timings(a_finished(10)) == {
        "time_to_first_token_ms": pytest.approx(300),
        "generation_time_ms": pytest.approx(900),
        "queue_time_ms": pytest.approx(200),
        "mean_itl_ms": pytest.approx(100),
        "tokens_per_second": pytest.approx(10 / 1.2),
    }


def test_what_was_not_measured_is_null() -> None:
    assert request_timings(a_finished(1))["mean_itl_ms"] is None
    unborn = request_timings(a_finished(0, None))
    assert unborn.pop("queue_time_ms") == pytest.approx(200)
    assert set(unborn.values()) == {None}
