"""Error rates of the gate while somebody looks after every pair, by simulation of its own formulas."""

import numpy as np
import pytest

from bench.gate.operating import (
    distribution_failures,
    first_token_runs,
    naive_false_verdicts,
    promoted_with_breaks,
    sampler,
    speed_decisions,
    speed_runs,
)
from paceline.gate.policy import Policy
from paceline.gate.verdict import decide
from support.gate_pairs import pairs


@pytest.mark.parametrize("correlation", [0.0, 1.0])
def test_equal_candidates_get_a_verdict_on_speed_in_less_than_a_run_of_twenty(correlation: float) -> None:
    rng = np.random.default_rng(0)
    assert speed_runs(1.0, runs=400, pairs=1000, rng=rng, correlation=correlation).decided <= 0.05


@pytest.mark.parametrize("ratio", [0.85, 1.0, 1.15])
def test_the_simulation_decides_as_the_gate_does(ratio: float) -> None:
    made = pairs(240, ratio, seed=5)
    legs = np.array([[leg.seconds for leg in pair.legs()] for pair in made]).T[:, None]
    # Of the 0.3 s of an answer, its first token takes 0.1 and each of the others 0.02.
    shares = {"ttft": 1 / 3, "tpot": 1 / 15, "end_to_end": 1.0}
    simulated = speed_decisions({name: tuple(share * legs) for name, share in shares.items()}, Policy())
    for n in (29, 30, 45, 80, 160, 240):
        findings = decide(made[:n], Policy()).findings
        status = {finding.check: finding.status for finding in findings}
        harm = "fail" in (status["ttft"], status["tpot"], status["end_to_end"])
        gain = "pass" in (status["tpot_gain"], status["end_to_end_gain"])
        harmless = {status["ttft"], status["tpot"], status["end_to_end"]} == {"pass"}
        flags = simulated.rolled_back, simulated.promoted, simulated.harmless
        assert (harm, gain, harmless) == tuple(flag[0, n - 1] for flag in flags), n


@pytest.mark.parametrize("increase_ms", [2.0, 5.0])
def test_a_few_milliseconds_are_no_harm_to_first_tokens_and_are_proven_harmless(increase_ms: float) -> None:
    given = {"runs": 300, "pairs": 400, "rng": np.random.default_rng(4)}
    runs = first_token_runs(increase_ms, **given)  # type: ignore[arg-type]
    assert runs.rolled_back_within(400) <= 0.05
    assert runs.harmless_within(100) >= 0.95
    by_ratio = Policy(max_ttft_increase_ms=0)
    assert first_token_runs(increase_ms, policy=by_ratio, **given).rolled_back_within(400) >= 0.95  # type: ignore[arg-type]


def test_more_than_both_margins_is_harm_and_is_not_proven_harmless_however_often_somebody_looks() -> None:
    rng = np.random.default_rng(5)
    assert first_token_runs(10.5, runs=1000, pairs=1000, rng=rng).harmless_within(1000) <= 0.05
    assert first_token_runs(25.0, runs=300, pairs=100, rng=rng).rolled_back_within(100) >= 0.95


def test_a_plain_test_would_be_wrong_in_a_third_of_the_runs() -> None:
    assert naive_false_verdicts(runs=200, pairs=1000, rng=np.random.default_rng(0)) > 0.3


def test_a_slowdown_of_a_tenth_is_found_within_200_pairs() -> None:
    rng = np.random.default_rng(1)
    assert speed_runs(1.1, runs=400, pairs=200, rng=rng).rolled_back_within(200) >= 0.9


def test_one_broken_schema_in_a_hundred_is_never_proven_harmless() -> None:
    rng = np.random.default_rng(2)
    assert promoted_with_breaks(0.01, runs=100, pairs=2000, rng=rng) <= 0.01
    assert promoted_with_breaks(0.0, runs=1, pairs=2000, rng=rng) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("prompts", "repeats"), [(20, 10), (200, 1)])
def test_a_biased_sampler_is_found_and_an_equal_one_is_not(prompts: int, repeats: int) -> None:
    rng = np.random.default_rng(3)
    biased = distribution_failures(sampler(0.6), runs=8, prompts=prompts, repeats=repeats, rng=rng)
    equal = distribution_failures(sampler(), runs=8, prompts=prompts, repeats=repeats, rng=rng)
    assert biased == 1.0
    assert equal == 0.0
