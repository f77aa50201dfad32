"""The cost curve: measured once, kept, and read again."""

import json
from pathlib import Path

import pytest

from paceline.config import EngineConfig
from paceline.target import cost
from paceline.target.cost import CostTable, cost_table, measure
from paceline.target.eager.target import TorchTarget
from paceline.target.load import load_target
from paceline.types import Feed, Seq
from support.torch_cases import CONFIG, random_weights


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TorchTarget:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    return TorchTarget(random_weights(), CONFIG)


def test_a_table_is_a_surface_of_lines() -> None:
    table = CostTable({100: {1: 10.0, 3: 14.0}, 300: {1: 20.0, 3: 28.0}})
    assert table(1, 100) == 10
    assert table(2, 100) == 12
    assert table(3, 200) == 21
    assert table(5, 100) == 18  # beyond what was measured, by the last slope
    assert table(1, 500) == 30
    assert table(1, 0) == 5


def test_costs_stay_above_nothing() -> None:
    assert CostTable({100: {1: 30.0, 8: 10.0}})(64, 100) > 0


def test_every_row_count_is_measured_and_nothing_is_left_behind(target: TorchTarget) -> None:
    before = target.cache_stats
    table = measure(target)
    assert list(table.ms) == [256]
    assert set(table.ms[256]) == set(cost.ROWS)
    assert all(ms > 0 for ms in table.ms[256].values())
    after = target.cache_stats
    assert (after.free, after.cached, after.live) == (before.free, before.cached, before.live)


def test_a_table_is_read_again(target: TorchTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cost_table(target)
    monkeypatch.setattr(cost, "measure", lambda _: pytest.fail("measured twice"))
    assert cost_table(target) == first


@pytest.mark.parametrize("kept", ["[]", "{", '{"KEY": {"x": {"1": 2}}}', '{"KEY": 3}', '{"KEY": {"1": 2}}'])
def test_damaged_notes_are_measured_anew(target: TorchTarget, tmp_path: Path, kept: str) -> None:
    key = json.dumps(cost._key(target))[1:-1]
    (tmp_path / "cost.json").write_text(kept.replace("KEY", key))
    assert cost_table(target)


def test_a_cache_in_use_keeps_its_sequences(target: TorchTarget) -> None:
    target.open(Seq("s", [1, 2, 3], 3))
    logits = target.forward([Feed("s", [1, 2, 3])]).logits
    target.keep("s", 0)
    measure(target)
    assert target.forward([Feed("s", [1, 2, 3])]).logits.equal(logits)


@pytest.mark.model
def test_the_native_engine_is_measured_at_two_contexts(smollm2_path: Path) -> None:
    native = load_target(smollm2_path, EngineConfig(device="cpu", cache_mb=256))
    if isinstance(native, TorchTarget):
        pytest.skip("this machine has no native engine")
    table = measure(native)
    assert list(table.ms) == list(native.timed_contexts)
    assert native.cache_stats.cached == native.cache_stats.live == 0


def test_a_cache_too_small_to_measure_in_measures_nothing() -> None:
    small = TorchTarget(random_weights(), EngineConfig(device="cpu", cache_mb=1))
    small.max_context = 100
    assert not measure(small)
