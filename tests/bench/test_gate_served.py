"""The gate on a real model: its requests, its policies, and the conclusion from a report."""

from pathlib import Path

import pytest

from bench.gate.served import EXPECTED, SPOILED, conclusion, constrained, policy
from paceline.cli.gate_run import _policy
from paceline.gate.evaluators import follows, requested_schema


@pytest.mark.parametrize("candidate", SPOILED)
def test_a_spoiled_candidate_has_a_policy_that_the_command_takes(candidate: str, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(policy(candidate))
    read = _policy(file)
    assert (read.max_ttft_ratio, read.lossless) == (10, candidate != "schemas")


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


def test_a_question_gets_a_schema_that_a_short_answer_can_follow() -> None:
    tools = [{"type": "function", "function": {"name": "find"}}]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    request = constrained({"messages": messages, "tools": tools})
    assert request["messages"] == messages[:1]
    assert follows({"tool": "find", "reason": "it fits"}, requested_schema(request))
    assert not follows({"tool": "other", "reason": ""}, requested_schema(request))
