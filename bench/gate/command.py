"""python -m bench gate: error rates and delays of the gate's verdicts, by simulation."""

import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Final

import numpy as np

from bench.gate import groundedness
from bench.gate.operating import (
    distribution_failures,
    first_token_runs,
    naive_false_verdicts,
    promoted_with_breaks,
    sampler,
    speed_runs,
    whole_verdicts,
)
from paceline.gate.policy import Policy

RATIOS_ALONE: Final = Policy(max_ttft_increase_ms=0, max_end_to_end_increase_ms=0)


def main(arguments: list[str]) -> None:
    parser = ArgumentParser("python -m bench gate")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    for line in chain(lines(given.runs, np.random.default_rng(given.seed)), groundedness.lines()):
        print(line, file=sys.stdout, flush=True)


def lines(runs: int, rng: np.random.Generator) -> Iterator[str]:
    few = max(20, runs // 20)
    naive = naive_false_verdicts(runs=runs, pairs=1000, rng=rng)
    yield f"a z-test at 5 % after each of 1,000 A/A pairs: {naive:.1%} false verdicts"
    for correlation in (1.0, 0.8, 0.0):
        at = f"latencies correlated {correlation:.1f}, spread 0.3"
        same = speed_runs(1.0, runs=runs, pairs=1000, rng=rng, correlation=correlation)
        slow = speed_runs(1.1, runs=runs, pairs=400, rng=rng, correlation=correlation)
        fast = speed_runs(0.8, runs=runs, pairs=400, rng=rng, correlation=correlation)
        proven = fast.promoted[:, :200].any(axis=-1).mean()
        within, median = slow.rolled_back_within(200), slow.median_pairs_to_roll_back
        yield f"A/A, 1,000 pairs, a look after each, {at}: {same.decided:.1%} false verdicts on speed"
        yield f"10 % slower, {at}: rolled back within 200 pairs in {within:.1%}, median {median:.0f} pairs"
        yield f"20 % less time, {at}: gain proven within 200 pairs in {proven:.1%}"
    for increase_ms in (0, 2, 5, 9, 11, 15, 25):
        small = first_token_runs(increase_ms, runs=runs, pairs=400, rng=rng)
        alone = first_token_runs(increase_ms, runs=runs, pairs=400, rng=rng, policy=RATIOS_ALONE)
        back, by_ratio = small.rolled_back_within(400), alone.rolled_back_within(400)
        at = f"first tokens after 15 ms come {increase_ms} ms later, 400 pairs, a look after each"
        yield f"{at}: rolled back in {back:.1%}, by the ratio alone in {by_ratio:.1%}"
        yield f"{at}: harmlessness proven in {small.harmless_within(400):.1%}"
    for ratio in (1.0, 0.8):
        verdicts = Counter(whole_verdicts(ratio, runs=few, pairs=400, every=40, rng=rng))
        shown = ", ".join(f"{decision} {count}" for decision, count in verdicts.most_common())
        yield f"all checks, ratio {ratio}, 400 pairs with equal texts, a look every 40, {few} runs: {shown}"
    for rate in (0.0, 0.005, 0.01, 0.02):
        open_ = promoted_with_breaks(rate, runs=few, pairs=3000, rng=rng)
        yield f"{rate:.1%} schema breaks in a cohort, 3,000 pairs: harmlessness proven in {open_:.1%} of runs"
    for name, candidate in (
        ("the same sampler", sampler()),
        ("temperature 0.9", sampler(0.9)),
        ("temperature 0.7", sampler(0.7)),
    ):
        for prompts, repeats in ((20, 10), (200, 1)):
            found = distribution_failures(candidate, runs=few, prompts=prompts, repeats=repeats, rng=rng)
            yield f"distribution check, {name}, {prompts} prompts x {repeats} answers: fails in {found:.1%}"
