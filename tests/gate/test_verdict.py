"""Verdicts: promote on proof, roll back on proven harm, else hold with what is missing."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from paceline.gate import verdict as verdict_module
from paceline.gate.checks import latency
from paceline.gate.checks.finding import Alpha, Finding
from paceline.gate.pair import ARMS, Divergence, Feedback, Leg, Pair
from paceline.gate.policy import Policy
from paceline.gate.stats.mean import radius, spread
from paceline.gate.verdict import Verdict, decide, findings_of
from support.gate_pairs import leg, pairs, scored

POLICY = Policy()


def finding(verdict: Verdict, check: str, segment: str = "all") -> Finding:
    return next(f for f in verdict.findings if f.check == check and f.segment == segment)


def other_text(pair: Pair, margin: float | None) -> Pair:
    changed = replace(pair, candidate=replace(pair.candidate, text="some works")).compared()
    return replace(changed, divergence=Divergence(8, 2, margin))


def test_a_faster_candidate_with_equal_texts_is_promoted() -> None:
    verdict = decide(pairs(300, 0.7), POLICY)
    assert verdict.decision == "promote"
    assert verdict.exit_code == 0
    assert finding(verdict, "tpot_gain").interval.upper < 1


def test_equal_candidates_are_held_and_nothing_is_missing_but_the_gain() -> None:
    verdict = decide(pairs(300, 1.0, spread=0.1), POLICY)
    assert verdict.decision == "hold"
    assert verdict.exit_code == 3
    assert verdict.reasons == ("no gain in speed is proven",)


def test_a_slower_candidate_is_rolled_back() -> None:
    verdict = decide(pairs(200, 1.15), POLICY)
    assert verdict.decision == "roll back"
    assert verdict.exit_code == 4
    assert finding(verdict, "end_to_end").status == "fail"


def later(ms: float, baseline_ms: float = 15.0) -> Callable[[int, Pair], Pair]:
    """First tokens come so much later than the baseline's; the rest of an answer takes half the time."""

    def change(i: int, pair: Pair) -> Pair:
        load, noise = (pair.baseline.seconds / 0.3) ** 0.2, (pair.candidate.seconds / 0.3) ** 0.2
        legs = [
            (load * baseline_ms / 1000, load * 0.02),
            (noise * baseline_ms / 1000 + ms / 1000, load * 0.01),
        ]
        baseline, candidate = (tuple(first + t * step for t in range(11)) for first, step in legs)
        return replace(
            pair,
            baseline=leg(chunk_s=baseline, seconds=baseline[-1]),
            candidate=leg(chunk_s=candidate, seconds=candidate[-1]),
        )

    return change


def test_two_milliseconds_at_the_first_token_are_no_reason_to_roll_back() -> None:
    made = pairs(300, change=later(2.0))
    verdict = decide(made, POLICY)
    found = finding(verdict, "ttft")
    assert verdict.decision == "promote"
    assert (found.status, found.unit, found.margin, found.missing_pairs) == ("pass", "ms", 10, None)
    assert found.estimate == pytest.approx(2.0, abs=0.5)
    assert found.interval.lower > 0
    assert "ms more on average; allowed are 1.1 x or 10 ms more" in found.message
    by_ratio = decide(made, Policy(max_ttft_increase_ms=0))
    assert by_ratio.decision == "roll back"
    assert finding(by_ratio, "ttft").unit == "ratio"


def test_a_first_token_later_by_more_than_both_margins_rolls_back() -> None:
    verdict = decide(pairs(300, change=later(20.0)), POLICY)
    assert verdict.decision == "roll back"
    assert finding(verdict, "ttft").status == "fail"
    slow = finding(decide(pairs(300, change=later(20.0, baseline_ms=1000)), POLICY), "ttft")
    assert (slow.status, slow.unit) == ("pass", "ratio")  # 2 %


def test_neither_margin_hides_what_the_other_forbids_until_one_is_proven() -> None:
    """300 ms that became 350: more than 10 ms and more than 10 %, so that no interval can pass."""
    found = finding(decide(pairs(40, change=later(50.0, baseline_ms=300)), POLICY), "ttft")
    assert found.status == "fail"
    assert (found.unit, found.margin) == ("ratio", 1.1)


def test_both_margins_share_the_error_rate_of_a_proof_and_each_has_that_of_harm() -> None:
    """So that neither of two ways to a pass is free."""
    made = pairs(40, change=later(1.2))
    found = latency.ttft(made, POLICY, Alpha(proof=0.05, harm=0.01))
    times = np.array([latency.ttft_times(pair) for pair in made])
    logs, more = np.log(times[:, 1] / times[:, 0]), 1000 * (times[:, 1] - times[:, 0])
    assert (found.status, found.unit, found.missing_pairs) == ("pass", "ms", None)
    assert found.interval.upper == pytest.approx(more.mean() + radius(40, spread(more), 2 * 0.05 * 0.2))
    assert found.interval.lower == pytest.approx(more.mean() - radius(40, spread(more), 2 * 0.01))
    by_ratio = latency.ttft(made, Policy(max_ttft_increase_ms=0), Alpha(proof=0.05, harm=0.01))
    assert by_ratio.status == "undecided"
    tight = latency.ttft(made, Policy(max_ttft_increase_ms=0.1), Alpha(proof=0.05, harm=0.01))
    assert tight.unit == by_ratio.unit == "ratio"
    upper = np.exp(logs.mean() + radius(40, spread(logs), 2 * 0.05 * 0.8))
    assert tight.interval.upper == pytest.approx(upper)
    assert tight.interval.upper > by_ratio.interval.upper


def test_quantiles_and_variance_allow_milliseconds_too() -> None:
    def change(i: int, pair: Pair) -> Pair:
        slower = 0.004 if i % 2 else 0.0
        return replace(
            pair, baseline=leg(seconds=0.01 + 0.0001 * (i % 7)), candidate=leg(seconds=0.014 + slower)
        )

    made = pairs(600, change=change)
    checks = ("end_to_end", "end_to_end_p50", "end_to_end_p99", "latency_variance")
    allowed, by_ratio = decide(made, POLICY), decide(made, Policy(max_end_to_end_increase_ms=0))
    assert {finding(allowed, check).status for check in checks} == {"pass"}
    assert "pass" not in {finding(by_ratio, check).status for check in checks}
    assert {finding(by_ratio, check).status for check in checks if check != "end_to_end_p99"} == {"fail"}


@pytest.mark.parametrize("name", ["ttft", "tpot", "end_to_end"])
def test_a_tail_that_the_mean_hides_is_found_by_its_quantile(name: str) -> None:
    """One answer in thirty takes ten times as long; the mean log ratio is within its margin."""

    def change(i: int, pair: Pair) -> Pair:
        return replace(pair, baseline=leg(1 + 0.01 * (i % 9)), candidate=leg(10.0 if i % 30 == 0 else 1.0))

    policy = Policy(max_ttft_ratio=1.2, max_tpot_ratio=1.2, max_end_to_end_ratio=1.2)
    verdict = decide(pairs(3000, change=change), policy)
    assert finding(verdict, name).status == "pass"
    assert finding(verdict, f"{name}_p50").status == "pass"
    tail = finding(verdict, f"{name}_p99")
    assert (tail.status, verdict.decision) == ("fail", "roll back")
    assert tail.estimate == pytest.approx(9.3, abs=0.1)


def test_all_quantiles_together_have_the_error_rate_of_one_check() -> None:
    made, seen = pairs(10), []

    def check(pairs_: Sequence[Pair], policy: Policy, alpha: Alpha) -> Finding:
        seen.append(alpha.harm)
        return latency.timeouts(pairs_, policy, alpha)

    names = ("QUANTILES", "TAILS")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(verdict_module, name, (check,) * len(getattr(verdict_module, name)))
        findings_of(made, POLICY, 1.0)
    quantiles, tails = seen[:6], seen[6:]
    assert sum(quantiles) == pytest.approx(tails[0])
    assert len(set(tails)) == 1


def test_too_few_pairs_hold_and_say_how_many_more() -> None:
    verdict = decide(pairs(60, 0.7), POLICY)
    assert verdict.decision == "hold"
    missing = verdict.missing_pairs
    assert missing is not None
    assert decide(pairs(60 + missing, 0.7), POLICY).decision == "promote"


def test_answers_that_are_not_streamed_are_compared_by_their_whole_time() -> None:
    """A candidate that alone stops streaming is held: its TPOT is hidden, not absent."""

    def whole(one: Leg) -> Leg:
        return replace(one, chunk_s=(one.seconds,))

    made = pairs(400, 0.5, spread=0.1)
    unstreamed = [replace(p, baseline=whole(p.baseline), candidate=whole(p.candidate)) for p in made]
    assert decide(unstreamed, Policy()).decision == "promote"
    hidden = [replace(p, candidate=whole(p.candidate)) for p in made]
    assert decide(hidden, Policy(max_ttft_ratio=100)).decision == "hold"


def test_no_pairs_hold() -> None:
    assert decide([], POLICY).decision == "hold"


def test_a_bug_in_one_text_is_enough_to_roll_back() -> None:
    made = pairs(300, 0.7)
    verdict = decide([other_text(made[0], 3.0), *made[1:]], POLICY)
    assert verdict.decision == "roll back"
    assert "text_agreement" in verdict.reasons[0]
    assert "p0" in verdict.reasons[0]


def test_a_tie_is_no_bug_and_an_unexplained_difference_only_delays() -> None:
    made = pairs(300, 0.7)
    assert decide([other_text(made[0], 0.01), *made[1:]], POLICY).decision == "promote"
    unexplained = decide([other_text(made[0], None), *made[1:]], POLICY)
    assert unexplained.decision == "hold"
    assert finding(unexplained, "text_agreement").missing_pairs


def test_a_candidate_that_claims_no_equality_may_change_texts() -> None:
    made = [scored(other_text(pair, 3.0), "judge", 0.8, 0.8) for pair in pairs(300, 0.7)]
    assert decide(made, Policy(lossless=False)).decision == "promote"
    assert decide(made, POLICY).decision == "roll back"


def test_answers_that_nobody_read_are_not_promoted() -> None:
    made = [replace(pair, same=None).without_text() for pair in pairs(300, 0.7)]
    verdict = decide(made, POLICY)
    assert verdict.decision == "hold"
    assert any("has read the answers" in reason for reason in verdict.reasons)


@pytest.mark.slow
def test_schema_breaks_in_one_cohort_block_promotion() -> None:
    """1 % of one cohort in three: over all pairs it is a third of that."""
    cohorts = ("a", "b", "c")

    def change(i: int, pair: Pair) -> Pair:
        cohort = cohorts[i % 3]
        broken = cohort == "b" and i // 3 % 100 == 50
        return replace(scored(pair, "schema_valid", 1.0, float(not broken)), cohort=cohort)

    clean = pairs(
        3300, 0.7, change=lambda i, p: replace(scored(p, "schema_valid", 1, 1), cohort=cohorts[i % 3])
    )
    assert decide(clean, POLICY).decision == "promote"
    verdict = decide(pairs(3300, 0.7, change=change), POLICY)
    assert verdict.decision != "promote"
    assert finding(verdict, "schema_validity", "-/b").status != "pass"
    assert finding(verdict, "schema_validity", "-/a").status == "pass"
    assert any("schema_validity in -/b" in reason for reason in verdict.reasons)


def test_a_slow_route_among_fast_ones_is_rolled_back() -> None:
    fast, slow = pairs(600, 0.7, route="chat"), pairs(300, 1.3, seed=1, route="tools")
    verdict = decide([*fast, *slow], POLICY)
    assert verdict.decision == "roll back"
    assert any("in tools/-" in reason for reason in verdict.reasons)


def test_a_tiny_cohort_does_not_hold_everything_up() -> None:
    made = [*pairs(400, 0.7, cohort="a"), *pairs(8, 0.7, seed=1, cohort="new")]
    assert decide(made, POLICY).decision == "promote"


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (leg(0.7, finish_reason="length"), "truncation"),
        (Leg(status=500, error="http_500"), "errors"),
        (leg(0.7, retries=1), "retries"),
        (leg(0.7, fallback=True), "fallbacks"),
        (leg(60.0), "timeouts"),
        (leg(0.7, completion_tokens=14), "cost_tokens"),
    ],
)
def test_each_harm_is_found_by_its_check(broken: Leg, check: str) -> None:
    def change(i: int, pair: Pair) -> Pair:
        return replace(pair, candidate=broken) if i % 3 == 0 else pair

    verdict = decide(pairs(300, 0.7, change=change), POLICY)
    assert verdict.decision == "roll back"
    assert check in {f.check for f in verdict.findings if f.status == "fail"}


@pytest.mark.parametrize(
    ("score", "check"),
    [
        ("schema_valid", "schema_validity"),
        ("tool_calls_valid", "tool_calls"),
        ("tool_call_match", "tool_call_match"),
        ("groundedness", "groundedness"),
        ("task_completion", "task_completion"),
        ("stops_respected", "stop_parity"),
        ("judge", "judge"),
    ],
)
def test_a_score_that_falls_is_found_by_its_check(score: str, check: str) -> None:
    made = pairs(300, 0.7, change=lambda i, pair: scored(pair, score, 1.0, float(i % 5 > 0)))
    verdict = decide(made, POLICY)
    assert {f.check for f in verdict.findings if f.status == "fail"} == {check}


def test_a_candidate_whose_times_vary_more_is_found() -> None:
    def change(i: int, pair: Pair) -> Pair:
        scale = 4.0 if i % 4 == 0 else 0.4
        return replace(pair, candidate=leg(pair.baseline.seconds / 0.3 * scale))

    assert finding(decide(pairs(400, change=change), POLICY), "latency_variance").status == "fail"


def test_first_tokens_are_compared_only_on_equal_caches() -> None:
    def change(i: int, pair: Pair) -> Pair:
        warm = replace(pair.candidate, cached_tokens=40)
        return replace(pair, baseline=replace(pair.baseline, cached_tokens=0), candidate=warm)

    verdict = decide(pairs(100, change=change), POLICY)
    assert finding(verdict, "ttft").status == "skipped"
    assert finding(verdict, "tpot").pairs == 100


def test_answers_of_other_lengths_are_compared_at_the_baselines() -> None:
    def change(i: int, pair: Pair) -> Pair:
        longer = leg(pair.baseline.seconds / 0.3, completion_tokens=21, seconds=9.0)
        return replace(pair, candidate=replace(longer, chunk_s=tuple(0.1 + 0.02 * t for t in range(21))))

    estimate = finding(decide(pairs(50, spread=0.0, change=change), POLICY), "end_to_end").estimate
    assert estimate is not None
    assert 0.5 < estimate < 2  # 9 s are not


def test_complaints_of_users_roll_back_though_they_are_not_paired() -> None:
    given = [
        Feedback(request=f"{arm}{i}", arm=arm, created=0, thumbs="down" if i % 10 < bad else "up")
        for arm, bad in zip(ARMS, (1, 5), strict=True)
        for i in range(200)
    ]
    verdict = decide(pairs(300, 0.7), POLICY, given)
    assert verdict.decision == "roll back"
    assert "feedback" in verdict.reasons[0]


def test_acceptance_is_shown_by_position_and_has_a_floor() -> None:
    def change(i: int, pair: Pair) -> Pair:
        spoken = {"draft_tokens": 30, "accepted_tokens": 12, "acceptance_histogram": (4, 0, 6)}
        return replace(pair, candidate=replace(pair.candidate, **spoken))  # type: ignore[arg-type]

    made = pairs(300, 0.7, change=change)
    found = finding(decide(made, POLICY), "acceptance")
    assert found.estimate == pytest.approx(0.4)
    assert found.details["by_position"] == [0.6, 0.6]
    assert finding(decide(made, Policy(min_acceptance_rate=0.6)), "acceptance").status == "fail"


def test_a_verdict_is_repeatable_and_its_report_is_json() -> None:
    made = pairs(120, 0.8, temperature=1.0, change=lambda i, p: other_text(p, None) if i % 2 else p)
    first, second = (json.dumps(decide(made, POLICY).to_dict(), allow_nan=False) for _ in range(2))
    assert first == second
    assert json.loads(first)["policy_hash"] == POLICY.hash
