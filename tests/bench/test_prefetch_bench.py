"""The replay of recorded runs: what counts as right, what is history for what, and the pages."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import prefetch, results_folder
from bench.pages import agents, results_page
from bench.prefetch import Score, evaluate, in_order, reads, tenant, turns
from support.agent_runs import FUNCTIONS, Shop

TOOLS: list[Any] = [{"type": "function", "function": function} for function in FUNCTIONS.values()]


def record(shop: Shop, group: int, model: str = "m") -> dict[str, Any]:
    """One run of the shop as the files have it."""
    messages: list[Any] = []
    for before, calls in shop.run():
        messages = before
        if not calls:
            messages = [*before, {"role": "assistant", "content": "They are on their way."}]
    about = {"source": "shop", "domain": "orders", "model": model, "group": group}
    return {**about, "messages": messages, "tools": TOOLS}


def runs(count: int, same_group: bool = False) -> list[dict[str, Any]]:
    shop = Shop(random.Random(0))
    return [record(shop, 0 if same_group else number) for number in range(count)]


def test_calls_of_later_runs_are_predicted_and_counted() -> None:
    score = evaluate(runs(30), repeats=False, min_probability=0.5)
    row = score.row("shop")
    assert (row["runs"], row["calls"], row["literal"]) == (30, row["safe"], 1.0)
    assert score.answers == score.calls + 30
    assert row["early"] > 0.6
    assert row["both"] >= row["early"]
    assert row["early_wrong"] < 0.2
    assert 0 < row["saved"]["0.3"] < 0.5


def test_runs_of_one_task_are_no_history_for_one_another() -> None:
    together = runs(12, same_group=True)
    assert [len(batch) for batch in in_order(together, repeats=False)] == [12]
    assert evaluate(together, repeats=False, min_probability=0.1).early == 0
    assert evaluate(together, repeats=True, min_probability=0.1).early > 0


def test_runs_of_one_customer_are_no_history_for_one_another_whatever_their_label() -> None:
    def call(name: str, **arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": json.dumps(arguments)}
        return {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}

    def one(label: str, domain: str, *messages: dict[str, Any]) -> dict[str, Any]:
        about = {"source": "shop", "domain": domain, "model": "m", "group": label}
        return {**about, "messages": [{"role": "user", "content": "Hi"}, *messages], "tools": TOOLS}

    found = {"role": "tool", "tool_call_id": "1", "content": '{"user_id": "ava_kim_7", "total": 9}'}
    ava, order = call("get_user", user_id="ava_kim_7"), call("get_order", order_id="#1")
    stranger = call("get_user", user_id="leo_9")
    records = [
        one("a", "retail", ava),
        one("b", "retail", order, found),
        one("c", "retail", stranger, ava, found),
        one("d", "retail", stranger),
        one("d", "retail", order),
        one("e", "telecom", ava),
    ]
    batches = in_order(records, repeats=False)
    assert [[r["group"] for r in batch] for batch in batches] == [["a", "b", "c"], ["d"], ["d"], ["e"]]
    assert [len(batch) for batch in in_order(records, repeats=True)] == [1] * 6


def test_tenants_learn_apart() -> None:
    shop = Shop(random.Random(0))
    strangers = [record(shop, number, model=f"model {number}") for number in range(12)]
    assert len({tenant(one) for one in strangers}) == 12
    assert evaluate(strangers, repeats=False, min_probability=0.1).early == 0


def test_only_tools_that_read_count_as_safe() -> None:
    assert reads("get_order")
    assert not reads("cancel_order")
    one = record(Shop(random.Random(0)), 0)
    function = {"name": "cancel_order", "arguments": '{"order_id": "1"}'}
    one["messages"].append({"role": "assistant", "tool_calls": [{"id": "9", "function": function}]})
    score = evaluate([one], repeats=False, min_probability=0.1)
    assert 0 < score.safe == score.calls - 1


def test_a_prediction_sees_what_stands_before_its_answer() -> None:
    one = record(Shop(random.Random(0)), 0)
    answers = [i for i, message in enumerate(one["messages"]) if message["role"] == "assistant"]
    assert [list(before) for before, _ in turns(one)] == [one["messages"][:i] for i in answers]


def test_a_name_counts_as_written_if_the_answer_has_it() -> None:
    asked: list[str] = []

    def given_name(name: str, min_probability: float, limit: int) -> list[Any]:
        asked.append(name)
        return []

    tools: dict[str, Any] = {"get": {}, "find": {}}
    forecast = SimpleNamespace(tools=tools, candidates=[], calls=lambda p, n: [], given_name=given_name)
    prefetch._count(Score(), forecast, [("get", {}), ("put", {}), ("get", {"n": 1})], 0.5)
    assert asked == ["get"]


def test_a_kept_result_is_right_if_any_answer_before_an_effect_has_its_call() -> None:
    safe: dict[str, Any] = {"get": {}}
    score = Score()
    left = prefetch._kept(score, {("get", '{"n":1}'), ("get", '{"n":2}')}, [], safe)
    left = prefetch._kept(score, left, [("get", {"n": 2})], safe)
    assert (score.kept, score.kept_wrong, left) == (1, 0, {("get", '{"n":1}')})
    assert not prefetch._kept(score, left, [("put", {}), ("get", {"n": 1})], safe)
    assert (score.kept, score.kept_wrong) == (1, 1)


def test_time_saved_is_the_shorter_of_tool_and_answer() -> None:
    score = Score(calls=10, safe=10, early=4, named=2)
    assert score.saved(0.1) == pytest.approx((4 * 0.1 + 2 * 0.05) / (10 * 0.4))
    assert score.saved(2.0) == pytest.approx((4 * 0.3 + 2 * 0.3) / (10 * 2.3))


@pytest.mark.parametrize("name", agents.SECTIONS)
def test_pages_are_written_from_the_stored_results(name: str) -> None:
    text = (agents.DOCS / name).read_text()
    assert agents.page(name, text) == text


def test_results_have_their_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [evaluate(runs(12), repeats=False, min_probability=0.5).row("shop")]
    facts = {"date": "2026-01-02", "commit": "abc", "cpu": "a cpu", "cores": 2}
    result = {"machine": facts, "command": "python -m bench prefetch", "rows": rows}
    monkeypatch.setattr(results_folder, "FOLDER", tmp_path)
    empty = agents.page("agents.md", (agents.DOCS / "agents.md").read_text())
    assert "| shop |" not in empty
    (tmp_path / f"{prefetch.RESULT}.json").write_text(json.dumps(result))
    assert "| shop | 12 |" in "\n".join(results_page.sections())
    page = agents.page("agents.md", empty)
    assert "| shop | 12 |" in page
    assert "other customers of the same agent as history" in page
    assert agents.page("agents.md", page) == page
    assert len(prefetch.SHORT) == len(prefetch.COLUMNS) - 3
