"""python -m bench advise: the split, the measurement, and the table, with a small target."""

from dataclasses import asdict
from pathlib import Path
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


def figure(value: float, width: float = 0.0) -> dict[str, float]:
    return {"value": value, "low": value - width, "high": value + width}


def a_row(**given: Any) -> dict[str, Any]:
    row = {
        "route": "agents",
        "drafters": "suffix",
        "max_draft": 8,
        "predicted_tokens_per_pass": figure(2.18, 0.2),
        "measured_tokens_per_pass": figure(2.0, 0.1),
        "predicted_speedup": figure(1.5),
        "measured_speedup": figure(1.2),
        "predicted_turn_speedup": 1.2,
        "measured_turn_speedup": 1.2,
        "advised_on": 24,
        "outputs": 23,
        "conversations": [20, 19],
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
    (run,) = advise.answer(engine, [seq])
    assert (run.tokens, run.passes) == (19, 19)
    assert 0 < run.decode_s < run.all_s


def test_outputs_at_once_share_passes() -> None:
    target = ToyTarget(memory=1)
    engine, params = Engine(target, model_free(), Fixed()), SamplingParams(max_tokens=20, seed=1)
    seqs = [Seq(f"{i}", [1, 2, 3], 3, params, SpecConfig((), max_draft=0)) for i in range(6)]
    runs = advise.answer(engine, seqs, concurrency=3)
    assert [(run.tokens, run.passes) for run in runs] == [(19, 19)] * 6
    assert target.passes == 40


def test_a_state_is_continued(tmp_path: Path) -> None:
    """A row is made of what several calls have measured."""
    advice = {
        "drafters": ["suffix"], "max_draft": 8, "enabled": True, "reason": "", "turn_speedup": 1.1,
        "tokens_per_pass": figure(2.2), "speedup": figure(1.5), "advised_on": 9, "conversations": 5,
    }  # fmt: skip
    plain, fast = advise.Run(20, 20, 2.0, 3.0), advise.Run(20, 10, 1.0, 2.0)
    one = {"conversation": "a", "plain": asdict(plain), "advised": asdict(fast), "same_text": True}
    state = advise.State(tmp_path / "state.json")
    state.routes["agents"] = {"advice": advice, "tried": 2, "answered": [one, one | {"same_text": False}]}
    state.save()
    (row,) = advise.State(tmp_path / "state.json").rows()
    assert row["measured_tokens_per_pass"]["value"] == row["measured_speedup"]["value"] == 2.0
    assert row["measured_turn_speedup"] == 1.5
    assert (row["outputs"], row["conversations"], row["different_texts"]) == (2, [5, 1], 1)


def test_errors_within_the_bounds_are_counted() -> None:
    rows = [a_row(), a_row(predicted_tokens_per_pass=figure(2.3), predicted_speedup=figure(1.3))]
    expected = "tokens per pass within 10 % on 1 of 2 routes, speed-up within 15 % on 1"
    assert advise.summary(rows) == expected
    assert advise.COLUMNS[2].cell(rows[0]) == "2.18 (1.98 to 2.38) / 2.00 (1.90 to 2.10): +9 %"


def test_a_kept_result_has_a_section() -> None:
    machine = {"model": "m", "date": "2026-01-02", "commit": "abc", "cpu": "a cpu", "cores": 2}
    result = {
        "machine": machine, "command": "python -m bench advise", "rows": [a_row()], "summary": "all",
        "at_once": 4,
    }  # fmt: skip
    page = "\n".join(results_page.advice(result))
    assert "## advice: m" in page
    assert "/ 2.00 (1.90 to 2.10): +9 % | 1.50 x / 1.20 x: +25 % | 1.20 x / 1.20 x | 24 / 23 |" in page
    assert "4 at a time" in page


@pytest.mark.parametrize("name", ["no-such-workload"])
def test_an_unknown_file_is_named(name: str) -> None:
    with pytest.raises(SystemExit, match=name):
        advise._path(name)
