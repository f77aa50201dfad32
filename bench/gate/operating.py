"""Operating characteristics of the gate: simulated pairs, a look after every pair, its own formulas."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import NDArray

from paceline.gate.checks.agreement import distribution
from paceline.gate.checks.finding import Alpha
from paceline.gate.pair import Leg, Pair
from paceline.gate.policy import DISTRIBUTION_SHARE, HARM_SHARE, INCREASE_SHARE, LATENCY_WEIGHTS, Policy
from paceline.gate.stats.bounded_mean import running_log_wealth_below
from paceline.gate.stats.mean import MIN_SAMPLES, running_radius
from paceline.gate.verdict import GAINS, decide

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


Times = tuple[Floats, Floats]  # of baseline and candidate, in seconds


@dataclass(frozen=True, slots=True)
class SpeedRuns:
    """One row for each run, one column for each look."""

    promoted: Flags  # a gain was proven
    rolled_back: Flags
    harmless: Flags  # by every latency check

    @property
    def decided(self) -> float:
        """The share of runs in which somebody who looks after every pair ever saw a verdict on speed."""
        return float((self.promoted | self.rolled_back).any(axis=-1).mean())

    def rolled_back_within(self, pairs: int) -> float:
        return float(self.rolled_back[:, :pairs].any(axis=-1).mean())

    def harmless_within(self, pairs: int) -> float:
        return float(self.harmless[:, :pairs].any(axis=-1).mean())

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
    """Log ratios of the three latencies around log(ratio), over baselines around a second.

    correlation: of the three. At 1 they are one number, the hardest case for finding harm.
    """
    shared = rng.normal(size=(runs, pairs))
    baseline = np.exp(0.5 * rng.normal(size=(runs, pairs)))
    times = {}
    for name in LATENCY_WEIGHTS:
        own = rng.normal(size=(runs, pairs))
        noise = correlation**0.5 * shared + (1 - correlation) ** 0.5 * own
        times[name] = baseline, baseline * ratio * np.exp(spread * noise)
    return speed_decisions(times, policy or Policy())


def first_token_runs(
    increase_ms: float, *, runs: int, pairs: int, rng: np.random.Generator, policy: Policy | None = None
) -> SpeedRuns:
    """First tokens after about 15 ms come so much later; answers take half of their 150 ms."""

    def times(baseline_s: float, ratio: float, increase_s: float) -> Times:
        load, noise = np.exp(0.1 * rng.normal(size=(2, runs, pairs)))
        return baseline_s * load, baseline_s * load * ratio * noise + increase_s

    rest = {name: times(0.15, 0.5, 0.0) for name in LATENCY_WEIGHTS if name != "ttft"}
    return speed_decisions({"ttft": times(0.015, 1.0, increase_ms / 1000), **rest}, policy or Policy())


def speed_decisions(times: Mapping[str, Times], policy: Policy) -> SpeedRuns:
    """The gate's decisions after each pair, for many runs at once, by latency check."""
    promoted, rolled_back = (np.zeros(times["tpot"][0].shape, dtype=bool) for _ in range(2))
    harmless = np.ones(times["tpot"][0].shape, dtype=bool)
    for name, weight in LATENCY_WEIGHTS.items():
        baseline, candidate = times[name]
        logs = np.log(candidate / baseline)
        max_ratio, max_ms = (getattr(policy, f"max_{name}_{kind}") for kind in ("ratio", "increase_ms"))
        share, harm = INCREASE_SHARE if max_ms else 0.0, policy.alpha * HARM_SHARE * weight
        harmful, proven = _against_margin(logs, log(max_ratio), Alpha(policy.alpha * (1 - share), harm))
        if max_ms:
            by_ms = Alpha(policy.alpha * share, harm)
            more, little = _against_margin(1000 * (candidate - baseline), max_ms, by_ms)
            harmful, proven = harmful & more & ~proven & ~little, proven | little
        rolled_back |= harmful
        harmless &= proven
        if name != "ttft":
            gain = policy.alpha * (1 - HARM_SHARE) / len(GAINS)
            promoted |= _against_margin(logs, -log(policy.min_speedup), Alpha(gain, gain))[1]
    return SpeedRuns(promoted, rolled_back, harmless)


def _against_margin(values: Floats, margin: float, alpha: Alpha) -> tuple[Flags, Flags]:
    """Whether the mean is proven harmful, and whether it is proven below the margin, after each value."""
    n, mean, deviation = running_moments(values)
    enough = n >= MIN_SAMPLES
    below = enough & (mean + running_radius(n, deviation, 2 * alpha.proof) < margin)
    above = enough & (mean - running_radius(n, deviation, 2 * alpha.harm) > 0) & (mean > margin)
    return above & ~below, below


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
