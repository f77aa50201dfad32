"""The cost of a pass by its rows and its context, t_V(n, context): measured once for a model on a machine.

A table that was measured on a busy machine, or that the passes of a process disagree with for long, is
provisional: it is used, and measured again at the next start. A load that comes and goes shows in the spread
of the passes. One that lasts makes all of them equally slow, and shows in the CPU time that other processes
take meanwhile.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from paceline import limits
from paceline.atomic import locked, read_json, write_json
from paceline.errors import PacelineError
from paceline.paths import home
from paceline.target import hardware
from paceline.target.base import ModelTarget
from paceline.types import Draft, Feed, Finish, Round, Seq

ROWS: Final = (1, 2, 4, 8, 16)
REPEATS: Final = 3  # passes; the fastest counts
BUDGET: Final = 1.5  # seconds, after which no further pass is tried
MAX_SPREAD: Final = 1.2  # second fastest over fastest, median of all row counts: above it the machine is busy
MAX_OTHERS: Final = 0.1  # of the CPUs, taken by other processes: above it the machine is busy
NO_IDLE: Final = 0.8  # of the CPUs, taken by all: below it others have room beside the passes
MAX_DIFFERENCE: Final = 1.15  # of two tables that agree: median over their cells
MAX_DRIFT: Final = 1.5  # median of passes over the table, or its inverse: above it the table is wrong
DRIFT_PASSES: Final = 512
MAX_EXTRAPOLATION: Final = 2  # times the largest measured context: beyond it the table says nothing certain
_VERSION: Final = 3
_SUFFIX: Final = ", cost version "
_PROVISIONAL: Final = "provisional"
_TENANT: Final = "\0cost"  # no request's

Clock = Callable[[], float]  # seconds
PassCost = Callable[[int, int], float]  # rows and context to the milliseconds of a pass of one sequence


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Seconds so far."""

    wall: float
    own: float  # of this process, all threads
    all: float | None  # of all processes, on the CPUs of this one; None: not known
    cpus: int

    @classmethod
    def now(cls) -> "CpuTime":
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        return cls(time.perf_counter(), time.process_time(), limits.busy_seconds(), cpus)

    def others(self, before: "CpuTime") -> float:
        """Share of the CPUs that other processes have taken since then; 0 where some CPUs were idle."""
        if self.all is None or before.all is None or self.wall <= before.wall:
            return 0.0
        seconds = (self.wall - before.wall) * self.cpus
        taken = (self.all - before.all) / seconds
        return max(0.0, taken - (self.own - before.own) / seconds) if taken >= NO_IDLE else 0.0


log = logging.getLogger("paceline")


@dataclass(frozen=True)
class CostTable:
    """ms[context][rows], the fastest of a few passes; empty where nothing could be measured."""

    ms: Mapping[int, Mapping[int, float]]
    spread: float = field(default=1.0, compare=False)  # see MAX_SPREAD
    others: float = field(default=0.0, compare=False)  # see MAX_OTHERS
    _by_rows: dict[int, list[tuple[int, float]]] = field(default_factory=dict, init=False, compare=False)

    @property
    def quiet(self) -> bool:
        """False: the machine was busy with other things."""
        return self.spread <= MAX_SPREAD and self.others <= MAX_OTHERS

    def __call__(self, rows: int, context: int) -> float:
        """Milliseconds: linear between what was measured, and beyond it by the last slope."""
        if rows not in self._by_rows:
            curves = sorted(self.ms.items())
            self._by_rows[rows] = [(at, _line(sorted(curve.items()), rows)) for at, curve in curves]
        return _line(self._by_rows[rows], context)

    def prompt_row_ms(self, context: int) -> float:
        """Milliseconds that a row adds to a pass of many, after `context` tokens."""
        rows = sorted({rows for curve in self.ms.values() for rows in curve})
        if len(rows) < 2:
            return self(rows[-1], context) / rows[-1]
        few, many = rows[-2:]
        return (self(many, context) - self(few, context)) / (many - few)

    def __bool__(self) -> bool:
        return any(self.ms.values())


def _line(points: Sequence[tuple[int, float]], at: int) -> float:
    """Linear interpolation and extrapolation, never below a tenth of the lowest point."""
    if len(points) == 1:
        return points[0][1]
    i = 1
    while i + 1 < len(points) and points[i][0] <= at:
        i += 1
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return max(y0 + (y1 - y0) * (at - x0) / (x1 - x0), min(y for _, y in points) / 10)


def batch_ms(cost: PassCost, sequences: Sequence[tuple[int, int, int]]) -> float:
    """Milliseconds of a pass of several sequences: rows, context, and how many sequences have these.

    Rows of all sequences share the weights. Keys and values are each sequence's own, so that what a context
    adds to a pass is added for each. More rows cost no less, though curves may cross where they are
    extrapolated.
    """
    rows = max(1, sum(n * count for n, _, count in sequences))
    batch = max(1, sum(count for _, _, count in sequences))
    contexts = sum(count * (cost(n, context) - cost(n, 0)) for n, context, count in sequences)
    plain = cost(batch, 0) + sum(count * (cost(1, c) - cost(1, 0)) for _, c, count in sequences)
    return max(plain, cost(rows, 0) + contexts)


def cost_table(target: ModelTarget) -> CostTable:
    """Read from cost.json; measured if the table there is missing or provisional.

    That takes about two seconds, and twice as long on a busy machine: the better of two tables is used.
    """
    stored = read_json(_path()).get(_key(target))
    if isinstance(stored, dict) and stored:
        with suppress(ValueError, TypeError, AttributeError):  # damaged, or provisional
            table = CostTable(
                {int(c): {int(n): float(ms) for n, ms in row.items()} for c, row in stored.items()}
            )
            if all(table.ms.values()):
                return table
    table = measure(target)
    if not table.quiet:
        table = min((table, measure(target)), key=lambda one: (-len(one.ms), one.others, one.spread))
    if not table.quiet:
        apart = f", passes are up to {table.spread:.1f} times one another" if table.spread >= 1.05 else ""
        log.info(
            "the machine is busy: other processes take %.0f %% of the CPUs%s; the next start measures the "
            "cost of passes again",
            *(100 * table.others, apart),
        )
    _store(target, table, provisional=not table.quiet)
    return table


def confirmed_cost_table(target: ModelTarget, table: CostTable, tries: int = 3) -> tuple[CostTable, bool]:
    """Measures until two tables in a row agree; the second is stored. False: no two did, the machine is busy.

    Then each cell is the fastest of all tables. For figures that are given to people: a table may be old.
    """
    tables = [table]
    for _ in range(tries):
        tables.append(measure(target))
        if _agree(*tables[-2:]):
            _store(target, tables[-1])
            return tables[-1], True
    return _fastest(tables), False


def _fastest(tables: Sequence[CostTable]) -> CostTable:
    """Other processes only add time, more to some passes than to others."""
    ms: dict[int, dict[int, float]] = {}
    for table in tables:
        for context, row in table.ms.items():
            known = ms.setdefault(context, {})
            known |= {rows: min(one, known.get(rows, one)) for rows, one in row.items()}
    return CostTable(_rising(ms), tables[-1].spread, tables[-1].others)


def _agree(table: CostTable, other: CostTable) -> bool:
    pairs = [(ms, other.ms.get(c, {}).get(n, 0.0)) for c, row in table.ms.items() for n, ms in row.items()]
    known = [max(a / b, b / a) for a, b in pairs if a and b]
    return bool(known) and median(known) <= MAX_DIFFERENCE and other.quiet


def _store(target: ModelTarget, table: CostTable, provisional: bool = False) -> None:
    if list(table.ms) != list(target.timed_contexts):
        return
    entry: dict[str, Any] = {str(c): {str(n): ms for n, ms in row.items()} for c, row in table.ms.items()}
    if provisional:
        entry[_PROVISIONAL] = True
    with suppress(OSError), _updating() as tables:  # else it is measured again next time
        tables[_key(target)] = entry


def _path() -> Path:
    return home() / "cost.json"


@contextmanager
def _updating() -> Iterator[dict[str, Any]]:
    """The tables of all models, stored when the body ends; no other process writes in between."""
    with locked(_path().with_suffix(".lock")):
        tables = read_json(_path())
        yield tables
        write_json(_path(), tables)


def forget(fingerprint: str) -> list[str]:
    """Drops the tables of a model; gives the machine keys they were stored under."""
    if not _path().exists():
        return []
    with _updating() as tables:
        keys = [key for key in tables if key.startswith(f"{fingerprint[:32]}, ")]
        for key in keys:
            del tables[key]
    return [key.rpartition(_SUFFIX)[0] for key in keys]


def machine_key(target: ModelTarget) -> str:
    """Its weights, how it computes, and the machine: what the time of a pass depends on."""
    return f"{target.fingerprint[:32]}, {target.describe()}, {hardware.name()}"


def _key(target: ModelTarget) -> str:
    return f"{machine_key(target)}{_SUFFIX}{_VERSION}"


class CostMonitor:
    """A sink that compares passes with the table, and makes a table provisional that they disagree with.

    One sequence at a time, while decoding: other passes are not what was measured.
    """

    def __init__(self, target: ModelTarget, table: CostTable) -> None:
        self._key = _key(target)
        self._table, self._ratios = table, list[float]()
        self._max_context = MAX_EXTRAPOLATION * max(table.ms) if table else 0

    def round(self, r: Round) -> None:
        if r.batch != 1 or not r.tokens or r.rows > max(ROWS) or len(self._ratios) >= DRIFT_PASSES:
            return
        ms = self._table(r.rows, r.start) if r.start <= self._max_context else 0.0
        if ms <= 0:  # not measured
            return
        self._ratios.append(r.target_us / 1000 / ms)
        if len(self._ratios) < DRIFT_PASSES:
            return
        drift = median(self._ratios)
        if not 1 / MAX_DRIFT <= drift <= MAX_DRIFT:
            log.info("passes take %.1f times as long as measured: the next start measures again", drift)
            threading.Thread(target=self._make_provisional, daemon=True).start()  # a sink must not block
        else:
            self._ratios.clear()

    def finish(self, seq: Seq, reason: Finish) -> None:
        return

    def _make_provisional(self) -> None:
        with suppress(OSError), _updating() as tables:
            if isinstance(tables.get(self._key), dict):
                tables[self._key][_PROVISIONAL] = True


def measure(
    target: ModelTarget,
    budget: float = BUDGET,
    clock: Clock = time.perf_counter,
    cpu_time: Callable[[], CpuTime] = CpuTime.now,
) -> CostTable:
    """Cycles through the row counts, so that a slow moment of the machine does not hit one of them alone.

    A pass that would start after the budget is not repeated, and a second context not begun. Passes of one
    row run twice in any case, since a busy machine shows in their spread.
    """
    deadline, before = clock() + budget, cpu_time()
    timings: dict[int, dict[int, list[float]]] = {}
    for context in target.timed_contexts:
        if context + max(ROWS) >= target.max_context or clock() > deadline:
            break
        try:
            timings[context] = _measure_at(target, context, deadline, clock)
        except PacelineError:  # the cache is too small, or in use
            break
    fastest = {context: {n: round(min(ms), 3) for n, ms in row.items()} for context, row in timings.items()}
    cells = [sorted(ms) for row in timings.values() for ms in row.values() if len(ms) > 1]
    spread = median([ms[1] / ms[0] for ms in cells]) if cells else 1.0
    return CostTable(_rising(fastest), spread, cpu_time().others(before))


def _rising(table: Mapping[int, Mapping[int, float]]) -> dict[int, dict[int, float]]:
    """Running maxima: more rows and more context cost no less, whatever a noisy moment gave."""
    rising: dict[int, dict[int, float]] = {}
    before: Mapping[int, float] = {}
    for context, row in sorted(table.items()):
        highest, rising[context] = 0.0, {}
        for rows, ms in sorted(row.items()):
            highest = rising[context][rows] = max(highest, ms, before.get(rows, 0.0))
        before = rising[context]
    return rising


def _measure_at(target: ModelTarget, context: int, deadline: float, clock: Clock) -> dict[int, list[float]]:
    """Milliseconds of each pass, by rows."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, target.vocab_size, context + max(ROWS)).tolist()
    seq = Seq("\0cost", tokens[: context + 1], context + 1, tenant=_TENANT)
    timings: dict[int, list[float]] = {rows: [] for rows in ROWS}
    with target.noise(seq):
        target.forward([Feed(seq.id, tokens[context : context + 1])]).logits[-1:, :1].tolist()
        target.keep(seq.id, context)
        for _ in range(REPEATS):
            for rows in ROWS:
                enough = len(timings[rows]) >= (2 if rows == ROWS[0] else 1)
                if enough and clock() > deadline:
                    continue
                draft = Draft(tuple(tokens[context + 1 : context + rows]))
                started = clock()
                scores = target.forward([Feed(seq.id, tokens[context : context + 1], draft)])
                scores.logits[-1:, :1].tolist()  # waits for a pass that runs beside the host
                timings[rows].append((clock() - started) * 1000)
                target.keep(seq.id, context)
    return timings
