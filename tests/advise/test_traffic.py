"""Recorded traffic: requests from files and stores, and the figures of a workload."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

from paceline.advise.traffic import (
    MAX_TURNS,
    TokenizedRequest,
    TracedRequest,
    concurrency,
    from_files,
    from_store,
    json_characters,
    sample,
    turns_before,
    workload,
)
from paceline.errors import DataError, StoreError
from paceline.trace.store import Store
from support.traces import a_request, a_round

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Lyon?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": '{"city": "Lyon"}'}}],
    },
    {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    {"role": "assistant", "content": "It is sunny."},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


def classify(body: Mapping[str, Any]) -> str:
    return "tools" if body.get("tools") else "chat"


def write(path: Path, *records: object) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def requested(conversation: str, **given: Any) -> TracedRequest:
    return TracedRequest(f"{conversation}#1", "r", conversation, given.pop("body", {}), **given)


def test_each_answer_of_a_conversation_is_a_request(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl.gz", {"id": "c", "messages": MESSAGES, "tools": TOOLS})
    first, second = from_files([file], classify).requests
    assert (first.id, first.route, first.conversation) == ("c#2", "tools", "c")
    assert first.body["messages"] == MESSAGES[:2]
    assert first.tools == ("weather",)
    assert "Lyon" in first.answer
    assert second.body["messages"] == MESSAGES[:4]
    assert second.answer == "It is sunny."


def test_of_several_files_each_is_a_route(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.jsonl", {"messages": MESSAGES}) for name in ("b", "a")]
    assert list(from_files(files, classify).routes()) == ["a", "b"]


def test_questions_without_answers_are_requests_too(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"question_id": 81, "turns": ["Why?", "And then?"]})
    (request,) = from_files([file], classify).requests
    assert request.body["messages"] == [{"role": "user", "content": "Why?"}]


def test_what_is_no_conversation_is_counted(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"id": "c"}, [1], {"messages": [1]}, {"messages": MESSAGES})
    file.write_text(file.read_text() + "not json\n")
    traffic = from_files([file], classify)
    assert len(traffic.requests) == 2
    assert traffic.rejected == {"`messages` is missing": 2, "not a JSON object": 1, "not JSON": 1}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl does not exist"):
        from_files([tmp_path / "none.jsonl"], classify)


def test_a_store_and_its_export_are_the_same_traffic(tmp_path: Path) -> None:
    url = str(tmp_path / "traces.db")
    store = Store.open(url)
    text = {"messages": MESSAGES[:2], "output": "hm", "prompt_ids": (1, 2), "output_ids": (3, 4)}
    store.save(a_request("r1", **text), [a_round("r1", 0), a_round("r1", 1)])
    store.save(a_request("r2"), [])
    file = write(tmp_path / "export.jsonl", *store.export())
    store.close()
    for traffic in (from_store(url, classify), from_files([file], classify)):
        (request,) = traffic.requests
        assert (request.route, request.model, request.tenant) == ("agents", "smollm2-135m", "t1")
        assert request.output_ids == (3, 4)
        assert request.temperature == 0.7
        assert request.prefill_s == pytest.approx(0.049)
        assert [r.committed for r in request.rounds] == [3, 3]
        assert traffic.rejected == {"no text was recorded": 1}


def test_a_store_without_text_says_how_to_record_it(tmp_path: Path) -> None:
    url = str(tmp_path / "traces.db")
    store = Store.open(url)
    store.save(a_request("r1"), [])
    store.close()
    with pytest.raises(StoreError, match="--trace-text"):
        from_store(url, classify)


def test_a_sample_has_few_turns_of_many_conversations_and_follows_the_seed() -> None:
    requests = [TracedRequest(f"{c}#{turn}", "r", str(c), {}) for c in range(20) for turn in range(10)]
    chosen = sample(requests, 24, Random(1))
    assert chosen == sample(requests, 24, Random(1))
    assert chosen != sample(requests, 24, Random(2))
    assert len(chosen) == 24
    by_conversation = {
        one.conversation: [r for r in chosen if r.conversation == one.conversation] for one in chosen
    }
    assert len(by_conversation) == 24 // MAX_TURNS
    for turns in by_conversation.values():
        numbers = [int(turn.id.partition("#")[2]) for turn in turns]
        assert numbers == list(range(numbers[0], numbers[0] + MAX_TURNS))


def test_the_turn_before_is_that_of_the_same_conversation() -> None:
    requests = [TracedRequest(f"{c}#{turn}", "r", c, {}) for turn in range(3) for c in ("a", "b")]
    before = {name: request.id for name, request in turns_before(requests).items()}
    assert before == {"a#1": "a#0", "a#2": "a#1", "b#1": "b#0", "b#2": "b#1"}


def test_characters_of_json_are_those_inside_of_values_that_parse() -> None:
    assert json_characters('Here: {"a": [1, 2]} and [3]') == len('{"a": [1, 2]}') + len("[3]")
    assert json_characters("no {braces} or [lists") == 0


def test_the_figures_of_a_workload() -> None:
    one, two = (requested("a", body={"temperature": 1.0}), requested("a"))
    copied = TokenizedRequest(one, (1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 6), '{"a": 1}')
    longer = TokenizedRequest(two, (*copied.prompt, *copied.output, 7, 8, 9, 10), (11, 12), "words...")
    figures = workload([one, two], [copied, longer])
    assert (figures.requests, figures.conversations, figures.turns) == (2, 1, 2.0)
    assert figures.prompt_tokens.median == 16
    assert figures.json_share == 0.5
    assert figures.repetition == pytest.approx(2 / 8)  # 5 and 6 follow 1 2 3 4 and 2 3 4 5 again
    assert figures.prefix_overlap == pytest.approx(12 / 22)
    assert figures.temperature == 0.5


def test_concurrency_is_the_mean_while_there_are_outputs() -> None:
    spans = ((0.0, 4.0), (2.0, 2.0), (10.0, 2.0))
    requests = [requested(str(i), created=100 + start, seconds=s) for i, (start, s) in enumerate(spans)]
    assert concurrency(requests) == pytest.approx(8 / 6)
    assert concurrency([requested("a")]) == 0
