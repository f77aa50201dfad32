"""The cost curve: measured once, kept, and read again."""

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from paceline.config import EngineConfig, SamplingParams, SpecConfig
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.target import cost
from paceline.target.cost import (
    CostMonitor,
    CostTable,
    CpuTime,
    batch_ms,
    confirmed_cost_table,
    cost_table,
    measure,
)
from paceline.target.eager.layer import FeedForward
from paceline.target.eager.target import TorchTarget
from paceline.target.load import load_target
from paceline.target.weights.reader import load
from paceline.testing import ToyTarget
from paceline.types import NO_DRAFT, Feed, Round, Scores, Seq
from support.models import CONFIG, random_weights, save_reference


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


def test_a_row_of_a_prompt_costs_the_slope_of_the_largest_passes() -> None:
    table = CostTable({100: {1: 10.0, 2: 11.0, 4: 15.0}, 300: {1: 20.0, 2: 22.0, 4: 30.0}})
    assert [table.prompt_row_ms(context) for context in (100, 200, 300)] == [2, 3, 4]
    assert CostTable({100: {4: 8.0}}).prompt_row_ms(900) == 2


def test_sequences_of_a_pass_share_weights_and_have_contexts_of_their_own() -> None:
    table = CostTable({100: {1: 10.0, 3: 14.0}, 300: {1: 20.0, 3: 28.0}})
    context_ms = (table(2, 300) - table(2, 0)) + 2 * (table(1, 100) - table(1, 0))
    assert batch_ms(table, [(2, 300, 1), (1, 100, 2)]) == pytest.approx(table(4, 0) + context_ms)
    assert batch_ms(table, [(2, 300, 1), (1, 100, 1), (1, 100, 1)]) == pytest.approx(table(4, 0) + context_ms)
    assert batch_ms(lambda rows, _: 10 / rows, [(4, 0, 2)]) == 5  # more rows cost no less
    assert batch_ms(table, []) == table(1, 0)


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
    for limit in ("MAX_SPREAD", "MAX_OTHERS"):  # whatever else this machine does
        monkeypatch.setattr(cost, limit, float("inf"))
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


class Clocked(ToyTarget):
    """A target on a fake clock: pass i takes noise_of(i) milliseconds for each of its rows."""

    disk_tier = False
    timed_contexts: tuple[int, ...] = (256,)
    width = 1

    def __init__(self, noise_of: Callable[[int], float] = lambda _: 1.0) -> None:
        super().__init__()
        self.seconds, self._noise_of = 0.0, noise_of
        self.others: list[float] = []  # what other processes take during the next measurements

    def memory(self) -> dict[str, int]:
        return {}

    def flush(self, seconds: float) -> bool:
        return True

    def final_norm(self, rows: Tensor) -> Tensor:
        return rows

    def forward(self, feeds: Sequence[Feed], taps: Sequence[int] = ()) -> Scores:
        rows = sum(len(feed.tokens) + len(feed.draft) for feed in feeds)
        self.seconds += rows * self._noise_of(self.passes) / 1000
        return super().forward(feeds, taps)

    @contextmanager
    def noise(self, seq: Seq) -> Iterator[None]:
        self.open(seq)
        self._rows[seq.id] = seq.tokens[:-1]
        yield
        self.close(seq.id)

    def make_ready(self) -> None:
        return

    def preload(self) -> None:
        return None

    def measured(self, budget: float = 10.0) -> CostTable:
        now = CpuTime(self.seconds, 0.0, None, 2)
        table = measure(self, budget, lambda: self.seconds, lambda: now)
        return replace(table, others=self.others.pop(0) if self.others else 0.0)


def test_on_a_quiet_machine_all_timings_agree() -> None:
    table = Clocked().measured()
    assert table.ms == {256: {rows: float(rows) for rows in cost.ROWS}}
    assert table.spread == pytest.approx(1)


def test_after_the_budget_each_row_count_is_tried_once_and_the_first_again() -> None:
    target = Clocked()
    assert set(target.measured(budget=0.001).ms[256]) == set(cost.ROWS)
    assert target.passes == 1 + len(cost.ROWS) + 1


def test_a_slow_model_on_a_busy_machine_is_noticed() -> None:
    slow = Clocked(lambda number: 1000.0 if number > 5 else 3000.0).measured(budget=0.001)
    assert slow.spread > cost.MAX_SPREAD


def test_on_a_busy_machine_timings_spread_and_the_fastest_counts() -> None:
    """One of the three passes with each number of rows is undisturbed."""
    table = Clocked(lambda number: 1.0 if number > 10 else 3.0).measured()
    assert table.ms == {256: {rows: float(rows) for rows in cost.ROWS}}
    assert table.spread == pytest.approx(3)


def test_one_slow_moment_is_no_busy_machine() -> None:
    assert Clocked(lambda number: 1.0 if number > 3 else 3.0).measured().spread == pytest.approx(1)


def others(taken: float, own: float, cpus: int = 2, seconds: float = 1.5) -> Callable[[], CpuTime]:
    """Counters that stand still but for this: shares of the CPUs, of all processes and of this one."""
    readings = iter([CpuTime(7.0, 3.0, 90.0, cpus), *[_later(taken, own, cpus, seconds)] * 9])
    return lambda: next(readings)


def _later(taken: float, own: float, cpus: int, seconds: float) -> CpuTime:
    return CpuTime(7.0 + seconds, 3.0 + own * cpus * seconds, 90.0 + taken * cpus * seconds, cpus)


@pytest.mark.parametrize(
    ("taken", "own", "share", "quiet"),
    [
        (0.98, 0.97, 0.01, True),
        (1.0, 0.5, 0.5, False),  # a process that never sleeps, on one of two CPUs
        (0.95, 0.83, 0.12, False),
        (0.6, 0.1, 0.0, True),  # others, beside idle CPUs: a model on a GPU, or with few threads
        (0.9, 1.0, 0.0, True),  # counters in clock ticks lag behind
    ],
)
def test_a_load_that_lasts_shows_in_the_time_of_other_processes(
    taken: float, own: float, share: float, quiet: bool
) -> None:
    """All passes are equally slow, so nothing else shows it."""
    target = Clocked(lambda _: 3.0)
    table = measure(target, 10.0, lambda: target.seconds, others(taken, own))
    assert table.spread == pytest.approx(1)
    assert table.others == pytest.approx(share)
    assert table.quiet == quiet


def test_where_other_processes_are_not_known_only_the_spread_counts() -> None:
    target = Clocked()
    unknown = CpuTime(7.0, 3.0, None, 2)
    assert measure(target, 10.0, lambda: target.seconds, lambda: unknown).quiet
    assert CpuTime.now().wall > 0


@pytest.fixture
def clocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clocked:
    """`cost_table` measures on its clock."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    target = Clocked()
    monkeypatch.setattr(cost, "measure", lambda _, budget=cost.BUDGET: target.measured(budget))
    return target


def test_a_table_of_a_busy_machine_is_measured_again_until_it_is_quiet(clocked: Clocked) -> None:
    quiet: Callable[[int], float] = lambda _: 1.0  # noqa: E731
    clocked._noise_of = lambda number: 2.0 + number % 3
    busy = cost_table(clocked)
    assert busy.spread > cost.MAX_SPREAD
    assert busy(1, 256) > 1
    clocked._noise_of = quiet
    assert cost_table(clocked)(1, 256) == 1
    passes = clocked.passes
    assert cost_table(clocked)(1, 256) == 1
    assert clocked.passes == passes  # read this time


def test_a_table_is_confirmed_by_the_next_measurement_that_agrees(clocked: Clocked) -> None:
    """It was measured under a load that lasted, which shows in no spread."""
    clocked._noise_of = lambda _: 3.0
    loaded = cost_table(clocked)
    clocked._noise_of = lambda _: 1.0
    table, confirmed = confirmed_cost_table(clocked, loaded)
    assert confirmed
    assert table(1, 256) == 1
    assert cost_table(clocked)(1, 256) == 1  # stored


def test_a_machine_on_which_no_two_measurements_agree_is_busy(clocked: Clocked) -> None:
    before = cost_table(clocked)
    clocked._noise_of = lambda number: 1.0 + number // 16
    _, confirmed = confirmed_cost_table(clocked, before)
    assert not confirmed
    assert cost_table(clocked) == before


def test_a_busy_machines_table_has_the_fastest_pass_of_each_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that slows passes of one row more than others makes drafts look free."""
    tables = [
        CostTable({256: {1: 9.0, 2: 9.0, 8: 9.0}}),
        CostTable({256: {1: 1.0, 2: 20.0, 8: 50.0}, 2048: {1: 3.0, 2: 30.0, 8: 60.0}}),
        CostTable({256: {1: 5.0, 2: 2.0, 8: 80.0}}),
        CostTable({}),
    ]
    later = iter(tables[1:])
    monkeypatch.setattr(cost, "measure", lambda _: next(later))
    table, confirmed = confirmed_cost_table(Clocked(), tables[0])
    assert not confirmed
    assert table.ms == {256: {1: 1, 2: 2, 8: 9}, 2048: {1: 3, 2: 30, 8: 60}}


def test_a_table_under_a_steady_load_is_measured_twice_and_again_at_the_next_start(clocked: Clocked) -> None:
    clocked.others, clocked._noise_of = [0.5, 0.4], lambda number: 3.0 if number > 16 else 4.0
    busy = cost_table(clocked)
    assert (busy.others, busy(1, 256)) == (0.4, 3)  # the better one is used meanwhile
    clocked._noise_of = lambda _: 1.0
    assert cost_table(clocked)(1, 256) == 1
    clocked.others = [0.5]
    assert cost_table(clocked)(1, 256) == 1  # read


def test_a_table_whose_first_measurement_met_a_load_is_kept_if_the_second_did_not(clocked: Clocked) -> None:
    clocked.others = [0.5]
    assert cost_table(clocked).quiet
    passes = clocked.passes
    cost_table(clocked)
    assert clocked.passes == passes


def test_a_table_with_all_contexts_is_used_before_a_quieter_one_without(clocked: Clocked) -> None:
    """One context alone would say that a context costs nothing."""
    clocked.timed_contexts, clocked.others = (16, 32), [0.5]
    clocked._noise_of = lambda number: 1.0 if number <= 32 else 1e6  # a second context is not begun
    assert list(cost_table(clocked).ms) == [16, 32]
    passes, clocked._noise_of = clocked.passes, lambda _: 1.0
    assert list(cost_table(clocked).ms) == [16, 32]
    assert clocked.passes > passes  # the first was provisional


def test_a_steady_load_confirms_no_table(clocked: Clocked) -> None:
    before = cost_table(clocked)
    clocked.others, clocked._noise_of = [0.5] * 3, lambda _: 2.0
    table, confirmed = confirmed_cost_table(clocked, before)
    assert not confirmed
    assert not table.quiet
    assert cost_table(clocked) == before


def rounds(target_us: int, count: int, rows: int = 1, batch: int = 1) -> list[Round]:
    return [Round("r", 256, (), NO_DRAFT, (), (1,), 0, batch, rows, 0, target_us) for _ in range(count)]


@pytest.mark.parametrize(("target_us", "again"), [(4000, True), (1000, False), (1300, False), (300, True)])
def test_a_table_that_passes_disagree_with_for_long_is_measured_again(
    clocked: Clocked, target_us: int, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.run)
    monitor = CostMonitor(clocked, cost_table(clocked))
    for r in rounds(target_us, cost.DRIFT_PASSES):
        monitor.round(r)
    passes = clocked.passes
    cost_table(clocked)
    assert (clocked.passes > passes) == again


def test_few_passes_and_other_passes_say_nothing_about_the_table(clocked: Clocked) -> None:
    monitor = CostMonitor(clocked, cost_table(clocked))
    slow = cost.DRIFT_PASSES - 1
    far = [replace(r, start=2 * 256 + 1) for r in rounds(9000, slow)]
    for r in (*rounds(9000, slow), *rounds(9000, slow, rows=40), *rounds(9000, slow, batch=2), *far):
        monitor.round(r)
    passes = clocked.passes
    cost_table(clocked)
    assert clocked.passes == passes


def test_a_slow_hour_long_ago_is_forgotten(clocked: Clocked) -> None:
    """Each window of passes is judged alone, so one that agrees starts anew."""
    monitor = CostMonitor(clocked, cost_table(clocked))
    for _ in range(3):
        for r in (*rounds(9000, cost.DRIFT_PASSES // 2 - 1), *rounds(1000, cost.DRIFT_PASSES // 2 + 1)):
            monitor.round(r)
    passes = clocked.passes
    cost_table(clocked)
    assert clocked.passes == passes


@pytest.mark.parametrize("ms", [{}, {256: {}}, {256: dict.fromkeys(cost.ROWS, 0.0)}])
def test_without_a_measurement_there_is_nothing_to_compare(
    clocked: Clocked, ms: dict[int, dict[int, float]]
) -> None:
    monitor = CostMonitor(clocked, CostTable(ms))
    for r in rounds(9000, cost.DRIFT_PASSES):
        monitor.round(r)


def test_an_engine_finds_out_that_its_table_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marked = threading.Event()
    monkeypatch.setattr(cost, "_path", lambda: tmp_path / "cost.json")
    monkeypatch.setattr(CostMonitor, "_make_provisional", lambda _: marked.set())
    monkeypatch.setattr(cost, "DRIFT_PASSES", 4)
    target = Clocked(lambda _: 1000.0)
    engine = Engine(target, {}, Fixed(), [CostMonitor(target, target.measured())])
    engine.submit(Seq("s", [1, 2], 2, SamplingParams(max_tokens=8), SpecConfig(())))
    while engine.busy:
        engine.step()
    assert marked.wait(60)


def test_two_processes_that_store_tables_lose_none(clocked: Clocked, tmp_path: Path) -> None:
    def store(key: str) -> None:
        for _ in range(20):
            with cost._updating() as tables:
                tables[key] = tables.get(key, 0) + 1

    threads = [threading.Thread(target=store, args=(key,)) for key in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert json.loads((tmp_path / "cost.json").read_text()) == {"a": 20, "b": 20}


class RunningTarget(TorchTarget):
    """Its passes take until their results are read: more rows take longer."""

    now = 0.0

    def forward(self, feeds: Sequence[Feed], taps: Sequence[int] = ()) -> Scores:
        scores = super().forward(feeds, taps)
        seconds = 0.01 * sum(len(feed.tokens) + len(feed.draft) for feed in feeds)
        return replace(scores, logits=LateLogits(self, seconds), running=True)  # type: ignore[arg-type]


class LateLogits:
    def __init__(self, target: RunningTarget, seconds: float) -> None:
        self._target, self._seconds = target, seconds

    def __getitem__(self, at: object) -> "LateLogits":
        return self

    def tolist(self) -> list[float]:
        self._target.now += self._seconds
        return [0.0]


def test_a_pass_that_runs_beside_the_host_is_waited_for() -> None:
    target = RunningTarget(random_weights(), CONFIG)
    table = measure(target, clock=lambda: target.now)
    assert table.ms[256] == {rows: pytest.approx(10 * rows) for rows in cost.ROWS}


def test_timed_rows_of_a_mixture_use_experts_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows touch more experts, and the curve sees what that costs."""
    save_reference("mixtral", tmp_path, num_local_experts=16, num_hidden_layers=1)
    target = TorchTarget(load(tmp_path), CONFIG)
    used: dict[int, set[int]] = {}
    rows = 0
    run, forward = FeedForward.__call__, target.forward

    def counted(self: FeedForward, x: Tensor) -> Tensor:
        used.setdefault(rows, set()).add(id(self))
        return run(self, x)

    def noted(feeds: Sequence[Feed]) -> Scores:
        nonlocal rows
        rows = 1 + len(feeds[0].draft)
        return forward(feeds)

    monkeypatch.setattr(FeedForward, "__call__", counted)
    monkeypatch.setattr(target, "forward", noted)
    assert measure(target, budget=10.0).ms[256].keys() == {1, 2, 4, 8, 16}
    touched = [len(used[count]) for count in (1, 2, 4, 8, 16)]
    assert touched[0] == 2
    assert touched == sorted(touched)
    assert touched[-1] > 10


@pytest.mark.parametrize(("apart", "said"), [(1.0, False), (3.0, True)])
def test_the_log_says_why_a_machine_counts_as_busy(
    clocked: Clocked, caplog: pytest.LogCaptureFixture, apart: float, said: bool
) -> None:
    caplog.set_level(logging.INFO, "paceline")
    clocked.others, clocked._noise_of = [0.5, 0.5], lambda number: apart if number % 2 else 1.0
    cost_table(clocked)
    (line,) = caplog.messages
    assert "other processes take 50 % of the CPUs" in line
    assert ("times one another" in line) == said
