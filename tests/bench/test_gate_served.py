"""The gate on a real model: its requests, and the conclusion from a report."""

import json
from pathlib import Path

import pytest

from bench import results_folder
from bench.gate.served import EXPECTED, conclusion, constrained, keep, parser, shortened
from paceline.gate.evaluators import follows, requested_schema


@pytest.mark.parametrize("candidate", EXPECTED)
def test_only_the_expected_verdict_by_its_check_is_a_success(
    candidate: str, capsys: pytest.CaptureFixture[str]
) -> None:
    decision, check = EXPECTED[candidate]
    report = {"verdict": decision, "pairs": 60, "reasons": [f"{check}: so it is"]}
    assert conclusion(candidate, report) == 0
    assert conclusion(candidate, report | {"reasons": ["ttft: slow"]}) == 1
    assert conclusion(candidate, report | {"verdict": "hold" if decision != "hold" else "promote"}) == 1
    assert "as expected" in capsys.readouterr().out


def test_a_conversation_is_cut_at_the_last_answer_that_has_a_short_prompt() -> None:
    turns = [{"role": role, "content": "x" * 100} for role in ("user", "assistant", "user", "assistant")]
    record = {"id": "a", "messages": turns}
    before = len(json.dumps(turns[:1]))
    assert shortened(record, before) == {"id": "a", "messages": turns[:2]}
    assert shortened(record, before - 1) is None
    assert shortened(record, 1000) == record


def test_an_opening_gets_a_schema_that_a_short_answer_can_follow() -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    request = constrained({"messages": messages})
    assert request["messages"] == messages[:1]
    assert follows({"action": "think", "reason": "it fits"}, requested_schema(request))
    assert not follows({"action": "other", "reason": ""}, requested_schema(request))


def test_a_verdict_is_kept_beside_those_on_other_candidates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_folder, "FOLDER", tmp_path)
    finding = {"check": "ttft", "segment": "all", "estimate": 1.0}
    report = {
        "verdict": "hold",
        "pairs": 5,
        "reasons": [],
        "findings": [finding, {**finding, "segment": "a"}],
    }
    for candidate in ("slower", "speculative", "slower"):
        given = parser().parse_args(["--candidate", candidate, "--model", "m"])
        keep(given, {**report, "pairs": 5 + len(candidate)})
    rows = results_folder.read_one("gate-m")["rows"]
    assert [(row["candidate"], row["pairs"]) for row in rows] == [("speculative", 16), ("slower", 11)]
    assert rows[0]["findings"] == [finding]
