"""The report: everything of a verdict, nothing from elsewhere, no text that a browser would run."""

import json
import re
from dataclasses import replace

from paceline.gate.pair import Leg, Pair
from paceline.gate.policy import Policy
from paceline.gate.report import MAX_PAIRS, bar, html_report, json_report, report, shown
from paceline.gate.verdict import decide
from support.gate_pairs import pairs

HOSTILE = "some <script>alert(1)</script>"


def drafted(i: int, pair: Pair) -> Pair:
    text = HOSTILE if i == 3 else "some words"
    candidate = replace(
        pair.candidate, text=text, draft_tokens=20, accepted_tokens=12, acceptance_histogram=(2, 3, 4)
    )
    return replace(pair, candidate=candidate, cohort="ab"[i % 2])


STRICT = Policy(alpha=0.001)


def test_the_page_has_verdict_checks_pictures_and_differences() -> None:
    made = pairs(120, 0.7, change=drafted)
    verdict = decide(made, Policy())
    page = html_report(verdict, made, {"candidate": "<b>bold</b>"})
    assert "<h1>Hold</h1>" in page
    assert all(f.check in page for f in verdict.findings)
    assert page.count("<circle") == 120
    assert page.count("<polygon") == 2
    assert page.count("<rect") == 2
    assert "-/a" in page
    assert "Texts that differ" in page


def test_texts_of_models_and_users_are_never_markup() -> None:
    made = pairs(40, change=drafted)
    page = html_report(decide(made, Policy()), made, {"candidate": "<b>bold</b>"})
    assert "<script" not in page
    assert "<b>bold" not in page
    assert "&lt;script&gt;" in page


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = html_report(decide([], Policy()), [], {})
    assert not re.search(r"(?:src|href)=|url\(|@import|https?:", page)


def test_pairs_without_text_show_none() -> None:
    made = [pair.without_text() for pair in pairs(40, change=drafted)]
    assert "script" not in html_report(decide(made, Policy()), made, {})


def test_failed_pairs_can_be_reported() -> None:
    failed = [
        Pair(id=f"{i}", created=0, baseline=Leg(error="timeout"), candidate=Leg(error="x")) for i in range(40)
    ]
    verdict = decide(failed, Policy())
    assert "Hold" in html_report(verdict, failed, {})
    assert json.loads(json_report(verdict, {"a": 1}))["about"] == {"a": 1}


def test_a_bar_stays_within_its_width() -> None:
    for finding in decide(pairs(60, 0.5), Policy()).findings:
        if (made := bar(finding)) is not None:
            places = (made.left, made.left + made.width, made.estimate, made.margin, made.zero)
            assert all(0 <= place <= 100.5 for place in places), finding.check


def test_figures_have_their_unit() -> None:
    assert [shown(0.5, unit) for unit in ("ratio", "difference", "p-value")] == [
        "0.500 ×",
        "50.00 %",
        "0.5000",
    ]
    assert shown(float("inf"), "ratio") == "–"


def test_the_json_has_all_that_the_pictures_are_drawn_from() -> None:
    made = pairs(120, 0.7, change=drafted)
    verdict = decide(made, Policy())
    found = json.loads(json_report(verdict, {"candidate": "c"}, made))
    assert found["headline"] == verdict.headline
    assert [finding["check"] for finding in found["findings"]] == [f.check for f in verdict.findings]
    first = verdict.findings[0]
    assert found["findings"][0]["text"]["estimate"] == shown(first.estimate, first.unit)
    point = found["scatter"]["points"][5]
    assert point["id"] == "p5"
    assert point["candidate_ms"] == 1000 * (made[5].candidate.tpot_s or 0)
    tpot = found["evidence"][0]
    assert len(tpot["pairs"]) == len(tpot["mean"]) == len(tpot["lower"]) == len(tpot["upper"])
    bounds = zip(tpot["lower"], tpot["mean"], tpot["upper"], strict=True)
    assert all(low <= mean <= high for low, mean, high in bounds)
    assert tpot["margin"] == Policy().max_tpot_ratio
    assert (found["diverged"], found["identical"]) == (1, 119)


def test_evidence_is_drawn_at_the_error_rate_of_the_policy() -> None:
    made = pairs(120, 0.7)
    usual, strict = (report(decide(made, policy), made, {})["evidence"] for policy in (Policy(), STRICT))
    assert all(b["upper"][-1] > a["upper"][-1] for a, b in zip(usual, strict, strict=True))


def test_pairs_whose_texts_differ_are_shown_first_with_their_first_difference() -> None:
    made = pairs(60, change=drafted)
    shown_first = report(decide(made, Policy()), made, {})["shown_pairs"]
    assert len(shown_first) == MAX_PAIRS
    assert [pair["id"] for pair in shown_first[:2]] == ["p3", "p59"]
    assert shown_first[0]["divergence"]["character"] == len("some ")
    assert shown_first[0]["candidate"]["output"] == HOSTILE


def test_a_json_report_of_pairs_without_text_has_none() -> None:
    made = [pair.without_text() for pair in pairs(40, change=drafted)]
    assert "script" not in json_report(decide(made, Policy()), {}, made)
