"""Quality: what evaluators read in the answers (`Leg.scores`), and how the answers ended."""

from collections.abc import Callable, Sequence

from paceline.gate.checks.finding import Alpha, Finding, difference_finding
from paceline.gate.pair import Leg, Pair
from paceline.gate.policy import Policy


def truncation(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    """Answers cut off at their token limit."""
    return _both("truncation", pairs, lambda leg: float(leg.finish_reason == "length"), policy, alpha)


def stop_parity(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    """Answers that contain a stop sequence they should have ended at."""
    return score_check("stop_parity", "stops_respected", pairs, policy.rate_margin, alpha)


def schema_validity(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    """Answers that follow the JSON Schema of their request."""
    return score_check("schema_validity", "schema_valid", pairs, policy.schema_margin, alpha)


def tool_calls(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    """Calls of offered tools with arguments that follow their schemas."""
    return score_check("tool_calls", "tool_calls_valid", pairs, policy.rate_margin, alpha)


def tool_call_match(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    """Calls that match the recorded ones as syntax trees."""
    return score_check("tool_call_match", "tool_call_match", pairs, policy.score_margin, alpha)


def groundedness(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    return score_check("groundedness", "groundedness", pairs, policy.score_margin, alpha)


def task_completion(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    return score_check("task_completion", "task_completion", pairs, policy.score_margin, alpha)


def judge(pairs: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
    return score_check("judge", "judge", pairs, policy.score_margin, alpha)


def score_check(check: str, score: str, pairs: Sequence[Pair], margin: float, alpha: Alpha) -> Finding:
    """The loss of a score, 0 to 1, where both legs have it."""

    def loss(pair: Pair) -> float | None:
        baseline, candidate = pair.baseline.scores.get(score), pair.candidate.scores.get(score)
        return None if baseline is None or candidate is None else baseline - candidate

    return difference_finding(
        check, "quality", pairs, loss, margin, alpha, absent=f"no pair has the score {score}"
    )


def _both(
    check: str, pairs: Sequence[Pair], harm: Callable[[Leg], float], policy: Policy, alpha: Alpha
) -> Finding:
    def difference(pair: Pair) -> float | None:
        return harm(pair.candidate) - harm(pair.baseline) if pair.ok else None

    return difference_finding(check, "quality", pairs, difference, policy.rate_margin, alpha)
