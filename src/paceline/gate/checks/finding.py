"""A finding, and the two ways to it: the mean of a paired log ratio, the mean of a paired difference.

Non-inferiority: a finding passes when the upper bound is below the margin. It fails when harm is proven, the
lower bound above zero, and the estimate exceeds the margin. Until then it is undecided: too little data never
passes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, isfinite, log
from typing import Any, Final, Literal

import numpy as np

from paceline.gate.pair import Pair
from paceline.gate.stats.bounded_mean import Counts, samples_for_upper_bound, upper_bound
from paceline.gate.stats.interval import Interval
from paceline.gate.stats.mean import MIN_SAMPLES, Floats, radius, samples_for_radius, spread

Status = Literal["pass", "fail", "undecided", "skipped"]
Family = Literal["speed", "quality", "operations", "cost"]
Unit = Literal["ratio", "ms", "difference", "share", "p-value"]
UNBOUNDED: Final = Interval()


@dataclass(frozen=True, slots=True)
class Alpha:
    """One-sided error rates of one finding."""

    proof: float  # that a pass is false
    harm: float  # that a fail is false


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    check: str
    family: Family
    unit: Unit
    status: Status = "skipped"
    estimate: float | None = None
    interval: Interval = UNBOUNDED
    margin: float | None = None
    pairs: int = 0  # that the check could use
    missing_pairs: int | None = None  # more pairs until it passes, if they go on like this; None: not known
    required: bool = True  # promotion waits until it passes; a fail counts in any case
    route: str | None = None  # None: all
    cohort: str | None = None
    message: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def segment(self) -> str:
        if self.route is None and self.cohort is None:
            return "all"
        return f"{self.route or '-'}/{self.cohort or '-'}"

    def to_dict(self) -> dict[str, Any]:
        bounds = [bound if isfinite(bound) else None for bound in (self.interval.lower, self.interval.upper)]
        return {
            "check": self.check,
            "family": self.family,
            "segment": self.segment,
            "route": self.route,
            "cohort": self.cohort,
            "status": self.status,
            "required": self.required,
            "unit": self.unit,
            "estimate": self.estimate,
            "interval": bounds,
            "margin": self.margin,
            "pairs": self.pairs,
            "missing_pairs": self.missing_pairs,
            "message": self.message,
            "details": dict(self.details),
        }


def skipped(check: str, family: Family, unit: Unit, why: str, *, required: bool = False) -> Finding:
    return Finding(check=check, family=family, unit=unit, required=required, message=why)


def status_of(estimate: float, interval: Interval, margin: float) -> Status:
    if interval.upper < margin:
        return "pass"
    return "fail" if interval.lower > 0 and estimate > margin else "undecided"


def difference_finding(
    check: str,
    family: Family,
    pairs: Sequence[Pair],
    difference: Callable[[Pair], float | None],
    margin: float,
    alpha: Alpha,
    *,
    required: bool = True,
    absent: str = "no pair has it",
) -> Finding:
    """difference: harm of the candidate over the baseline in one pair, -1 to 1; None: not applicable."""
    values = [value for pair in pairs if (value := difference(pair)) is not None]
    if not values:
        return skipped(check, family, "difference", absent)
    counts = Counts.of(np.array(values, dtype=float))
    bounds = Interval(-upper_bound(counts.mirrored(), alpha.harm), upper_bound(counts, alpha.proof))
    status = status_of(counts.mean, bounds, margin)
    needed = None if status != "undecided" else samples_for_upper_bound(counts, margin, alpha.proof)
    worse, better = sum(value > 0 for value in values), sum(value < 0 for value in values)
    return Finding(
        check=check,
        family=family,
        unit="difference",
        status=status,
        estimate=counts.mean,
        interval=bounds,
        margin=margin,
        pairs=len(values),
        missing_pairs=_missing(needed, len(values)),
        required=required,
        message=f"worse in {worse} of {len(values)} pairs, better in {better}",
    )


def log_ratio_finding(
    check: str,
    family: Family,
    pairs: Sequence[Pair],
    ratio: Callable[[Pair], float | None],
    max_ratio: float,
    alpha: Alpha,
    *,
    required: bool = True,
    absent: str = "no pair has it",
) -> Finding:
    """ratio: candidate over baseline in one pair, smaller is better. Estimate and interval are ratios too."""
    used = [(value, pair) for pair in pairs if (value := ratio(pair)) is not None and value > 0]
    if not used:
        return skipped(check, family, "ratio", absent, required=required)
    groups = conversations([pair for _, pair in used])
    finding = mean_ratio_finding(check, family, [value for value, _ in used], groups, max_ratio, alpha)
    times = finding.estimate or 0.0
    message = f"candidate takes {times:.3f} x the baseline (geometric mean of {len(used)} pairs)"
    return replace(finding, required=required, message=message)


def mean_ratio_finding(
    check: str,
    family: Family,
    ratios: Sequence[float],
    groups: "np.typing.NDArray[np.int64]",
    max_ratio: float,
    alpha: Alpha,
) -> Finding:
    """Of the geometric mean. groups: equal for ratios that depend on one another."""
    test = mean_test(np.log(np.array(ratios)), groups, log(max_ratio), alpha)
    bounds = test.interval
    return Finding(
        check=check,
        family=family,
        unit="ratio",
        status=test.status,
        estimate=exp(test.mean),
        interval=Interval(exp(bounds.lower), exp(bounds.upper) if isfinite(bounds.upper) else bounds.upper),
        margin=max_ratio,
        pairs=len(ratios),
        missing_pairs=test.missing,
        details={"log_spread": test.spread if isfinite(test.spread) else None},
    )


@dataclass(frozen=True, slots=True)
class MeanTest:
    """Is a mean below its margin? By a confidence sequence."""

    mean: float
    spread: float
    interval: Interval
    status: Status
    missing: int | None  # more samples until it passes


def mean_test(values: Floats, groups: "np.typing.NDArray[np.int64]", margin: float, alpha: Alpha) -> MeanTest:
    deviation = spread(values, groups)
    mean, n = float(values.mean()), len(values)
    bounds = UNBOUNDED
    if n >= MIN_SAMPLES:
        bounds = Interval(
            mean - radius(n, deviation, 2 * alpha.harm), mean + radius(n, deviation, 2 * alpha.proof)
        )
    status = status_of(mean, bounds, margin)
    needed = None
    if status == "undecided" and isfinite(deviation):
        needed = samples_for_radius(margin - mean, deviation, 2 * alpha.proof)
    return MeanTest(mean, deviation, bounds, status, _missing(needed, n))


def conversations(pairs: Sequence[Pair]) -> "np.typing.NDArray[np.int64]":
    """A number for each pair, equal within a conversation. Pairs without one are on their own."""
    names: dict[str, int] = {}
    return np.array(
        [names.setdefault(pair.conversation or f"pair {pair.id}", len(names)) for pair in pairs], np.int64
    )


def in_segment(finding: Finding, route: str | None, cohort: str | None, required: bool) -> Finding:
    return replace(finding, route=route, cohort=cohort, required=finding.required and required)


def _missing(needed: int | None, have: int) -> int | None:
    return None if needed is None else max(1, needed - have)
