"""Error rates of the gate while somebody looks after every pair, by simulation of its own formulas."""

import numpy as np
import pytest

from bench.gate.operating import (
    distribution_failures,
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
    logs = np.log([[pair.candidate.seconds / pair.baseline.seconds for pair in made]])
    simulated = speed_decisions(dict.fromkeys(("ttft", "tpot", "end_to_end"), logs), Policy())
    for n in (29, 30, 45, 80, 160, 240):
        findings = decide(made[:n], Policy()).findings
        status = {finding.check: finding.status for finding in findings}
        harm = "fail" in (status["ttft"], status["tpot"], status["end_to_end"])
        gain = "pass" in (status["tpot_gain"], status["end_to_end_gain"])
        assert (harm, gain) == (simulated.rolled_back[0, n - 1], simulated.promoted[0, n - 1]), n


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
