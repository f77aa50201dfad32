"""The server's benchmarks: what is read from a stream, how rounds become rows, what fails a soak."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import results_folder
from bench.pages import results_page
from bench.serve import concurrency, hostile_soak, soak
from bench.serve.concurrency import Sample
from bench.serve.hostile import ATTACKS, Attack
from bench.serve.hostile_soak import AttackRecord
from bench.serve.http_client import Reading, Refused, take
from bench.serve.pairs import PairRecords
from bench.serve.servers import RunningServer, ServerMode
from bench.serve.soak_load import Tally
from bench.serve.soak_requests import Expected, bad_bodies
from bench.serve.victims import Records, Span, during, milliseconds

SERVED: RunningServer = None  # type: ignore[assignment]  # never asked here
OURS, THEIRS, SLOW = (
    ServerMode(s, m, SERVED) for s, m in (("paceline", "d"), ("llama.cpp", "a"), ("llama.cpp", "b"))
)


def test_a_reading_takes_text_calls_and_usage() -> None:
    found = Reading()
    call = {"index": 0, "function": {"name": "f", "arguments": '{"a"'}}
    rest = {"index": 0, "function": {"arguments": ": 1}"}}
    take(found, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 1.0)
    take(found, {"choices": [{"delta": {"content": "Hi"}}]}, 2.0)
    take(found, {"choices": [{"delta": {"tool_calls": [call]}}]}, 3.0)
    take(found, {"choices": [{"delta": {"tool_calls": [rest]}, "finish_reason": "tool_calls"}]}, 4.0)
    take(found, {"choices": [], "usage": {"completion_tokens": 3}}, 5.0)
    assert (found.first, found.last, found.tokens) == (2.0, 4.0, 3)
    assert found.ms_per_token == 1000.0
    assert found.calls == {0: ["f", '{"a": 1}']}
    with pytest.raises(Refused):
        take(found, {"error": {"message": "no"}}, 6.0)


def samples() -> list[Sample]:
    rates = {OURS: (10.0, 40.0), THEIRS: (8.0, 20.0), SLOW: (1.0, 2.0)}
    reading = Reading(first=0.5, last=1.5, tokens=11)
    return [
        Sample(way, agents, turn, number, rate + number, (reading,))
        for way, both in rates.items()
        for agents, rate in zip((1, 16), both, strict=True)
        for turn in concurrency.TURNS
        for number in range(2)
    ]


def test_rounds_become_rows_and_ratios() -> None:
    made = concurrency.rows(samples(), [OURS, THEIRS, SLOW], 16)
    assert len(made) == 12
    assert made[0]["tokens_per_s"] == {"median": 10.5, "low": 10.0, "high": 11.0}
    assert made[0]["ttft_p99_ms"] == 500
    assert made[0]["tpot_ms"] == 100
    assert concurrency.scaling(samples(), OURS, "first", 16).high == 4.0
    found = concurrency.against(samples(), OURS, [THEIRS, SLOW], "next", 16)
    assert (found["peer"], found["high"]) == ("llama.cpp a", 2.0)
    assert concurrency.against(samples(), OURS, [], "next", 16) is None


def test_a_soak_fails_for_wrong_texts_stuck_requests_and_growth() -> None:
    tally, right = Tally(), Expected("greedy chat", "/", {}, "Paris", ())
    tally.compare(right, "Paris", [])
    left = dict.fromkeys(soak.GAUGES, 0.0)
    flat = [(float(i), 100.0) for i in range(11)]
    assert soak.faults(soak.figures(tally, PairRecords(), flat, 104.0, left), alive=True) == []
    tally.compare(right, "Rome", [])
    tally.failed(500, "broken")
    found = soak.figures(tally, PairRecords(), flat, 106.0, {**left, soak.GAUGES[0]: 1.0})
    assert len(soak.faults(found, alive=True)) == 4
    assert found["completed answers compared"] == 2


def hostile_records(gap_s: float, health_s: float) -> tuple[list[AttackRecord], Records]:
    """An attack from second 10 to 11, gaps of 20 ms before it, and one of `gap_s` that overlaps its start."""
    attack = AttackRecord(Attack("a bomb", frozenset({400}), lambda server: 400), [Span(10, 1)])
    attack.statuses[400] += 1
    records = Records(pairs=1, health=[Span(1, 0.001), Span(10.5, health_s)])
    records.gaps = [Span(i / 50, 0.02) for i in range(400)] + [Span(9.99, gap_s)]
    return [attack], records


def test_gaps_during_an_attack_are_those_that_overlap_it() -> None:
    attacks, records = hostile_records(0.5, 0.01)
    windows = attacks[0].windows
    assert during(records.gaps, windows) == [Span(9.99, 0.5)]
    assert len(during(records.gaps, windows, inside=False)) == 400
    assert milliseconds(records.gaps, 0.5) == 20.0
    assert milliseconds(records.gaps, 1) == 500.0
    assert hostile_soak.rows(attacks, records)[0]["gap_ms"] == 500.0


def test_a_wrong_pair_and_a_refused_one_fail_a_soak() -> None:
    attacks, records = hostile_records(0.06, 0.1)
    pairs = PairRecords(wrong=["a text"], refused=[(503, "no")], stuck=["a request"])
    result = hostile_soak.figures(attacks, records, pairs, (100.0, 104.0))
    assert len(hostile_soak.faults(result, alive=True)) == 3
    flat, left = [(float(i), 100.0) for i in range(11)], dict.fromkeys(soak.GAUGES, 0.0)
    assert len(soak.faults(soak.figures(Tally(), pairs, flat, 104.0, left), alive=True)) == 3


def test_a_hostile_soak_fails_for_gaps_health_memory_and_unexpected_answers() -> None:
    attacks, records = hostile_records(0.06, 0.1)
    assert (
        hostile_soak.faults(hostile_soak.figures(attacks, records, PairRecords(), (100.0, 104.0)), alive=True)
        == []
    )
    attacks, records = hostile_records(0.08, 0.3)
    attacks[0].statuses[503] += 1
    records.wrong.append("a text")
    records.refused.append((500, "an ordinary request"))
    result = hostile_soak.figures(attacks, records, PairRecords(), (100.0, 106.0))
    assert len(hostile_soak.faults(result, alive=False)) == 7


def test_every_attack_has_an_expected_answer() -> None:
    assert all(attack.expected for attack in ATTACKS.values())


def test_bad_bodies_are_all_different() -> None:
    made = list(bad_bodies("m"))
    assert len({body for _, _, body in made}) == len({what for what, _, _ in made}) == len(made)


def test_results_have_their_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_folder, "FOLDER", tmp_path)
    machine = {"model": "m", "date": "2026-01-02", "commit": "abc", "cpu": "a cpu", "cores": 2}
    spread = {"median": 2.0, "low": 1.0, "high": 3.0}
    turn = {"system": "paceline", "mode": "default", "prompt_tokens": 2000, "repeats": 5}
    agents = {"rows": concurrency.rows(samples(), [OURS], 16), "scaling": [], "against": []}
    result: dict[str, Any] = {"machine": machine, "command": "python -m bench serve", "agents": agents}
    result["settings"] = {"context": 512, "max_tokens": 64}
    result["turns"] = [{**turn, "cold_ms": spread, "next_ms": spread, "share": spread}]
    (tmp_path / "serve-m.json").write_text(json.dumps(result))
    ended = {"machine": machine, "command": "x", "figures": {"wrong texts": 0}, "problems": []}
    (tmp_path / "soak-m.json").write_text(json.dumps(ended))
    page = "\n".join(results_page.sections())
    assert "| paceline | default | 2000 | 2 (1 to 3) | 2 (1 to 3) | 2.000 (1.000 to 3.000) | 5 |" in page
    assert "| first | 16 | paceline | d | 40.5 (40.0 to 41.0) | 500 | 500 | 100.0 | 2 |" in page
    assert "| wrong texts | 0 |" in page


def test_memory_counts_from_the_third_series_of_attacks_on() -> None:
    records = Records()
    records.memory = [(t, 100.0 if t < 20 else 110.0 if t < 50 else 120.0) for t in range(80)]
    series = [Span(10 * i, 10) for i in range(8)]
    assert hostile_soak.resident_before_and_after(records, series, warm=9, last=79) == (110.0, 120.0)
    assert hostile_soak.resident_before_and_after(records, series[:5], warm=9, last=79) == (100.0, 120.0)
