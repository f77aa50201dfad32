"""The verdict: a pure function of pairs and policy, so that it can be repeated.

promote     quality proven non-inferior, overall and in every segment of some size, and a proven gain in speed
roll back   harm proven by any check in any segment
hold        otherwise, with the number of pairs that are missing

Error rates. A promotion needs all proofs at once, so that each may use the whole alpha (intersection-union
test). Harm needs only one: alpha is divided among the checks, one half of it for all pairs together and the
other among the segments. The speed checks and the others have an alpha each.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any, Final, Literal

from paceline.gate.checks import agreement, cost, latency, operations, quality
from paceline.gate.checks.finding import Alpha, Finding, in_segment
from paceline.gate.pair import Feedback, Pair
from paceline.gate.policy import DISTRIBUTION_SHARE, HARM_SHARE, LATENCY_WEIGHTS, Policy
from paceline.gate.upstream_metrics import UpstreamWindow

Decision = Literal["promote", "hold", "roll back"]
Check = Callable[[Sequence[Pair], Policy, Alpha], Finding]

LATENCY: Final[Mapping[str, Check]] = {
    "ttft": latency.ttft,
    "tpot": latency.tpot,
    "end_to_end": latency.end_to_end,
}
GAINS: Final[tuple[Check, ...]] = (latency.tpot_gain, latency.end_to_end_gain)
QUANTILES: Final[tuple[Check, ...]] = tuple(
    partial(check, p)
    for check in (latency.ttft_quantile, latency.tpot_quantile, latency.end_to_end_quantile)
    for p in (0.50, 0.99)
)
TAILS: Final[tuple[Check, ...]] = (latency.latency_variance, latency.timeouts)
CONTENT: Final[tuple[Check, ...]] = (  # checks that read the answers
    agreement.text_agreement,
    quality.schema_validity,
    quality.tool_calls,
    quality.tool_call_match,
    quality.groundedness,
    quality.task_completion,
    quality.judge,
)
OTHERS: Final[tuple[Check, ...]] = (
    quality.truncation,
    quality.stop_parity,
    operations.errors,
    operations.retries,
    operations.fallbacks,
    cost.tokens,
    cost.passes,
    cost.gpu_seconds,
    cost.acceptance,
)
EXIT_CODES: Final[Mapping[Decision, int]] = {"promote": 0, "hold": 3, "roll back": 4}
_CONTENT_NAMES: Final = {"distribution", *(check.__name__ for check in CONTENT)}
_NO_CONTENT: Final = "no check has read the answers: record texts, or use greedy requests or a suite"


@dataclass(frozen=True, slots=True)
class Verdict:
    decision: Decision
    reasons: tuple[str, ...]  # the checks that decided, or that are missing
    pairs: int
    findings: tuple[Finding, ...]
    missing_pairs: int | None  # of all pairs, if they go on like this; None: not known
    policy: Policy

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.decision]

    @property
    def headline(self) -> str:
        more = f"; about {self.missing_pairs:,} more pairs are needed" if self.missing_pairs else ""
        return f"{self.decision} after {self.pairs:,} pairs{more}"

    @property
    def summary(self) -> str:
        return f"{self.headline}: {'; '.join(self.reasons)}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.decision,
            "pairs": self.pairs,
            "missing_pairs": self.missing_pairs,
            "reasons": list(self.reasons),
            "policy_hash": self.policy.hash,
            "policy": self.policy.model_dump(mode="json"),
            "findings": [finding.to_dict() for finding in self.findings],
        }


def decide(
    pairs: Sequence[Pair],
    policy: Policy,
    feedback: Sequence[Feedback] = (),
    windows: Sequence[UpstreamWindow] = (),
) -> Verdict:
    """windows: of the upstreams' counters, for costs that the pairs do not have."""
    findings = all_findings(pairs, policy, feedback, windows)
    if failed := [finding for finding in findings if finding.status == "fail"]:
        harm = tuple(_describe(finding) for finding in failed)
        return Verdict("roll back", harm, len(pairs), findings, None, policy)
    missing = [f for f in findings if f.required and f.status != "pass"]
    gains = [f for f in findings if f.check in ("tpot_gain", "end_to_end_gain")]
    gained = any(gain.status == "pass" for gain in gains)
    content = [f for f in findings if f.check in _CONTENT_NAMES and f.status != "skipped"]
    read = any(f.status == "pass" for f in content)
    if pairs and gained and read and not missing:
        faster = [_describe(gain) for gain in gains if gain.status == "pass"]
        return Verdict("promote", tuple(faster), len(pairs), findings, 0, policy)
    reasons = [_describe(finding) for finding in missing]
    if not gained:
        reasons.append("no gain in speed is proven")
    if not content:
        reasons.append(_NO_CONTENT)
    more = _missing_pairs(missing, [] if gained else gains, len(pairs))
    return Verdict("hold", tuple(reasons), len(pairs), findings, more, policy)


def all_findings(
    pairs: Sequence[Pair],
    policy: Policy,
    feedback: Sequence[Feedback] = (),
    windows: Sequence[UpstreamWindow] = (),
) -> tuple[Finding, ...]:
    """Of all pairs together, then of each segment where there are several."""
    segments: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for pair in pairs:
        segments[pair.segment].append(pair)
    several = len(segments) > 1
    findings = findings_of(pairs, policy, 0.5 if several else 1.0)
    if windows:
        alpha = Alpha(policy.alpha, _others_harm(policy, 0.5 if several else 1.0))
        findings = [_by_windows(finding, windows, policy, alpha) for finding in findings]
    findings += [_gain(check, pairs, policy) for check in GAINS]
    findings.append(operations.feedback(feedback, policy, Alpha(policy.alpha, _others_harm(policy, 1.0))))
    if several:
        for (route, cohort), members in sorted(segments.items()):
            required = len(members) >= policy.min_segment_share * len(pairs)
            share = 0.5 / len(segments)
            findings += [
                in_segment(finding, route, cohort, required and finding.family in ("quality", "operations"))
                for finding in findings_of(members, policy, share)
            ]
    return tuple(findings)


def findings_of(pairs: Sequence[Pair], policy: Policy, harm_share: float) -> list[Finding]:
    """harm_share: of each family's error rate, for proofs of harm."""
    proof = policy.alpha
    speed = policy.alpha * HARM_SHARE * harm_share
    findings = [
        check(pairs, policy, Alpha(proof, speed * LATENCY_WEIGHTS[name])) for name, check in LATENCY.items()
    ]
    others = Alpha(proof, _others_harm(policy, harm_share))
    each = Alpha(proof, others.harm / len(QUANTILES))
    findings += [check(pairs, policy, each) for check in QUANTILES]
    findings += [check(pairs, policy, others) for check in (*TAILS, *CONTENT, *OTHERS)]
    sampled = Alpha(proof, policy.alpha * DISTRIBUTION_SHARE * harm_share)
    return [*findings, agreement.distribution(pairs, policy, sampled)]


def _by_windows(finding: Finding, windows: Sequence[UpstreamWindow], policy: Policy, alpha: Alpha) -> Finding:
    check = cost.IN_WINDOWS.get(finding.check)
    return finding if finding.status != "skipped" or check is None else check(windows, policy, alpha)


def _others_harm(policy: Policy, share: float) -> float:
    checks = len(TAILS) + len(CONTENT) + len(OTHERS) + 2  # feedback, and all quantiles together
    return policy.alpha * (1 - DISTRIBUTION_SHARE) * share / checks


def _gain(check: Check, pairs: Sequence[Pair], policy: Policy) -> Finding:
    alpha = policy.alpha * (1 - HARM_SHARE) / len(GAINS)
    return check(pairs, policy, Alpha(alpha, alpha))


def _describe(finding: Finding) -> str:
    where = "" if finding.segment == "all" else f" in {finding.segment}"
    more = f" (about {finding.missing_pairs:,} more pairs)" if finding.missing_pairs else ""
    return f"{finding.check}{where}: {finding.message}{more if finding.status == 'undecided' else ''}"


def _missing_pairs(required: Sequence[Finding], gains: Sequence[Finding], pairs: int) -> int | None:
    """Of all pairs: a check that can use a tenth of them needs ten times as many."""
    if not pairs:
        return None
    needed = [_of_all(finding, pairs) for finding in required]
    if gains:
        ways = [way for gain in gains if (way := _of_all(gain, pairs)) is not None]
        needed.append(min(ways, default=None))
    known = [count for count in needed if count is not None]
    return max(known) if known and len(known) == len(needed) else None


def _of_all(finding: Finding, pairs: int) -> int | None:
    if finding.missing_pairs is None or not finding.pairs:
        return None
    return ceil(finding.missing_pairs * pairs / finding.pairs)
