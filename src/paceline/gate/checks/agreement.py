"""Does the candidate write what the baseline writes? The strongest check of a lossless change."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from paceline.gate.checks.finding import Alpha, Finding, Status, difference_finding, skipped
from paceline.gate.pair import Pair
from paceline.gate.policy import Policy
from paceline.gate.stats.bounded_mean import Counts, upper_bound
from paceline.gate.stats.permutation import (
    FIRST_LOOK,
    MAX_PERMUTATIONS,
    PERMUTATIONS,
    alpha_at_look,
    look,
    stratified_mmd_p_value,
    swap_p_value,
)

MIN_DISTRIBUTION_PAIRS: Final = 4 * FIRST_LOOK
_MIN_REPEATS: Final = 3  # samples of a prompt, for its own stratum


def text_agreement(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    """Greedy answers: identical, or different at a tie of two tokens, or different by a bug.

    Kernels that add in another order may swap two tokens of almost equal probability. A first divergence with
    a lead of more than `tie_margin` is no tie: one is enough to fail. Without the lead it stays unexplained.
    """
    compared = [pair for pair in pairs if pair.greedy and pair.same is not None]

    def differs(pair: Pair) -> float:
        return float(not pair.same and not tie(pair, policy))

    finding = difference_finding(
        "text_agreement",
        "quality",
        compared,
        differs,
        policy.rate_margin,
        alpha,
        required=policy.lossless,
        absent="no greedy pairs whose texts were compared",
    )
    if not compared:
        return finding
    different = [pair for pair in compared if not pair.same]
    ties = sum(tie(pair, policy) for pair in different)
    bugs = [pair for pair in different if bug(pair, policy)]
    unexplained = len(different) - ties - len(bugs)
    first = f"; the first bug is pair {bugs[0].id}" if bugs else ""
    message = (
        f"{len(compared) - len(different)} of {len(compared)} identical, {ties} ties, {len(bugs)} bugs, "
        f"{unexplained} unexplained{first}"
    )
    status = "fail" if bugs and policy.lossless else finding.status
    if not policy.lossless and status == "fail":
        status = "undecided"  # a change of texts is no harm by itself
    return replace(finding, status=status, message=message, missing_pairs=_unless(bugs, finding))


def _unless(bugs: Sequence[Pair], finding: Finding) -> int | None:
    return None if bugs else finding.missing_pairs


def tie(pair: Pair, policy: Policy) -> bool:
    margin = None if pair.divergence is None else pair.divergence.margin
    return margin is not None and abs(margin) <= policy.tie_margin


def bug(pair: Pair, policy: Policy) -> bool:
    known = pair.divergence is not None and pair.divergence.margin is not None
    return known and not tie(pair, policy)


def distribution(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    """Sampled answers: is it the same distribution?

    With shared seeds, texts that are equal pair by pair prove it: the total variation distance is at most the
    share of pairs that differ (coupling inequality). Otherwise permutation tests look for a difference at
    doubling numbers of pairs; finding none is no proof, and the message says so.
    """
    sampled = [pair for pair in pairs if pair.ok and not pair.greedy and pair.same is not None]
    if not sampled:
        return skipped("distribution", "quality", "p-value", "no sampled pairs whose texts were compared")
    coupled = [pair for pair in sampled if pair.seed is not None]
    if coupled and len(coupled) == len(sampled):
        counts = Counts.of(np.array([float(not pair.same) for pair in coupled]), 0.0, 1.0)
        bound = upper_bound(counts, alpha.proof)
        if bound < policy.rate_margin or counts.mean == 0:
            return _coupling(coupled, policy, alpha)
    return _permutation(sampled, policy, alpha)


def _coupling(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    finding = difference_finding(
        "distribution",
        "quality",
        pairs,
        lambda pair: float(not pair.same),
        policy.rate_margin,
        alpha,
        required=policy.lossless,
    )
    bound = f"total variation at most {finding.interval.upper:.3f}"
    equal = sum(bool(pair.same) for pair in pairs)
    return replace(finding, message=f"{equal} of {len(pairs)} equal under the same seed: {bound}")


def _permutation(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    texts = [pair for pair in pairs if pair.baseline.output is not None and pair.candidate.output is not None]
    latest = look(len(texts))
    if latest is None:
        return Finding(
            check="distribution",
            family="quality",
            unit="p-value",
            status="undecided",
            pairs=len(texts),
            missing_pairs=MIN_DISTRIBUTION_PAIRS - len(texts),
            required=policy.lossless,
            message=f"{len(texts)} texts of each leg: the first test needs {FIRST_LOOK}",
        )
    index, used = latest
    level = alpha_at_look(alpha.harm, index)
    p_value = equality_p_value(texts[:used], np.random.default_rng(policy.seed), alpha.harm)
    status: Status = "fail" if p_value <= level else "pass" if used >= MIN_DISTRIBUTION_PAIRS else "undecided"
    outcome = "the texts differ" if status == "fail" else "no difference found, which is no proof of equality"
    return Finding(
        check="distribution",
        family="quality",
        unit="p-value",
        status=status if policy.lossless or status != "fail" else "undecided",
        estimate=p_value,
        margin=level,
        pairs=used,
        missing_pairs=MIN_DISTRIBUTION_PAIRS - used if status == "undecided" else None,
        required=policy.lossless,
        message=f"{outcome}: p = {p_value:.4f} at level {level:.4f} ({used} pairs)",
    )


def equality_p_value(pairs: Sequence[Pair], rng: np.random.Generator, alpha: float) -> float:
    """Of both tests where prompts came often enough, by Bonferroni. The permutations resolve small levels."""
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[pair.prompt_hash or pair.id].append(pair)
    repeated = [group for group in groups.values() if len(group) >= _MIN_REPEATS]
    permutations = min(MAX_PERMUTATIONS, max(PERMUTATIONS, round(40 / alpha)))
    shared = swap_p_value(*_outputs(pairs), rng, permutations)
    if sum(map(len, repeated)) < len(pairs) / 2:
        return shared
    by_prompt = stratified_mmd_p_value(map(_outputs, repeated), rng, permutations)
    return min(1.0, 2 * min(shared, by_prompt))


def _outputs(pairs: Sequence[Pair]) -> tuple[list[str], list[str]]:
    return [pair.baseline.output or "" for pair in pairs], [pair.candidate.output or "" for pair in pairs]
