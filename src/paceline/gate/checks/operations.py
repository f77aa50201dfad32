"""Operations: errors, retries, fallbacks, and what users say."""

from collections.abc import Sequence

import numpy as np

from paceline.gate.checks.finding import Alpha, Finding, difference_finding, skipped, status_of
from paceline.gate.pair import Arm, Feedback, Pair
from paceline.gate.policy import Policy
from paceline.gate.stats.bounded_mean import Counts, upper_bound
from paceline.gate.stats.interval import Interval


def errors(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    """Requests that got no answer."""

    def difference(pair: Pair) -> float:
        return float(not pair.candidate.ok) - float(not pair.baseline.ok)

    return difference_finding("errors", "operations", pairs, difference, policy.rate_margin, alpha)


def retries(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    def difference(pair: Pair) -> float:
        return float(pair.candidate.retries > 0) - float(pair.baseline.retries > 0)

    return difference_finding("retries", "operations", pairs, difference, policy.rate_margin, alpha)


def fallbacks(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    """Requests that another upstream had to answer."""

    def difference(pair: Pair) -> float:
        return float(pair.candidate.fallback) - float(pair.baseline.fallback)

    return difference_finding("fallbacks", "operations", pairs, difference, policy.rate_margin, alpha)


def feedback(given: Sequence[Feedback], policy: Policy, alpha: Alpha) -> Finding:
    """Thumbs down and escalations. Each user saw one leg: two rates, not paired.

    Never required: users answer rarely. Proven harm fails.
    """
    rates = {arm: _complaints(given, arm) for arm in ("baseline", "candidate")}
    baseline, candidate = rates["baseline"], rates["candidate"]
    if not baseline.n or not candidate.n:
        return skipped("feedback", "operations", "difference", "users of both legs must have answered")
    bounds = Interval(
        -upper_bound(candidate.mirrored(), alpha.harm / 2) - upper_bound(baseline, alpha.harm / 2),
        upper_bound(candidate, alpha.proof / 2) + upper_bound(baseline.mirrored(), alpha.proof / 2),
    )
    estimate = candidate.mean - baseline.mean
    return Finding(
        check="feedback",
        family="operations",
        unit="difference",
        status=status_of(estimate, bounds, policy.score_margin),
        estimate=estimate,
        interval=bounds,
        margin=policy.score_margin,
        pairs=int(min(baseline.n, candidate.n)),
        required=False,
        message=f"complaints: baseline {baseline.mean:.1%} of {baseline.n:.0f}, "
        f"candidate {candidate.mean:.1%} of {candidate.n:.0f}",
    )


def _complaints(given: Sequence[Feedback], arm: Arm) -> Counts:
    values = [float(one.thumbs == "down" or one.escalation) for one in given if one.arm == arm]
    return Counts.of(np.array(values, dtype=float), 0.0, 1.0)
