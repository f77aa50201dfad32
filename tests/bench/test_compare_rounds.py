"""A comparison is fair by construction, and one bad system costs only its own rows."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.compare.rounds import Comparison, Outcome, Plan
from bench.compare.rows import FIELDS, rows
from bench.peers.pool import Pool
from bench.peers.systems import Build, Entry
from bench.peers.wire import Answer
from bench.workload import Prompt
from support import SUPPORT

FAKE = SUPPORT / "fake_driver.py"


class FakeBuild(Build):
    @property
    def command(self) -> list[str]:
        return [sys.executable, str(FAKE)]


def entries(*modes: str, remembers: Sequence[str] = ()) -> list[Entry]:
    build = FakeBuild("fake", "fake", "", modes, remembers=tuple(remembers))
    return [Entry(build, mode) for mode in modes]


def plan(tmp_path: Path, chosen: Sequence[Entry], **more: Any) -> Plan:
    model = tmp_path / "none.gguf"
    model.write_bytes(b"")
    prompts = [Prompt("agents", "a", (1, 2)), Prompt("agents", "b", (3, 4)), Prompt("chat", "c", (5,))]
    return Plan(model, chosen, prompts, warm_up=(7,), **more)


def run(plan: Plan, said: list[str] | None = None) -> Outcome:
    return Comparison(plan, (said if said is not None else []).append).run()


@pytest.mark.slow
def test_one_bad_system_costs_only_its_own_rows(tmp_path: Path) -> None:
    good, crashing, unloadable, late = entries("plain", "crash", "no load", "hang later")
    said: list[str] = []
    measured = plan(tmp_path, [good, crashing, unloadable, late])
    comparison = Comparison(measured, said.append)
    comparison._pool.patience = 1.0
    outcome = comparison.run()
    assert len(outcome.samples) == 3
    assert set(outcome.errors) == {crashing, unloadable, late}
    assert "no answer" in outcome.errors[late]
    assert len(said) == 3
    found = rows(outcome.samples, measured.entries, outcome.peaks, outcome.errors, [0.0], ["agents", "chat"])
    assert all(set(FIELDS) <= set(row) for row in found)
    broken = [row for row in found if "error" in row]
    assert {row["mode"] for row in broken} == {"crash", "no load", "hang later"}
    assert all(row["n"] == 0 and row["tokens_per_s"] is None for row in broken)


def test_every_system_gets_the_same_prompts_the_same_number_of_times(tmp_path: Path) -> None:
    chosen = entries("plain", "other")
    outcome = run(plan(tmp_path, chosen, temperatures=(0.0, 0.7), repeats=2))
    keys = {entry: sorted(s.key for s in outcome.samples if s.entry == entry) for entry in chosen}
    assert keys[chosen[0]] == keys[chosen[1]]
    assert len(set(keys[chosen[0]])) == 3 * 2 * 2
    assert outcome.repeats == 2


def test_what_remembers_never_meets_a_prompt_twice(tmp_path: Path) -> None:
    """The fake tells how many requests it has served: warm-ups first, then at most one round of prompts."""
    plain, learner = entries("plain", "learns", remembers=["learns"])
    outcome = run(plan(tmp_path, [plain, learner], temperatures=(0.0, 0.7), repeats=2))
    served = {
        entry: max(s.tokens[2] for s in outcome.samples if s.entry == entry) for entry in (plain, learner)
    }
    assert served == {plain: 2 + 3 * 4, learner: 2 + 3}


def test_the_warm_up_is_not_a_measured_prompt(tmp_path: Path) -> None:
    measured = plan(tmp_path, entries("plain"))
    assert tuple(measured.warm_up) not in {p.tokens for p in measured.prompts}
    assert min(s.tokens[2] for s in run(measured).samples) == 3  # two answers came before


def slow(seconds: float) -> Callable[..., Answer]:
    def generate(self: Pool, entry: Entry, **ask: Any) -> Answer:
        return Answer([1, 2], seconds / 2, seconds if entry.plain else 0.001)

    return generate


def test_a_slow_system_sits_out_and_repeats_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pool, "generate", slow(1000.0))
    monkeypatch.setattr(Pool, "get", lambda self, entry: None)
    plain, fast = entries("plain", "fast")
    outcome = run(plan(tmp_path, [plain, fast], budget=600.0, repeats=1))
    counts = {entry: sum(s.entry == entry for s in outcome.samples) for entry in (plain, fast)}
    assert counts == {plain: 1, fast: 3}
    assert outcome.sat_out == {plain: 2}
    assert run(plan(tmp_path, [plain, fast], budget=0.0, repeats=5)).repeats == 1


def test_shares_add_up_to_the_budget(tmp_path: Path) -> None:
    measured = plan(tmp_path, entries("a", "b", "c"), temperatures=(0.0, 0.7), budget=90.0)
    assert 3 * (measured.share(0) + measured.share(1)) == pytest.approx(90.0)
    assert 3 * (measured.share(0, 30) + measured.share(1, 30)) == pytest.approx(60.0)
