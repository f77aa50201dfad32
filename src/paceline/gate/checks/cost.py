"""Cost: tokens, passes and GPU time, and the acceptance that explains them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from paceline.gate.checks.finding import Alpha, Finding, Status, log_ratio_finding, skipped
from paceline.gate.pair import Leg, Pair
from paceline.gate.policy import Policy
from paceline.gate.stats.bounded_mean import Counts, upper_bound
from paceline.gate.stats.interval import Interval


def tokens(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    """Completion tokens: a candidate that writes more costs more."""
    return _cost("cost_tokens", pairs, lambda leg: leg.completion_tokens, policy, alpha)


def passes(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    """Passes of the target model, where the upstream reports them."""
    return _cost("cost_passes", pairs, lambda leg: leg.passes, policy, alpha)


def gpu_seconds(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    """GPU seconds, where the upstream reports them."""
    finding = _cost("cost_gpu", pairs, lambda leg: leg.gpu_s, policy, alpha)
    used = [leg.gpu_utilization for pair in pairs for leg in pair.legs() if leg.gpu_utilization is not None]
    return replace(finding, details={**finding.details, "utilization": float(np.mean(used))} if used else {})


def _cost(
    check: str, pairs: Sequence[Pair], cost: Callable[[Leg], float | None], policy: Policy, alpha: Alpha
) -> Finding:
    def ratio(pair: Pair) -> float | None:
        baseline, candidate = cost(pair.baseline), cost(pair.candidate)
        return candidate / baseline if pair.ok and baseline and candidate else None

    return log_ratio_finding(
        check,
        "cost",
        pairs,
        ratio,
        policy.max_cost_ratio,
        alpha,
        required=False,
        absent="no upstream reports it",
    )


def acceptance(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    """Acceptance rate of the candidate's drafts, a mean over answers, and by position over all drafts."""
    legs = [pair.candidate for pair in pairs if pair.candidate.draft_tokens]
    if not legs:
        return skipped("acceptance", "cost", "share", "the candidate reports no drafts")
    rates = np.array([(leg.accepted_tokens or 0) / (leg.draft_tokens or 1) for leg in legs])
    counts = Counts.of(rates, 0.0, 1.0)
    bounds = Interval(-upper_bound(counts.mirrored(), alpha.proof), upper_bound(counts, alpha.harm))
    floor = policy.min_acceptance_rate
    status: Status = "pass" if bounds.lower >= floor else "fail" if bounds.upper < floor else "undecided"
    drafts = sum(leg.draft_passes for leg in legs)
    accepted = sum(leg.accepted_tokens or 0 for leg in legs)
    length = f", {1 + accepted / drafts:.2f} tokens per draft pass" if drafts else ""
    return Finding(
        check="acceptance",
        family="cost",
        unit="share",
        status=status,
        estimate=counts.mean,
        interval=bounds,
        margin=floor,
        pairs=len(legs),
        required=floor > 0,
        message=f"{counts.mean:.1%} of drafted tokens accepted{length}",
        details={"by_position": acceptance_by_position(legs)},
    )


def acceptance_by_position(legs: Sequence[Leg]) -> list[float]:
    """The share of draft passes accepted at least up to each position, as vLLM counts it."""
    drafts = sum(leg.draft_passes for leg in legs)
    deepest = max((len(leg.accepted_by_position) for leg in legs), default=0)
    accepted = np.zeros(deepest)
    for leg in legs:
        accepted[: len(leg.accepted_by_position)] += leg.accepted_by_position
    return [round(float(share), 4) for share in accepted / max(1, drafts)]
