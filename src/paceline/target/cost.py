"""What a pass costs by its rows and its context, t_V(n, context): measured once for a model on a machine."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from paceline.atomic import read_json, write_json
from paceline.errors import PacelineError
from paceline.paths import home
from paceline.target import hardware
from paceline.target.base import ModelTarget
from paceline.types import Draft, Feed, Seq

ROWS: Final = (1, 2, 4, 8, 16)
REPEATS: Final = 3  # of which the fastest counts
BUDGET: Final = 1.5  # seconds, after which no further pass is tried
_VERSION: Final = 1
_TENANT: Final = "\0cost"  # no request's


@dataclass(frozen=True)
class CostTable:
    """ms[context][rows], lowest of a few tries; empty where nothing could be measured."""

    ms: Mapping[int, Mapping[int, float]]
    _by_rows: dict[int, list[tuple[int, float]]] = field(default_factory=dict, init=False, compare=False)

    def __call__(self, rows: int, context: int) -> float:
        """Milliseconds: linear between what was measured, and beyond it by the last slope."""
        if rows not in self._by_rows:
            curves = sorted(self.ms.items())
            self._by_rows[rows] = [(at, _line(sorted(curve.items()), rows)) for at, curve in curves]
        return _line(self._by_rows[rows], context)

    def __bool__(self) -> bool:
        return any(self.ms.values())


def _line(points: Sequence[tuple[int, float]], at: int) -> float:
    """A polyline through the points, which stays at least at a tenth of the lowest."""
    if len(points) == 1:
        return points[0][1]
    i = 1
    while i + 1 < len(points) and points[i][0] <= at:
        i += 1
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return max(y0 + (y1 - y0) * (at - x0) / (x1 - x0), min(y for _, y in points) / 10)


def cost_table(target: ModelTarget) -> CostTable:
    """From paceline's notes if it was measured before, else measured now, in under two seconds."""
    key = _key(target)
    path = home() / "cost.json"
    known = read_json(path)
    found = known.get(key)
    if isinstance(found, dict) and found:
        with suppress(ValueError, TypeError, AttributeError):
            numbers = {int(c): {int(n): float(ms) for n, ms in row.items()} for c, row in found.items()}
            return CostTable(numbers)
    table = measure(target)
    if list(table.ms) == list(target.timed_contexts):
        with suppress(OSError):  # then it is measured again next time
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, known | {key: json.loads(json.dumps(table.ms))})
    return table


def _key(target: ModelTarget) -> str:
    return f"{target.fingerprint[:32]}, {target.describe()}, {hardware.name()}, cost version {_VERSION}"


def measure(target: ModelTarget, budget: float = BUDGET) -> CostTable:
    """Rounds over all row counts, so that a slow moment of the machine does not hit one of them alone.

    A pass that would end after the budget is not tried again, nor a second context.
    """
    deadline = time.perf_counter() + budget
    table: dict[int, dict[int, float]] = {}
    for context in target.timed_contexts:
        if context + max(ROWS) >= target.max_context or time.perf_counter() > deadline:
            break
        try:
            table[context] = _measure_at(target, context, deadline)
        except PacelineError:  # the cache is too small, or in use
            break
    return CostTable(_rising(table))


def _rising(table: Mapping[int, Mapping[int, float]]) -> dict[int, dict[int, float]]:
    """More rows and more context cost no less, whatever a noisy moment said."""
    found: dict[int, dict[int, float]] = {}
    before: Mapping[int, float] = {}
    for context, row in sorted(table.items()):
        most, found[context] = 0.0, {}
        for rows, ms in sorted(row.items()):
            most = found[context][rows] = max(most, ms, before.get(rows, 0.0))
        before = found[context]
    return found


def _measure_at(target: ModelTarget, context: int, deadline: float) -> dict[int, float]:
    random = np.random.default_rng(0)
    tokens = random.integers(0, target.vocab_size, context + max(ROWS)).tolist()
    seq = Seq("\0cost", tokens[: context + 1], context + 1, tenant=_TENANT)
    fastest: dict[int, float] = {}
    with target.noise(seq):
        target.forward([Feed(seq.id, tokens[context : context + 1])])  # what is done only once is done now
        target.keep(seq.id, context)
        for _ in range(REPEATS):
            for rows in ROWS:
                if rows in fastest and time.perf_counter() > deadline:
                    continue
                draft = Draft(tuple(tokens[context + 1 : context + rows]))
                started = time.perf_counter()
                target.forward([Feed(seq.id, tokens[context : context + 1], draft)])
                ms = (time.perf_counter() - started) * 1000
                target.keep(seq.id, context)
                fastest[rows] = min(ms, fastest.get(rows, ms))
    return {rows: round(ms, 3) for rows, ms in fastest.items()}
