"""The record of a pair: figures, comparison, JSON."""

import json
from dataclasses import replace

import pytest

from paceline.errors import DataError
from paceline.gate.pair import Divergence, Leg, Pair, ToolCall

BASELINE = Leg(
    upstream="a",
    status=200,
    finish_reason="stop",
    seconds=1.0,
    chunk_s=(0.2, 0.5, 0.9),
    completion_tokens=8,
    acceptance_histogram=(1, 2, 3),
    text="four words are here",
    tool_calls=(ToolCall("find", '{"x": 1}'),),
    calls=1,
    scores={"schema_valid": 1.0},
)
PAIR = Pair(id="p1", created=1.5, baseline=BASELINE, candidate=BASELINE, temperature=0, request={"n": 1})


def test_tpot_counts_tokens_and_not_chunks() -> None:
    assert BASELINE.ttft_s == 0.2
    assert BASELINE.tpot_s == pytest.approx(0.7 / 7)


def test_an_answer_without_a_second_token_has_no_tpot() -> None:
    assert replace(BASELINE, completion_tokens=1).tpot_s is None
    assert replace(BASELINE, chunk_s=(0.2,)).tpot_s is None
    assert replace(BASELINE, completion_tokens=None).tpot_s is None


def test_accepted_by_position_counts_drafts_accepted_at_least_so_far() -> None:
    assert BASELINE.accepted_by_position == (5, 3)
    assert BASELINE.draft_passes == 6


def test_a_pair_survives_json() -> None:
    pair = replace(PAIR, divergence=Divergence(3, 1, 0.5), same=False)
    assert Pair.from_json(pair.to_json()) == pair


def test_an_unknown_field_is_an_error_that_lists_the_known() -> None:
    values = json.loads(PAIR.to_json()) | {"colour": 1}
    with pytest.raises(DataError, match=r"colour.*cohort"):
        Pair.from_json(json.dumps(values))


def test_legs_differ_at_the_first_character_of_text_or_calls() -> None:
    other = replace(BASELINE, text="four wards are here")
    assert replace(PAIR, candidate=other).compared().divergence == Divergence(6)
    called = replace(BASELINE, tool_calls=(ToolCall("find", '{"x": 2}'),))
    assert replace(PAIR, candidate=called).compared().same is False
    assert PAIR.compared().same is True


def test_a_failed_leg_is_not_compared() -> None:
    assert replace(PAIR, candidate=replace(BASELINE, error="timeout")).compared().same is None


def test_a_pair_without_text_keeps_its_comparison_and_nothing_to_read() -> None:
    kept = replace(PAIR, candidate=replace(BASELINE, text="five")).compared().without_text()
    assert kept.same is False
    assert "words" not in kept.to_json()
    assert "find" not in kept.to_json()
    assert kept.candidate.calls == 1
