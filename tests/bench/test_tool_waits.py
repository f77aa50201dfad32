"""Recorded runs with slow tools: what is replayed, what is its history, and what counts as the same run."""

import json
import random
from typing import Any

import pytest

from bench.runs import tool_waits
from bench.runs.recorded_answers import Exactly, constraint
from bench.runs.tool_waits import (
    AHEAD,
    KEPT,
    PLAIN,
    WAYS,
    Amounts,
    RecordedTools,
    Replay,
    choose,
    expected,
    parser,
    row,
    served_rows,
    steps,
    totals,
)
from paceline import hub
from paceline.constraints import Choice, OutputSpec
from paceline.text import Tokenizer
from paceline.text.tool_calls import FORMATS
from support.agent_runs import FUNCTIONS, Shop

TOOLS: list[Any] = [{"type": "function", "function": function} for function in FUNCTIONS.values()]
FORM = FORMATS["smollm2"]


class Tokens:
    """As much of a tokenizer as is needed: a token is a character."""

    tool_format = FORM

    def encode(self, text: str, bos: bool = True) -> list[int]:
        return list(map(ord, text))

    def encode_chat(self, messages: list[Any], tools: list[Any]) -> list[int]:
        return self.encode(json.dumps(list(messages)))


def record(shop: Shop, group: int) -> dict[str, Any]:
    messages: list[Any] = []
    for before, calls in shop.run():
        messages = before if calls else [*before, {"role": "assistant", "content": "They are on their way."}]
    about = {"id": f"run {group}", "source": "shop", "domain": "orders", "model": "m", "group": group}
    return {**about, "messages": messages, "tools": TOOLS}


def chosen(count: int = 8, max_prompt: int = 10**6) -> tuple[list[tool_waits.RecordedRun], Any]:
    shop = Shop(random.Random(0))
    records = [record(shop, number) for number in range(count)]
    return choose("shop", records, Tokens(), 2, max_prompt)  # type: ignore[arg-type]


def test_the_last_groups_are_replayed_and_only_those_before_them_are_history() -> None:
    runs, history = chosen()
    assert [run.id for run in runs] == ["run 5", "run 6"]
    (batches,) = history.values()
    assert [one["id"] for batch in batches for one in batch] == [f"run {n}" for n in range(5)]
    assert not chosen(max_prompt=10)[0]  # too long


def test_an_answer_is_the_recorded_text_in_the_models_own_markup() -> None:
    run = chosen()[0][0]
    first, last = run.steps[0], run.steps[-1]
    ((name, arguments, result),) = first.calls
    assert first.text == f'<tool_call>[{{"name": "{name}", "arguments": {arguments}}}]</tool_call>'
    assert last.text == "They are on their way."
    assert result == run.steps[1].messages[-1]["content"]
    spec = OutputSpec(tools=run.tools, output=Choice((first.text,)))
    assert constraint(spec, FORM) == Exactly(first.text)
    assert spec.may_call  # so its calls are parsed


def test_a_tool_answers_as_it_does_next_in_the_recording_and_effects_are_noted() -> None:
    run = chosen()[0][0]
    tools = RecordedTools(run, 0.0)
    functions = tools.functions()
    for name, arguments, result in (call for step in run.steps for call in step.calls):
        assert functions[name](**json.loads(arguments)) == result
    assert functions["get_order"](order_id="none") == "not recorded"
    assert not tools.effects
    functions["cancel_order"](order_id="1")
    assert tools.effects == [("cancel_order", '{"order_id":"1"}')]
    tools.step = len(run.steps)
    name, arguments, _ = run.steps[0].calls[0]
    assert functions[name](**json.loads(arguments)) == "not recorded"


def replayed(run: tool_waits.RecordedRun, seconds: float, **changes: Any) -> Replay:
    texts, results = expected(run)
    given = {"texts": texts, "results": results, "calls": 3, "safe": 2, "tool_s": 0.9, **changes}
    return Replay(seconds=seconds, **given)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("changed", ["texts", "results", "effects"])
def test_a_run_is_the_same_only_if_texts_results_and_effects_are(way: str, changed: str) -> None:
    run = chosen()[0][0]
    ways = {name: replayed(run, 1.0) for name in WAYS}
    assert row(run, ways)["same"]
    getattr(ways[way], changed).append(("cancel_order", "{}"))
    assert not row(run, ways)["same"]


def test_sums_are_of_each_data_set_and_of_all() -> None:
    run = chosen()[0][0]
    rows = [
        row(run, {PLAIN: replayed(run, s), AHEAD: replayed(run, s / 2, used=1), KEPT: replayed(run, s / 4)})
        for s in (1.0, 3.0)
    ]
    one, both = totals(rows, {"shop": Amounts(tokens=10 * rows[0]["tokens"], calls=60, safe=20)})
    assert (one["set"], both["set"], both["runs"], both["same"]) == ("shop", "all", 2, 2)
    assert [both["ways"][way]["shorter"] for way in WAYS] == [0.0, 0.5, 0.75]
    assert both["ways"][AHEAD]["used"] == 2
    assert tool_waits.most(both) == pytest.approx(2 * 0.9 * 2 / 3 / 4)
    # Answers take (1 - 0.9) + (3 - 0.9) s for twice the tokens, a call 0.3 s.
    for total in (one, both):
        assert total["whole_s"] == pytest.approx(5 * 2.2 + 60 * 0.3)
        assert total["whole_safe_s"] == pytest.approx(20 * 0.3)


def test_amounts_are_of_all_answers_in_the_models_markup() -> None:
    shop = Shop(random.Random(0))
    records = [record(shop, number) for number in range(8)]
    amounts = Amounts.of(records, Tokens())  # type: ignore[arg-type]
    replayed_too = [steps(one, Tokens(), 10**6) for one in records]  # type: ignore[arg-type]
    assert amounts.tokens == sum(step.tokens for run in replayed_too for step in run)
    assert amounts.calls == amounts.safe == sum(len(step.calls) for run in replayed_too for step in run)
    function = {"name": "cancel_order", "arguments": "{}"}
    records[0]["messages"].append({"role": "assistant", "tool_calls": [{"id": "9", "function": function}]})
    more = Amounts.of(records, Tokens())  # type: ignore[arg-type]
    assert (more.calls, more.safe) == (amounts.calls + 1, amounts.safe)


def test_a_real_server_writes_the_recorded_answers_and_foresees_calls_from_the_history() -> None:
    """The shop's customers ask alike, so that a predictor that has seen forty of them foresees some calls."""
    shop = Shop(random.Random(0))
    records = [record(shop, number) for number in range(40)]
    options = parser().parse_args(["--tool-ms", "20", "--threads", "1"])
    tokenizer = Tokenizer.load(hub.resolve(options.model))
    runs, history = choose("shop", records, tokenizer, 1, options.max_prompt)
    (served,) = served_rows(options, runs, history)
    assert served["same"]
    assert served["calls"] == served["safe"] == len(runs[0].steps) - 1
    assert served["ways"][PLAIN]["used"] == 0
    assert served["ways"][AHEAD]["used"] > 0
