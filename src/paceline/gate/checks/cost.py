"""Cost: tokens, passes and GPU time, and the acceptance that explains them.

By pairs where responses report them, or a replay has read the upstream's counters around each request.
Else by windows: the growth of both upstreams' counters over the same time, with whatever else they served.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final

import numpy as np

from paceline.gate.checks.finding import (
    Alpha,
    Finding,
    Status,
    log_ratio_finding,
    mean_ratio_finding,
    skipped,
)
from paceline.gate.pair import Leg, Pair
from paceline.gate.policy import Policy
from paceline.gate.stats.bounded_mean import Counts, upper_bound
from paceline.gate.stats.interval import Interval
from paceline.gate.upstream_metrics import UpstreamCounters, UpstreamWindow

MIN_WINDOW_TOKENS: Final = 100  # that both arms wrote
WINDOWS_IN_GROUP: Final = 10  # neighbours that count as one: load lasts longer than a window


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
    return _with_utilization(finding, used)


def _with_utilization(finding: Finding, used: Sequence[float]) -> Finding:
    return (
        replace(finding, details={**finding.details, "utilization": float(np.mean(used))})
        if used
        else finding
    )


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
    rates = [(leg.accepted_tokens or 0) / (leg.draft_tokens or 1) for leg in legs]
    accepted, drafts = sum(leg.accepted_tokens or 0 for leg in legs), sum(leg.draft_passes for leg in legs)
    return _acceptance(rates, accepted, drafts, acceptance_by_position(legs), policy, alpha)


def _acceptance(
    rates: Sequence[float],
    accepted: int,
    drafts: int,
    by_position: list[float],
    policy: Policy,
    alpha: Alpha,
) -> Finding:
    counts = Counts.of(np.array(rates), 0.0, 1.0)
    bounds = Interval(-upper_bound(counts.mirrored(), alpha.proof), upper_bound(counts, alpha.harm))
    floor = policy.min_acceptance_rate
    status: Status = "pass" if bounds.lower >= floor else "fail" if bounds.upper < floor else "undecided"
    length = f", {1 + accepted / drafts:.2f} tokens per draft pass" if drafts else ""
    return Finding(
        check="acceptance",
        family="cost",
        unit="share",
        status=status,
        estimate=counts.mean,
        interval=bounds,
        margin=floor,
        pairs=len(rates),
        required=floor > 0,
        message=f"{counts.mean:.1%} of drafted tokens accepted{length}",
        details={"by_position": by_position},
    )


def acceptance_by_position(legs: Sequence[Leg]) -> list[float]:
    """The share of draft passes accepted at least up to each position, as vLLM counts it."""
    return _by_position([leg.accepted_by_position for leg in legs], sum(leg.draft_passes for leg in legs))


def _by_position(accepted: Sequence[Sequence[int]], drafts: int) -> list[float]:
    total = np.zeros(max(map(len, accepted), default=0))
    for one in accepted:
        total[: len(one)] += one
    return [round(float(share), 4) for share in total / max(1, drafts)]


def passes_in_windows(windows: Sequence[UpstreamWindow], policy: Policy, alpha: Alpha) -> Finding:
    """Passes for a token."""
    return _windowed("cost_passes", windows, lambda grown, _: grown.passes, policy, alpha)


def gpu_in_windows(windows: Sequence[UpstreamWindow], policy: Policy, alpha: Alpha) -> Finding:
    """GPU time for a token."""
    finding = _windowed("cost_gpu", windows, lambda grown, seconds: grown.gpu_s(seconds), policy, alpha)
    used = list(chain.from_iterable(_utilization(window) for window in windows))
    return _with_utilization(finding, used)


def acceptance_in_windows(windows: Sequence[UpstreamWindow], policy: Policy, alpha: Alpha) -> Finding:
    """Of everything that the candidate drafted."""
    grown = [window.candidate for window in windows if window.candidate.draft_tokens]
    if not grown:
        return skipped("acceptance", "cost", "share", "the candidate reports no drafts")
    total = sum(grown, UpstreamCounters())
    by_position = _by_position([one.accepted_by_position for one in grown], total.drafts)
    rates = [min(1.0, one.acceptance) for one in grown]
    finding = _acceptance(rates, total.accepted_tokens, total.drafts, by_position, policy, alpha)
    return replace(finding, message=f"{finding.message}, by the upstream's counters in {len(grown)} windows")


IN_WINDOWS: Final[Mapping[str, Callable[[Sequence[UpstreamWindow], Policy, Alpha], Finding]]] = {
    "cost_passes": passes_in_windows,
    "cost_gpu": gpu_in_windows,
    "acceptance": acceptance_in_windows,
}


def _windowed(
    check: str,
    windows: Sequence[UpstreamWindow],
    cost: Callable[[UpstreamCounters, float], float | None],
    policy: Policy,
    alpha: Alpha,
) -> Finding:
    """The ratio of costs for a token. It cannot fail: load and mix of requests differ between upstreams."""

    def per_token(grown: UpstreamCounters, seconds: float) -> float | None:
        spent = cost(grown, seconds) if grown.generated_tokens >= MIN_WINDOW_TOKENS else None
        return spent / grown.generated_tokens if spent and spent > 0 else None

    costs = [(per_token(w.baseline, w.seconds), per_token(w.candidate, w.seconds)) for w in windows]
    ratios = [candidate / baseline for baseline, candidate in costs if baseline and candidate]
    if not ratios:
        return skipped(check, "cost", "ratio", "no upstream reports it")
    groups = np.arange(len(ratios)) // WINDOWS_IN_GROUP
    finding = mean_ratio_finding(check, "cost", ratios, groups, policy.max_cost_ratio, alpha)
    return replace(
        finding,
        status="undecided" if finding.status == "fail" else finding.status,
        missing_pairs=None,
        required=False,
        message=f"a token costs the candidate's upstream {finding.estimate or 0:.3f} x the baseline's, by "
        f"their counters in {len(ratios)} windows",
    )


def _utilization(window: UpstreamWindow) -> Iterable[float]:
    for grown in (window.baseline, window.candidate):
        if grown.engine_s is not None:
            yield min(1.0, grown.engine_s / window.seconds)
        elif grown.gpu_utilization is not None:
            yield grown.gpu_utilization
