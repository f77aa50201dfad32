"""Requests to replay, out of recorded traces."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import DataError
from paceline.gate.cases import CHAT, COMPLETIONS, RESPONSES, Case, read_cases, with_defaults
from paceline.gate.pair import Leg, Pair, ToolCall

USER = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def read(tmp_path: Path, *records: Any, cohort: str = "") -> list[Case]:
    file = tmp_path / "traces.jsonl.gz"
    with gzip.open(file, "wt") as lines:
        lines.writelines(json.dumps(record) + "\n" for record in records)
    return list(read_cases(file, cohort))


def test_every_turn_of_a_conversation_is_a_case_with_its_recorded_calls(tmp_path: Path) -> None:
    messages = [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "3"}]
    record = {"id": "c", "messages": [*messages, {"role": "assistant", "content": "three"}], "tools": [{}]}
    first, second = read(tmp_path, record)
    assert first.request == {"messages": [USER], "tools": [{}]}
    assert first.reference is not None
    assert first.reference.calls == (ToolCall("f", "{}"),)
    assert second.request["messages"] == messages
    assert second.reference is None
    assert first.conversation == second.conversation == "c"


def test_an_exported_trace_is_sent_again_without_its_speculation(tmp_path: Path) -> None:
    params = {
        "temperature": 0.5,
        "seed": 3,
        "speculative_config": {"max_draft": 2},
        "stream": True,
        "user": "u",
    }
    record = {
        "id": "r",
        "endpoint": CHAT,
        "route": "chat",
        "metadata": {"cohort": "beta"},
        "params": params,
        "messages": [USER],
        "tools": None,
        "output_ids": None,
        "prompt": None,
    }
    (case,) = read(tmp_path, record)
    assert case.request == {"temperature": 0.5, "seed": 3, "messages": [USER]}
    assert (case.route, case.cohort) == ("chat", "beta")


def test_traces_without_text_say_how_to_record_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="trace-text"):
        read(tmp_path, {"id": "r", "output_ids": None, "messages": None, "prompt": None})


def test_a_pair_and_a_bare_request_are_cases_too(tmp_path: Path) -> None:
    leg = Leg(status=200)
    pair = Pair(id="p", created=0, baseline=leg, candidate=leg, cohort="x", request={"messages": [USER]})
    pairs = read(tmp_path, json.loads(pair.to_json()), {"prompt": "a"}, {"input": "b"}, {"messages": [USER]})
    assert [case.endpoint for case in pairs] == [CHAT, COMPLETIONS, RESPONSES, CHAT]
    assert pairs[0].cohort == "x"


def test_a_field_of_the_records_can_be_the_cohort(tmp_path: Path) -> None:
    records = [{"id": "a", "domain": "air", "messages": [USER]}, {"id": "b", "messages": [USER]}]
    assert [case.cohort for case in read(tmp_path, *records, cohort="domain")] == ["air", ""]


@pytest.mark.parametrize(("line", "fault"), [("{oops", "line 1: not JSON"), ("[]", "line 1: expected")])
def test_a_broken_line_is_named(tmp_path: Path, line: str, fault: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(line)
    with pytest.raises(DataError, match=fault):
        list(read_cases(file))


def test_missing_settings_are_filled_in_and_recorded_ones_stay() -> None:
    cases = [
        Case(id="a", request={"messages": [USER]}),
        Case(id="b", request={"messages": [USER], "temperature": 0.7, "max_tokens": 3, "seed": 9}),
    ]
    made = list(with_defaults(iter(cases), 9, max_tokens=64, temperature=None, seed=0))
    assert made[0].request["temperature"] == 0
    assert made[0].request["max_tokens"] == 64
    assert made[1].request == cases[1].request
    again = list(with_defaults(iter(cases), 9, max_tokens=64, temperature=None, seed=0))
    assert again == made


def test_repeats_differ_in_their_seed_alone() -> None:
    case = Case(id="a", request={"messages": [USER], "seed": 1})
    made = list(with_defaults(iter([case]), 3, max_tokens=8, temperature=1.0, seed=0, repeats=5))
    assert len({one.request["seed"] for one in made}) == 3
    assert len({one.prompt_hash for one in made}) == 1
