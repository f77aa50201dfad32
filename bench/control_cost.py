"""python -m bench control-cost: host time that control adds to a round, in microseconds for one sequence.

The engine's own drafting and the default list run over recorded text, with the times of passes from a cost
table. `controller` is the time of its calls alone, recorded in one run and made again on a new controller,
`cold` the same of some passes, before each of which other memory is read, as the weights of a model are, and
then what the calls are given, as an engine has just made it;
`calls` are those of Python and C functions within, which no load of the machine changes;
`outside of drafters` is the time of drafting that is not theirs: the list's, and the controller's part in it.

A row is printed as soon as it is measured; all of them take half a minute.
"""

import argparse
import cProfile
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Final

import numpy as np
from rich.console import Console

from bench import workload
from bench.table import Column, Table
from paceline.advise.pass_times import PassTimes
from paceline.advise.replay import RecordedOutput, Simulation
from paceline.config import SpecConfig
from paceline.drafters import model_free
from paceline.engine.control import Rate
from paceline.target.cost import CostTable
from paceline.testing import ToyTarget
from paceline.types import Ask, Controller, Draft, DraftPolicy, Round, Seq

LOADS: Final = (1, 4, 16, 32)
PROMPT: Final = 300  # tokens
DRAFT_US: Final = 20  # of one ask, and as much beside it
COLD: Final = 48 << 20  # bytes: more than the caches of a core
COLD_EVERY: Final = 7  # passes, of which one is measured cold
# Milliseconds of a pass by its rows: SmolLM2 on two cores, and a small model on a GPU.
MACHINES: Final = {
    "cpu": CostTable({256: {1: 4.3, 2: 4.6, 4: 5.0, 8: 6.9, 16: 12.0}}),
    "gpu": CostTable({256: {1: 0.40, 2: 0.41, 8: 0.42, 16: 0.44, 32: 0.50, 64: 0.65}}),
}

Call = Callable[[Rate], object]


class Recorded(Controller, DraftPolicy):
    """Keeps every call that the engine makes, to make it again."""

    def __init__(self, rate: Rate) -> None:
        self._rate, self.passes = rate, list[list[Call]]()
        self.rounds: list[int] = []  # of each pass

    def policy(self, drafters: tuple[str, ...]) -> DraftPolicy:
        return self

    def plan(self, seqs: Sequence[Seq], rows: int, waiting: int = 0) -> list[int]:
        seqs = [_frozen(seq) for seq in seqs]
        self.passes.append([lambda rate: rate.plan(seqs, rows, waiting)])
        self.rounds.append(0)
        return self._rate.plan(seqs, rows, waiting)

    def worth_asking(self, drafters: Sequence[str], seq: Seq) -> bool:
        self.passes[-1].append(lambda rate: rate.worth_asking(drafters, seq))
        return self._rate.worth_asking(drafters, seq)

    def budget(
        self, drafter: str, seq: Seq, nodes: int, reach: float = 1.0, gain: float = 0.0, forced: int = 0
    ) -> int:
        self.passes[-1].append(lambda rate: rate.budget(drafter, seq, nodes, reach, gain, forced))
        return self._rate.budget(drafter, seq, nodes, reach, gain, forced)

    def drafted(self, drafter: str, asks: Sequence[Ask], drafts: Sequence[Draft]) -> None:
        self.passes[-1].append(lambda rate: rate.drafted(drafter, asks, drafts))
        self._rate.drafted(drafter, asks, drafts)

    def trim(self, seqs: Sequence[Seq], drafts: Sequence[Draft], rows: int) -> list[int]:
        seqs = [_frozen(seq) for seq in seqs]
        self.passes[-1].append(lambda rate: rate.trim(seqs, drafts, rows))
        return self._rate.trim(seqs, drafts, rows)

    def learn(self, rounds: Sequence[Round]) -> None:
        """Every draft takes the same time, so that every run decides the same."""
        by = Counter(name for r in rounds for name in r.asked)
        us = {name: DRAFT_US * asks for name, asks in by.items()}
        rounds = [replace(r, draft_us=2 * sum(us.values()), draft_us_by=us) for r in rounds]
        self.passes[-1].append(lambda rate: rate.learn(rounds))
        self.rounds[-1] = len(rounds)
        self._rate.learn(rounds)

    def end(self, seq: Seq) -> None:
        self.passes[-1].append(lambda rate: rate.end(seq))
        self._rate.end(seq)


def _frozen(seq: Seq) -> Seq:
    """As long as it is now: the controller reads the length of a text."""
    return Seq(seq.id, list(seq.tokens), seq.prompt_len, seq.params, seq.spec, route=seq.route)


class Watched(Rate):
    """Microseconds of drafting as the engine reports them: outside of the drafters, and theirs."""

    outside_us = drafters_us = 0

    def learn(self, rounds: Sequence[Round]) -> None:
        by = sum(rounds[0].draft_us_by.values())
        self.outside_us += rounds[0].draft_us - by
        self.drafters_us += by
        super().learn(rounds)


def words(path: Path, limit: int) -> list[int]:
    """Recorded text as one number for each word: it repeats itself as tokens do."""
    numbers: dict[str, int] = {}
    text = "\n".join(str(record) for record in islice(workload.lines(path), 50))
    return [numbers.setdefault(word, len(numbers)) for word in re.findall(r"\w+|\W", text)[:limit]]


def outputs(text: Sequence[int], spec: SpecConfig, number: int, tokens: int) -> list[RecordedOutput]:
    """Stretches of the text, each of a tenant of its own."""
    first, step = PROMPT, max(1, (len(text) - PROMPT - tokens) // number)
    cuts = [text[i * step : i * step + first + tokens] for i in range(number)]
    return [
        RecordedOutput(Seq(f"{i}", list(cut[:first]), first, spec=spec, tenant=f"{i}"), tuple(cut[first:]))
        for i, cut in enumerate(cuts)
    ]


def measure(text: Sequence[int], cost: CostTable, load: int, tokens: int, repeats: int = 3) -> dict[str, Any]:
    """The fastest of some runs: others only add time."""
    spec, target = SpecConfig(), ToyTarget(vocab_size=1 << 20)
    some, recorded = outputs(text, spec, max(4, load), tokens), Recorded(Rate(cost))
    done = Simulation(spec, target, model_free(), recorded, PassTimes(cost), concurrency=load).run(some)
    rounds = sum(recorded.rounds)
    us: dict[str, list[float]] = {"controller": [], "cold": [], "outside": [], "drafters": []}
    for _ in range(repeats):
        us["controller"].append(_replayed_us(recorded, Rate(cost)))
        us["cold"].append(_replayed_us(recorded, Rate(cost), cold=True))
        watched = Watched(cost)
        Simulation(spec, target, model_free(), watched, PassTimes(cost), concurrency=load).run(some)
        us["outside"].append(watched.outside_us / rounds)
        us["drafters"].append(watched.drafters_us / rounds)
    each = {name: min(found) for name, found in us.items()}
    calls = _calls(recorded, Rate(cost))
    return {
        "sequences": load,
        **each,
        "calls": calls / rounds,
        "tokens_per_pass": sum(d.tokens for d in done) / sum(d.passes for d in done),
    }


def _replayed_us(recorded: Recorded, rate: Rate, cold: bool = False) -> float:
    """Of one round. cold: memory is read before some passes, and only these count."""
    weights, ns, rounds = np.ones(COLD if cold else 0, np.uint8), 0, 0
    for number, (calls, of_pass) in enumerate(zip(recorded.passes, recorded.rounds, strict=True)):
        counts = not cold or number % COLD_EVERY == 0
        if cold and counts:
            weights.sum(dtype=np.uint64)
            _read_arguments(calls)
        started = perf_counter_ns()
        for call in calls:
            call(rate)
        if counts:
            ns, rounds = ns + perf_counter_ns() - started, rounds + of_pass
    return ns / 1000 / rounds


def _read_arguments(calls: Sequence[Call]) -> None:
    """Sequences, asks, drafts and rounds: an engine makes them after the pass, right before each call."""
    for call in calls:
        repr([cell.cell_contents for cell in getattr(call, "__closure__", None) or ()])


def _calls(recorded: Recorded, rate: Rate) -> int:
    """Of functions, in all recorded calls."""
    profile = cProfile.Profile()
    profile.enable()
    for calls in recorded.passes:
        for call in calls:
            call(rate)
    profile.disable()
    return sum(entry.callcount for entry in profile.getstats())


COLUMNS: Final = (
    Column("passes", "machine"),
    Column("sequences", "sequences"),
    Column("controller, us", lambda r: f"{r['controller']:.0f}"),
    Column("cold, us", lambda r: f"{r['cold']:.0f}"),
    Column("calls", lambda r: f"{r['calls']:.0f}"),
    Column("outside of drafters, us", lambda r: f"{r['outside']:.0f}"),
    Column("drafters, us", lambda r: f"{r['drafters']:.0f}"),
    Column("tokens per pass", lambda r: f"{r['tokens_per_pass']:.2f}"),
)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench control-cost", description=__doc__)
    parser.add_argument("--file", default=next(iter(workload.known())), help="a workload")
    parser.add_argument("--loads", default=",".join(map(str, LOADS)), help="sequences at once")
    parser.add_argument("--tokens", type=int, default=150, help="of an answer")
    options = parser.parse_args(list(arguments))
    text, console, rows = (
        words(workload.known()[options.file], 200_000),
        Console(width=130, highlight=False),
        [],
    )
    for name, cost in MACHINES.items():
        for load in options.loads.split(","):
            rows.append({"machine": name, **measure(text, cost, int(load), options.tokens)})
            console.print("  ".join(f"{c.title} {c.cell(rows[-1])}" for c in COLUMNS), soft_wrap=True)
    console.print(Table.of(COLUMNS, rows).terminal(1))
