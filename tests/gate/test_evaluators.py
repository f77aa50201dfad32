"""Scores of one answer."""

from typing import Any

import pytest

from paceline.gate.evaluators import (
    Reference,
    code_answer,
    evaluated,
    follows,
    groundedness,
    same_calls,
    schema_valid,
    stops_respected,
    task_completion,
    tool_call_match,
    tool_calls_valid,
)
from paceline.gate.pair import Leg, Pair, ToolCall

NOTHING = Reference()
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "find", "parameters": SCHEMA}}]}


def said(text: str, *calls: ToolCall) -> Leg:
    return Leg(status=200, finish_reason="stop", text=text, tool_calls=calls, calls=len(calls))


@pytest.mark.parametrize(
    ("text", "score"), [('{"n": 1}', 1.0), ('{"n": "1"}', 0.0), ('{"n": 1', 0.0), ("hello", 0.0)]
)
def test_a_schema_is_followed_or_not(text: str, score: float) -> None:
    assert schema_valid(FORMAT, said(text), NOTHING) == score
    assert schema_valid({"structured_outputs": {"json": SCHEMA}}, said(text), NOTHING) == score
    assert schema_valid({}, said(text), NOTHING) is None


def test_a_remote_reference_is_never_fetched() -> None:
    assert not follows({}, {"$ref": "http://127.0.0.1:9/schema.json"})


def test_an_endless_pattern_ends() -> None:
    """Python's re would hold all threads for hours."""
    assert not follows("a" * 60 + "!", {"type": "string", "pattern": r"^(?=(a+)+$)(a|aa)+$"})


@pytest.mark.parametrize(
    ("leg", "score"),
    [
        (said("", ToolCall("find", '{"n": 1}')), 1.0),
        (said("no call is needed"), 1.0),
        (said("", ToolCall("find", "{}")), 0.0),
        (said("", ToolCall("find", '{"n": ')), 0.0),
        (said("", ToolCall("lose", '{"n": 1}')), 0.0),
        (said('<tool_call>{"name": "find", "arguments": {"n"'), 0.0),
    ],
)
def test_a_call_names_an_offered_tool_and_follows_its_schema(leg: Leg, score: float) -> None:
    assert tool_calls_valid(TOOLS, leg, NOTHING) == score
    assert tool_calls_valid({}, leg, NOTHING) is None


def test_calls_match_as_trees() -> None:
    expected = [ToolCall("f", '{"a": 1, "b": "New York"}'), ToolCall("g", "{}")]
    assert same_calls([ToolCall("g", " { }"), ToolCall("f", '{"b": "new york", "a": 1.0}')], expected)
    assert not same_calls(expected[:1], expected)
    assert not same_calls([ToolCall("f", '{"a": 2, "b": "New York"}'), expected[1]], expected)
    assert not same_calls([ToolCall("f", '{"a": true, "b": "New York"}'), expected[1]], expected)


def test_an_answer_without_a_call_may_be_the_right_one() -> None:
    assert tool_call_match({}, said("hello"), Reference(calls=())) == 1.0
    assert tool_call_match({}, said("", ToolCall("f", "{}")), Reference(calls=())) == 0.0
    assert tool_call_match({}, said("hello"), NOTHING) is None


def test_an_invented_name_or_number_lowers_groundedness() -> None:
    known = Reference(context="Marie Curie won the Nobel Prize in 1903 and in 1911.")
    request = {"messages": [{"role": "user", "content": "When did she win?"}]}
    right, wrong = (
        groundedness(request, said(t), known) for t in ("In 1903 and 1911.", "In 1905, in Berlin.")
    )
    assert right == 1.0
    assert wrong == 0.0
    assert groundedness(request, said("x"), NOTHING) is None


def test_a_text_after_its_stop_sequence_is_found() -> None:
    assert stops_respected({"stop": ["END"]}, said("one END two"), NOTHING) == 0.0
    assert stops_respected({"stop": "END"}, said("one"), NOTHING) == 1.0
    assert stops_respected({}, said("one"), NOTHING) is None


def test_a_right_answer_is_found_in_a_sentence() -> None:
    known = Reference(answer="Academy of Motion Picture Arts")
    assert task_completion({}, said("It is the academy of motion-picture arts."), known) == 1.0
    assert task_completion({}, said("I do not know"), known) == 0.0


CODE = "def double(x):\n    "
REQUEST: dict[str, Any] = {"messages": [{"role": "user", "content": f"Complete:\n```python\n{CODE}```"}]}
TESTS = Reference(tests="def check(f):\n    assert f(2) == 4", entry_point="double")


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("```python\ndef double(x):\n    return 2 * x\n```", 1.0),
        ("return x + x", 1.0),
        ("```\ndef double(x):\n    return x\n```", 0.0),
        ("I cannot", 0.0),
    ],
)
def test_code_is_judged_by_its_tests(text: str, score: float) -> None:
    assert task_completion(REQUEST, said(text), TESTS) == score


def test_imports_of_the_prompt_are_kept() -> None:
    made = code_answer(
        "from typing import List\n\ndef f(x):\n", "```python\ndef f(x: List): return x\n```", "f"
    )
    assert made.startswith("from typing import List\n")


@pytest.mark.parametrize(
    "request_", [{"tools": 3}, {"tools": ["x"]}, {"stop": 5}, {"response_format": "x"}, {"messages": [1]}]
)
def test_a_request_that_cannot_be_read_gets_no_score(request_: dict[str, Any]) -> None:
    pair = Pair(id="p", created=0, baseline=said("x"), candidate=said("x"))
    assert evaluated(pair, request_).baseline.scores == {}


def test_both_legs_are_scored_and_a_failed_one_is_not() -> None:
    pair = Pair(id="p", created=0, baseline=said('{"n": 1}'), candidate=Leg(error="timeout"))
    made = evaluated(pair, FORMAT)
    assert made.baseline.scores == {"schema_valid": 1.0}
    assert made.candidate.scores == {}
