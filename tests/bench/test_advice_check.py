"""python -m bench advise: the split, the measurement, and the table, with a small target."""

from typing import Any

import pytest

from bench import advise
from bench.pages import results_page
from paceline.advise.traffic import TracedRequest, Traffic
from paceline.config import SamplingParams, SpecConfig
from paceline.drafters import model_free
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.testing import ToyTarget
from paceline.types import Seq


def a_row(**given: Any) -> dict[str, Any]:
    row = {
        "route": "agents",
        "drafters": "suffix",
        "max_draft": 8,
        "predicted_tokens_per_pass": 2.18,
        "measured_tokens_per_pass": 2.0,
        "replayed_tokens_per_pass": 2.05,
        "predicted_speedup": 1.5,
        "measured_speedup": 1.2,
        "predicted_turn_speedup": 1.2,
        "measured_turn_speedup": 1.2,
        "advised_on": 24,
        "outputs": 23,
        "different_texts": 0,
    }
    return row | given


def test_the_split_keeps_conversations_whole() -> None:
    requests = tuple(TracedRequest(f"{c}#{i}", "r", str(c), {}) for c in range(60) for i in range(3))
    first, second = advise.split(Traffic(requests))
    assert len(first.requests) + len(second.requests) == 180
    one, other = ({r.conversation for r in half.requests} for half in (first, second))
    assert one.isdisjoint(other)
    assert min(len(one), len(other)) > 15


def test_a_run_counts_from_the_second_round_on() -> None:
    engine = Engine(ToyTarget(memory=1), model_free(), Fixed())
    seq = Seq("a", [1, 2, 3], 3, SamplingParams(max_tokens=20, seed=1), SpecConfig((), max_draft=0))
    run = advise.answer(engine, seq)
    assert (run.tokens, run.passes) == (19, 19)
    assert 0 < run.decode_s < run.all_s


def test_errors_within_the_bounds_are_counted() -> None:
    rows = [a_row(), a_row(predicted_tokens_per_pass=2.3, predicted_speedup=1.3)]
    expected = "tokens per pass within 10 % on 1 of 2 routes, speed-up within 15 % on 1"
    assert advise.summary(rows) == expected
    assert advise.COLUMNS[2].cell(rows[0]) == "2.18 / 2.00 (+9 %)"


def test_a_kept_result_has_a_section() -> None:
    machine = {"model": "m", "date": "2026-01-02", "commit": "abc", "cpu": "a cpu", "cores": 2}
    result = {"machine": machine, "command": "python -m bench advise", "rows": [a_row()], "summary": "all"}
    page = "\n".join(results_page.advice(result))
    assert "## advice: m" in page
    assert "| agents | suffix, 8 | 2.18 / 2.00 (+9 %) | 2.05 | 1.50 x / 1.20 x (+25 %) |" in page


@pytest.mark.parametrize("name", ["no-such-workload"])
def test_an_unknown_file_is_named(name: str) -> None:
    with pytest.raises(SystemExit, match=name):
        advise._path(name)
