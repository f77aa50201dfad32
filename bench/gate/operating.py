"""Operating characteristics of the gate: simulated pairs, a look after every pair, its own formulas."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import NDArray

from paceline.gate.checks.agreement import distribution
from paceline.gate.checks.finding import Alpha
from paceline.gate.pair import Leg, Pair
from paceline.gate.policy import DISTRIBUTION_SHARE, HARM_SHARE, LATENCY_WEIGHTS, Policy
from paceline.gate.stats.bounded_mean import running_log_wealth_below
from paceline.gate.stats.mean import MIN_SAMPLES, running_radius
from paceline.gate.verdict import GAINS, decide

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SpeedRuns:
    """One row for each run, one column for each look."""

    promoted: Flags  # a gain was proven
    rolled_back: Flags

    @property
    def decided(self) -> float:
        """The share of runs in which somebody who looks after every pair ever saw a verdict on speed."""
        return float((self.promoted | self.rolled_back).any(axis=-1).mean())

    def rolled_back_within(self, pairs: int) -> float:
        return float(self.rolled_back[:, :pairs].any(axis=-1).mean())

    @property
    def median_pairs_to_roll_back(self) -> float:
        first = np.where(self.rolled_back.any(axis=-1), self.rolled_back.argmax(axis=-1) + 1.0, np.inf)
        return float(np.median(first))


def speed_runs(
    ratio: float,
    *,
    runs: int,
    pairs: int,
    rng: np.random.Generator,
    spread: float = 0.3,
    correlation: float = 1.0,
    policy: Policy | None = None,
) -> SpeedRuns:
    """Log ratios of the three latencies around log(ratio).

    correlation: of the three. At 1 they are one number, the hardest case for finding harm.
    """
    shared = rng.normal(size=(runs, pairs))
    logs = {}
    for name in LATENCY_WEIGHTS:
        own = rng.normal(size=(runs, pairs))
        noise = correlation**0.5 * shared + (1 - correlation) ** 0.5 * own
        logs[name] = log(ratio) + spread * noise
    return speed_decisions(logs, policy or Policy())


def speed_decisions(logs: Mapping[str, Floats], policy: Policy) -> SpeedRuns:
    """The gate's decisions after each pair, for many runs at once. logs: log ratios by latency check."""
    promoted = np.zeros(logs["tpot"].shape, dtype=bool)
    rolled_back = np.zeros(logs["tpot"].shape, dtype=bool)
    for name, weight in LATENCY_WEIGHTS.items():
        n, mean, deviation = running_moments(logs[name])
        enough = n >= MIN_SAMPLES
        harm = policy.alpha * HARM_SHARE * weight
        lower = mean - running_radius(n, deviation, 2 * harm)
        rolled_back |= enough & (lower > 0) & (mean > log(getattr(policy, f"max_{name}_ratio")))
        if name != "ttft":
            gain = policy.alpha * (1 - HARM_SHARE) / len(GAINS)
            promoted |= enough & (mean + running_radius(n, deviation, 2 * gain) < -log(policy.min_speedup))
    return SpeedRuns(promoted, rolled_back)


def running_moments(values: Floats) -> tuple[Floats, Floats, Floats]:
    """Number, mean and standard deviation after each value of the last axis."""
    n = np.arange(1, values.shape[-1] + 1, dtype=float)
    mean = values.cumsum(axis=-1) / n
    variance = np.maximum(0, (values**2).cumsum(axis=-1) / n - mean**2) * n / np.maximum(1, n - 1)
    return n, mean, np.sqrt(variance)


def naive_false_verdicts(*, runs: int, pairs: int, rng: np.random.Generator, spread: float = 0.3) -> float:
    """The share of A/A runs in which a z-test at 5 % after every pair ever finds a difference."""
    n, mean, deviation = running_moments(spread * rng.normal(size=(runs, pairs)))
    return float(((np.abs(mean) > 1.96 * deviation / np.sqrt(n)) & (n >= MIN_SAMPLES)).any(axis=-1).mean())


def whole_verdicts(ratio: float, *, runs: int, pairs: int, every: int, rng: np.random.Generator) -> list[str]:
    """The first verdict that is not "hold" of each run, by all checks together; else "hold"."""
    verdicts = []
    for _ in range(runs):
        made = [
            timed_pair(i, ratio * np.exp(0.3 * rng.normal()), np.exp(0.5 * rng.normal()))
            for i in range(pairs)
        ]
        looks = (decide(made[:n], Policy()).decision for n in range(every, pairs + 1, every))
        verdicts.append(next((look for look in looks if look != "hold"), "hold"))
    return verdicts


def timed_pair(number: int, ratio: float, scale: float) -> Pair:
    """Greedy, with equal texts of 20 tokens. scale: of both legs."""

    def leg(seconds: float) -> Leg:
        times = tuple(seconds * (5 + i) / 25 for i in range(21))
        return Leg(
            status=200,
            finish_reason="stop",
            seconds=times[-1],
            chunk_s=times,
            completion_tokens=21,
            text="same",
        )

    pair = Pair(id=str(number), created=0.0, baseline=leg(scale), candidate=leg(scale * ratio), temperature=0)
    return pair.compared()


def promoted_with_breaks(
    rate: float, *, runs: int, pairs: int, rng: np.random.Generator, policy: Policy | None = None
) -> float:
    """The share of runs in which a cohort that breaks its schemas at this rate is ever proven harmless."""
    policy = policy or Policy()
    broken = (rng.random((runs, pairs)) < rate).astype(float)
    wealth = running_log_wealth_below(broken, policy.schema_margin)
    return float((wealth >= log(1 / policy.alpha)).any(axis=-1).mean())


Sampler = Callable[[np.random.Generator, int], list[str]]
WORDS = ("the", "a", "flight", "is", "late", "on", "time", "today", "gate", "open", "closed", "now", ".")


def sampler(temperature: float = 1.0, words: int = 12) -> Sampler:
    """Texts of a fixed unigram model, sharpened or flattened by the temperature."""
    logits = np.log(np.arange(1, len(WORDS) + 1)[::-1] ** 1.2)
    weights = np.exp(logits / temperature)

    def sample(rng: np.random.Generator, count: int) -> list[str]:
        ids = rng.choice(len(WORDS), (count, words), p=weights / weights.sum())
        return [" ".join(WORDS[i] for i in row) for row in ids]

    return sample


def distribution_failures(
    candidate: Sampler,
    *,
    runs: int,
    prompts: int,
    repeats: int,
    rng: np.random.Generator,
    policy: Policy | None = None,
) -> float:
    """The share of runs in which the distribution check fails; `repeats` answers to each prompt."""
    policy = policy or Policy()
    harm = policy.alpha * DISTRIBUTION_SHARE
    baseline = sampler()
    failures = 0
    for _ in range(runs):
        texts = zip(baseline(rng, prompts * repeats), candidate(rng, prompts * repeats), strict=True)
        pairs = [
            sampled_pair(f"{i}", str(i % prompts), before, after) for i, (before, after) in enumerate(texts)
        ]
        failures += distribution(pairs, policy, Alpha(policy.alpha, harm)).status == "fail"
    return failures / runs


def sampled_pair(id: str, prompt: str, baseline: str, candidate: str) -> Pair:
    return Pair(
        id=id,
        created=0.0,
        baseline=Leg(status=200, finish_reason="stop", text=baseline),
        candidate=Leg(status=200, finish_reason="stop", text=candidate),
        prompt_hash=prompt,
        temperature=1.0,
    ).compared()
