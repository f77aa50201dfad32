"""The controller decides as recorded: whatever makes it faster must not change a decision.

Where a decision is meant to change, record anew:
PYTHONPATH=src:tests python tests/engine/test_recorded_decisions.py
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from paceline.config import SamplingParams, SpecConfig
from paceline.engine.control import Rate
from paceline.types import NO_DRAFT, ROOT, Ask, Draft, Round, Seq
from support.simulation import LARGE_CPU, SMALL_CPU, SMALL_GPU, random_scenario, simulate

RECORD = Path(__file__).with_name("recorded_decisions.json")
NAMES = ("suffix", "ngram", "block")


class Log:
    """A digest of all decisions, and counts that show what changed."""

    def __init__(self) -> None:
        self._digest, self._counts = hashlib.sha256(), Counter[str]()

    def add(self, what: str, *decisions: float) -> None:
        """A number with a fraction counts up to its sixth digit."""
        text = " ".join(str(d) if isinstance(d, int) else f"{d:.6g}" for d in decisions)
        self._digest.update(f"{what} {text}\n".encode())
        self._counts[what] += sum(int(d) for d in decisions)

    def summary(self) -> dict[str, Any]:
        return {**dict(sorted(self._counts.items())), "digest": self._digest.hexdigest()[:16]}


def simulated(seed: int) -> dict[str, Any]:
    """Real rounds of an engine, in simulated time."""
    drawn, log = random_scenario(seed, loads=(1, 2, 4, 8)), Log()
    tokens = max(40, 240 // drawn.agents)
    done = simulate(drawn.cost, drawn.drafters, SpecConfig(drawn.names), drawn.agents, tokens, answer=60)
    for r in done.rounds:
        log.add("nodes", len(r.draft), len(r.uncut))
        for name in NAMES:
            log.add(f"asks of {name}", r.asked.count(name))
    log.add("us", round(done.us))
    return log.summary()


class Workout:
    """Every method of a controller, in the order in which an engine calls them, with drafts of any form."""

    def __init__(self, seed: int) -> None:
        self.rng, self.log = Random(seed), Log()
        cost = self.rng.choice([SMALL_CPU, LARGE_CPU, SMALL_GPU])
        self.rate, self.cost = Rate(cost), cost
        self.policy = self.rate.policy(NAMES)
        self.seqs = [self._seq(i) for i in range(self.rng.choice([1, 3, 8]))]
        self.number = len(self.seqs)

    def _seq(self, number: int) -> Seq:
        pick = self.rng.choice
        spec = SpecConfig(
            NAMES,
            pick([3, 8]),
            accept=pick(["match", "match", "residual"]),
            adaptive=pick([True] * 5 + [False]),
        )
        prompt = pick([10, 300, 3000])
        params = SamplingParams(temperature=pick([0.0, 0.7]))
        return Seq(f"{number}", [1] * prompt, prompt, params, spec, route=pick(["", "chat"]))

    def run(self, passes: int) -> dict[str, Any]:
        for number in range(passes):
            self._pass(self.rng.random() < 0.05)
            if self.rng.random() < 0.1:
                gone = self.rng.randrange(len(self.seqs))
                self.rate.end(self.seqs[gone])
                self.seqs[gone], self.number = self._seq(self.number), self.number + 1
            if number == passes // 2:
                self.rate.forget("ngram")
        return self.log.summary()

    def _pass(self, prompt: bool) -> None:
        rate, log, seqs = self.rate, self.log, self.seqs
        rows = len(seqs) + (100 if prompt else 0)
        budgets = rate.plan(seqs, rows, self.rng.choice([0, 0, 0, 2]))
        log.add("budgets", *budgets)
        drafts, asked = [NO_DRAFT] * len(seqs), [list[str]() for _ in seqs]
        for name in NAMES:
            self._ask(name, budgets, drafts, asked)
        reads = [self.policy.reads("block", seq) for seq in seqs]
        log.add("reads", *map(int, reads))
        lengths = rate.trim(seqs, drafts, rows)
        log.add("lengths", *lengths)
        rate.learn(self._rounds(budgets, drafts, asked, lengths, rows))

    def _ask(self, name: str, budgets: Sequence[int], drafts: list[Draft], asked: list[list[str]]) -> None:
        """A draft before is replaced or continued by `block`, as in a list of drafters."""
        asks: list[tuple[int, Ask]] = []
        for i, seq in enumerate(self.seqs):
            if not budgets[i] or (drafts[i] and name != "block"):
                continue
            reach, gain, before = 1.0, 0.0, drafts[i]
            if before:
                chances = self.policy.chances(seq, before)
                gain, left = self.policy.gain(seq, before), budgets[i] - len(before)
                replaces = self.policy.value(name, seq, gain=gain)
                continues = self.policy.value(name, seq, chances[-1]) if left > 0 else 0.0
                self.log.add("values", gain, replaces, continues, *chances)
                if max(replaces, continues) <= 0:
                    continue
                if continues > replaces:
                    reach, gain = chances[-1], 0.0
            nodes = self.policy.budget(name, seq, budgets[i], reach, gain)
            self.log.add(f"asks of {name}", nodes)
            if nodes:
                asks.append((i, Ask(seq, nodes, before.tokens if reach < 1 else ())))
                asked[i].append(name)
        answers = [self._draft(name, ask) for _, ask in asks]
        if asks:
            self.policy.drafted(name, [ask for _, ask in asks], answers)
        for (i, ask), answer in zip(asks, answers, strict=True):
            drafts[i] = _joined(drafts[i], answer) if ask.after else answer or drafts[i]

    def _draft(self, name: str, ask: Ask) -> Draft:
        rng, first = self.rng, len(ask.seq.tokens) + len(ask.after)
        count = rng.randint(0, min(ask.budget, 8))
        right = [rng.random() < (0.8 if name == "suffix" else 0.4) for _ in range(count)]
        tokens = tuple(first + i if good else -1 for i, good in enumerate(right))
        scores = tuple(rng.choice([1.0, 0.97, 0.6, 0.3, 0.1]) if good else rng.random() for good in right)
        tree = name == "block" and not ask.after and rng.random() < 0.3
        parents = tuple(rng.randint(ROOT, i - 1) for i in range(count)) if tree else None
        unscored = name == "ngram" and len(ask.seq.id) % 2
        return Draft(tokens, parents, (name,) * count, () if unscored else scores) if count else NO_DRAFT

    def _rounds(
        self,
        budgets: Sequence[int],
        drafts: Sequence[Draft],
        asked: Sequence[Sequence[str]],
        lengths: Sequence[int],
        rows: int,
    ) -> list[Round]:
        all_rows = rows + sum(lengths)
        us = round(1000 * self.cost(all_rows, 300) * self.rng.choice([1, 1, 1.1, 3]))
        by = {name: 50 * n for name in NAMES if (n := sum(some.count(name) for some in asked))}
        rounds = []
        for i, seq in enumerate(self.seqs):
            draft, start = drafts[i].first(lengths[i]), len(seq.tokens)
            node, path = ROOT, list[int]()
            while (child := draft.child(node, start + len(path))) is not None:
                path.append(child)
                node = child
            tokens = tuple(range(start, start + len(path) + 1))
            seq.tokens.extend(tokens)
            r = Round(
                seq.id, start, NAMES, draft, tuple(path), tokens, budgets[i], len(self.seqs), all_rows, 0, us
            )
            rounds.append(
                replace(
                    r, draft_us=sum(by.values()) + 20, draft_us_by=by, uncut=drafts[i], asked=tuple(asked[i])
                )
            )
        return rounds


def worked_out(seed: int) -> dict[str, Any]:
    return Workout(seed).run(150)


def _joined(first: Draft, more: Draft) -> Draft:
    scored = len(first.scores) == len(first) and len(more.scores) == len(more)
    return Draft(
        first.tokens + more.tokens,
        None,
        first.sources + more.sources,
        first.scores + more.scores if scored else (),
    )


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"simulated {seed}": partial(simulated, seed) for seed in range(6)},
    **{f"workout {seed}": partial(worked_out, seed) for seed in range(6)},
}


@pytest.mark.parametrize("case", CASES)
def test_the_controller_decides_as_recorded(case: str) -> None:
    assert CASES[case]() == json.loads(RECORD.read_text())[case]


if __name__ == "__main__":
    RECORD.write_text(json.dumps({case: run() for case, run in CASES.items()}, indent=1) + "\n")
