"""Public sets as cases: their own right answers score 1, wrong ones 0."""

import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import DataError, SettingError
from paceline.gate.cases import json_lines
from paceline.gate.evaluators import EVALUATORS, Reference
from paceline.gate.pair import Leg, ToolCall
from paceline.gate.suites import SUITES, suite_cases

DATA = Path(os.environ.get("PACELINE_DATA") or Path(__file__).parents[2] / "data")
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason="the public sets are not here: PACELINE_DATA names them"
)


def test_an_unknown_suite_lists_the_known() -> None:
    with pytest.raises(SettingError, match="bfcl"):
        suite_cases("blfc", Path())


def test_a_suite_without_its_data_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    with pytest.raises(DataError, match="PACELINE_DATA"):
        suite_cases("code")


def test_records_of_every_suite_become_cases(tmp_path: Path) -> None:
    """Of one record each, as the files have them."""
    records: dict[str, dict[str, Any]] = {
        "schemas/schemastore.jsonl": {
            "id": "s",
            "source": "store",
            "category": "c",
            "schema": {"type": "object"},
        },
        "schemas/jsonschemabench.jsonl": {"id": "b", "source": "b", "category": "c", "schema": True},
        "traces/bfcl_single_turn.jsonl": {"id": "x", "messages": [{"role": "user", "content": "?"}]},
        "code/HumanEval.jsonl": {"task_id": "H/0", "prompt": "def f():\n", "test": "", "entry_point": "f"},
    }
    made = []
    for name, record in records.items():
        suite, (make, _) = next((s, entry) for s, entry in SUITES.items() if any(name in f for f in entry[1]))
        made += [(suite, case) for case in make(record)]
    assert [suite for suite, _ in made] == ["schemas", "schemas", "bfcl", "code"]
    assert all(case.request["messages"] for _, case in made)


@needs_data
@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_has_cases_in_the_public_data(suite: str) -> None:
    cases = list(islice(suite_cases(suite, DATA), 30))
    assert len(cases) == 30
    assert len({case.id for case in cases}) == 30
    assert {case.route for case in cases} == {suite}


@needs_data
def test_right_code_and_right_calls_score_one() -> None:
    records = {r["task_id"]: r for r in islice(json_lines(DATA / "code" / "HumanEval.jsonl.gz"), 3)}
    for case in islice(suite_cases("code", DATA), 3):
        record = records[case.id]
        text = f"```python\n{record['prompt']}{record['canonical_solution']}```"
        assert _score("task_completion", case.request, Leg(status=200, text=text), case.reference) == 1.0
    for case in islice(suite_cases("bfcl", DATA), 20):
        assert case.reference is not None
        calls = case.reference.calls or ()
        right = Leg(status=200, text="", tool_calls=calls)
        assert _score("tool_call_match", case.request, right, case.reference) == 1.0
        assert (
            _score(
                "tool_call_match",
                case.request,
                right,
                Reference(calls=(*calls, *calls[:1], ToolCall("other", "{}"))),
            )
            == 0.0
        )


@needs_data
def test_recorded_instances_of_schemas_score_as_they_are_labelled() -> None:
    for record in islice(json_lines(DATA / "schemas" / "schemastore.jsonl"), 20):
        request = {"response_format": {"type": "json_schema", "json_schema": {"schema": record["schema"]}}}
        for test in record["tests"][:3]:
            leg = Leg(status=200, text=json.dumps(test["data"]))
            assert _score("schema_valid", request, leg, None) == float(test["valid"]), record["id"]


def _score(name: str, request: object, leg: Leg, reference: Reference | None) -> float | None:
    evaluator = next(e for e in EVALUATORS if e.__name__ == name)
    return evaluator(request, leg, reference or Reference())  # type: ignore[arg-type]
