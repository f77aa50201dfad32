"""Latency: paired, so that what both legs share (prompt, length, load) cancels out.

TPOT is (last chunk - first chunk) / (tokens after the first chunk). Gaps between chunks are never compared:
speculation puts several tokens into one chunk.

A margin is a ratio or a time, whichever allows more: 1.16 x is harm at 500 ms and nothing at 15 ms. Each has
an interval of its own, of log ratios and of differences. No harm is proven by either of them, so that they
share the error rate of that proof; harm takes both, so that each may use the whole of the other one.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from functools import partial
from math import isfinite, log, sqrt

import numpy as np

from paceline.gate.checks.finding import (
    Alpha,
    Finding,
    MeanTest,
    Status,
    conversations,
    difference_finding,
    log_ratio_finding,
    mean_test,
    skipped,
    status_of,
)
from paceline.gate.pair import Leg, Pair
from paceline.gate.policy import INCREASE_SHARE, Policy
from paceline.gate.stats.interval import Interval
from paceline.gate.stats.mean import MIN_SAMPLES, radius, spread
from paceline.gate.stats.quantile import quantile_interval, samples_for_upper

BothTimes = tuple[float, float]  # of baseline and candidate, in seconds
Times = Callable[[Pair], BothTimes | None]

_CACHE_TOLERANCE = 0.1  # of the prompt


def ttft(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    margins = policy.max_ttft_ratio, policy.max_ttft_increase_ms
    return _latency("ttft", pairs, ttft_times, *margins, alpha)


def tpot(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    """Required unless no answer was streamed: whole answers have no TPOT, and `end_to_end` covers them."""
    streamed = any(len(leg.chunk_s) > 1 for pair in pairs for leg in pair.legs())
    margins = policy.max_tpot_ratio, policy.max_tpot_increase_ms
    return _latency("tpot", pairs, tpot_times, *margins, alpha, required=streamed)


def end_to_end(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    margins = policy.max_end_to_end_ratio, policy.max_end_to_end_increase_ms
    return _latency("end_to_end", pairs, end_to_end_times, *margins, alpha)


def _latency(
    check: str,
    pairs: Sequence[Pair],
    times: Times,
    max_ratio: float,
    max_increase_ms: float,
    alpha: Alpha,
    *,
    required: bool = True,
) -> Finding:
    """In the unit of the margin that is met, or else of the one that allows more."""
    share = INCREASE_SHARE if max_increase_ms else 0.0
    by_ratio = Alpha(alpha.proof * (1 - share), alpha.harm)
    ratio = partial(_ratio, times)
    finding = log_ratio_finding(check, "speed", pairs, ratio, max_ratio, by_ratio, required=required)
    if not max_increase_ms or finding.status == "skipped":
        return finding
    used = [(seconds, pair) for pair in pairs if (seconds := times(pair)) is not None]
    baseline, candidate = 1000 * np.array([seconds for seconds, _ in used]).T
    groups = conversations([pair for _, pair in used])
    by_ms = Alpha(alpha.proof * share, alpha.harm)
    increase = mean_test(candidate - baseline, groups, max_increase_ms, by_ms)
    status = _either(finding.status, increase.status)
    ways = filter(None, (finding.missing_pairs, increase.missing))
    allowed = f"allowed are {max_ratio:g} x or {max_increase_ms:g} ms more"
    both = replace(
        finding,
        status=status,
        missing_pairs=min(ways, default=None) if status == "undecided" else None,
        message=f"{finding.message}, {_more_ms(increase)}; {allowed}",
        details={**finding.details, "increase_ms": increase.mean, "max_increase_ms": max_increase_ms},
    )
    more_in_ms = max_increase_ms > (max_ratio - 1) * float(baseline.mean())
    if finding.status == "pass" or not (more_in_ms or increase.status == "pass"):
        return both
    return replace(
        both, unit="ms", estimate=increase.mean, interval=increase.interval, margin=max_increase_ms
    )


def _either(ratio: Status, increase: Status) -> Status:
    if "pass" in (ratio, increase):
        return "pass"
    return "fail" if ratio == increase == "fail" else "undecided"


def _more_ms(increase: MeanTest) -> str:
    return f"{abs(increase.mean):.3g} ms {'more' if increase.mean >= 0 else 'less'} on average"


def tpot_gain(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    return _gain("tpot_gain", pairs, tpot_ratio, policy, alpha)


def end_to_end_gain(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    return _gain("end_to_end_gain", pairs, end_to_end_ratio, policy, alpha)


def _gain(
    check: str, pairs: Sequence[Pair], ratio: Callable[[Pair], float | None], policy: Policy, alpha: Alpha
) -> Finding:
    """Superiority: passes when the ratio is proven below 1 / min_speedup. It cannot fail."""
    finding = log_ratio_finding(check, "speed", pairs, ratio, 1 / policy.min_speedup, alpha, required=False)
    return replace(finding, status="undecided") if finding.status == "fail" else finding


def ttft_quantile(p: float, pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    margins = max(policy.max_quantile_ratio, policy.max_ttft_ratio), policy.max_ttft_increase_ms
    return _quantile("ttft", p, pairs, ttft_times, *margins, alpha)


def tpot_quantile(p: float, pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    margins = max(policy.max_quantile_ratio, policy.max_tpot_ratio), policy.max_tpot_increase_ms
    return _quantile("tpot", p, pairs, tpot_times, *margins, alpha)


def end_to_end_quantile(p: float, pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    margins = max(policy.max_quantile_ratio, policy.max_end_to_end_ratio), policy.max_end_to_end_increase_ms
    return _quantile("end_to_end", p, pairs, comparable_times, *margins, alpha)


def _quantile(
    name: str,
    p: float,
    pairs: Sequence[Pair],
    times: Times,
    max_ratio: float,
    max_increase_ms: float,
    alpha: Alpha,
) -> Finding:
    """The ratio of two quantiles: bounds by order statistics on either leg. Never required: a tail of 1 %
    needs hundreds of pairs before it has a bound at all."""
    check = f"{name}_p{round(100 * p)}"
    used = [seconds for pair in pairs if (seconds := times(pair)) is not None]
    if not used:
        return skipped(check, "speed", "ratio", "no pair has it")
    baseline, candidate = np.array(used).T
    wide, narrow = alpha.proof / 2, alpha.harm / 2  # either leg may err
    b_proof, c_proof = quantile_interval(baseline, p, wide), quantile_interval(candidate, p, wide)
    b_harm, c_harm = quantile_interval(baseline, p, narrow), quantile_interval(candidate, p, narrow)
    upper = c_proof.upper / b_proof.lower if b_proof.lower > 0 else float("inf")
    lower = c_harm.lower / b_harm.upper if c_harm.lower > 0 else 0.0
    b, c = float(np.quantile(baseline, p)), float(np.quantile(candidate, p))
    status = status_of(c / b - 1, Interval(lower - 1, upper - 1), max_ratio - 1)
    more = Interval(c_harm.lower - b_harm.upper, c_proof.upper - b_proof.lower)  # of the same bounds
    if max_increase_ms:
        status = _either(status, status_of(c - b, more, max_increase_ms / 1000))
    needed = samples_for_upper(p, wide)
    few = f"; an upper bound needs {needed} pairs" if len(used) < needed else ""
    return Finding(
        check=check,
        family="speed",
        unit="ratio",
        status=status,
        estimate=c / b,
        interval=Interval(lower, upper),
        margin=max_ratio,
        pairs=len(used),
        missing_pairs=max(0, needed - len(used)) or None,
        required=False,
        message=f"p{round(100 * p)} of baseline and candidate: {1000 * b:.3g} and {1000 * c:.3g} ms{few}",
    )


def latency_variance(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    """Variance of end-to-end time. With u = c + b and v = c - b, cov(u, v) = var(c) - var(b)."""
    used = [(both, pair) for pair in pairs if (both := comparable_times(pair)) is not None]
    if len(used) < MIN_SAMPLES:
        return skipped("latency_variance", "speed", "ratio", f"needs {MIN_SAMPLES} pairs")
    b, c = np.array([both for both, _ in used]).T
    product = (c + b - (c + b).mean()) * (c - b - (c - b).mean())
    variance = float(b.var())
    if variance == 0:
        return skipped("latency_variance", "speed", "ratio", "the baseline's times do not vary")
    n, deviation = len(used), spread(product, conversations([pair for _, pair in used]))
    difference = float(product.mean())
    bounds = Interval(
        1 + (difference - radius(n, deviation, 2 * alpha.harm)) / variance,
        1 + (difference + radius(n, deviation, 2 * alpha.proof)) / variance,
    ).clipped(0, float("inf"))
    estimate = 1 + difference / variance
    margin = policy.max_variance_ratio
    status = status_of(estimate - 1, Interval(bounds.lower - 1, bounds.upper - 1), margin - 1)
    before, now, low, high = (1000 * sqrt(variance * max(0.0, x)) for x in (1.0, estimate, *astuple(bounds)))
    if max_ms := policy.max_end_to_end_increase_ms:
        status = _either(status, status_of(now - before, Interval(low - before, high - before), max_ms))
    return Finding(
        check="latency_variance",
        family="speed",
        unit="ratio",
        status=status,
        estimate=estimate,
        interval=bounds,
        margin=margin,
        pairs=n,
        required=False,
        message=f"variance of end-to-end time is {estimate:.2f} x the baseline's; standard deviations "
        f"{before:.3g} and {now:.3g} ms",
    )


def timeouts(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    """Answers that came after a tool or a turn would have given up, where the other leg came in time."""

    def crossed(leg: Leg) -> int:
        if leg.error == "timeout":
            return len(policy.timeouts_s)
        return sum(leg.seconds > limit for limit in policy.timeouts_s)

    def difference(pair: Pair) -> float | None:
        if any(leg.error is not None and leg.error != "timeout" for leg in pair.legs()):
            return None
        return float(np.sign(crossed(pair.candidate) - crossed(pair.baseline)))

    return difference_finding("timeouts", "speed", pairs, difference, policy.rate_margin, alpha)


def ttft_times(pair: Pair) -> BothTimes | None:
    if not pair.ok or not same_cache(pair):
        return None
    return _both(pair.baseline.ttft_s, pair.candidate.ttft_s)


def tpot_times(pair: Pair) -> BothTimes | None:
    return _both(pair.baseline.tpot_s, pair.candidate.tpot_s) if pair.ok else None


def end_to_end_times(pair: Pair) -> BothTimes | None:
    return comparable_times(pair) if same_cache(pair) else None


def comparable_times(pair: Pair) -> BothTimes | None:
    """Whatever was cached: users wait as long for either reason."""
    return _both(*comparable_seconds(pair)) if pair.ok else None


def tpot_ratio(pair: Pair) -> float | None:
    return _ratio(tpot_times, pair)


def end_to_end_ratio(pair: Pair) -> float | None:
    return _ratio(end_to_end_times, pair)


def comparable_seconds(pair: Pair) -> tuple[float | None, float | None]:
    """End-to-end times for answers of the baseline's length, which sampling may change.

    A candidate's answer of another length counts as TTFT + TPOT (n - tokens of its first chunk), with the
    baseline's n.
    """
    baseline, candidate = pair.legs()
    tokens = baseline.completion_tokens
    if tokens == candidate.completion_tokens:
        return baseline.seconds, candidate.seconds
    if tokens is None or candidate.ttft_s is None or candidate.tpot_s is None:
        return baseline.seconds, None
    return baseline.seconds, candidate.ttft_s + candidate.tpot_s * max(0, tokens - candidate.first_tokens)


def same_cache(pair: Pair) -> bool:
    """Both legs had about as much of the prompt in their caches: else the first token tells nothing."""
    baseline, candidate = pair.legs()
    if baseline.cached_tokens is None or candidate.cached_tokens is None:
        return True
    allowed = _CACHE_TOLERANCE * max(1, baseline.prompt_tokens or 0)
    return abs(baseline.cached_tokens - candidate.cached_tokens) <= allowed


def _ratio(times: Times, pair: Pair) -> float | None:
    both = times(pair)
    return None if both is None else both[1] / both[0]


def _both(baseline: float | None, candidate: float | None) -> BothTimes | None:
    if not baseline or not candidate or not isfinite(log(candidate / baseline)):
        return None
    return baseline, candidate
