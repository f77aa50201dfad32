"""One comparison: the same prompts for every system, taking turns prompt by prompt.

Fair by construction:

- Every prompt is fresh to every system. Prefix caches are off, paceline has a new tenant for each prompt, and
  what remembers across requests is restarted before it could meet a prompt again (`Build.remembers`).
- Modes that learn ("learned") are first shown a few other conversations of each workload, answered by the
  model itself; they stand in rows of their own. What is measured they do not remember.
- All are equally warm: each child is loaded and answers two prompts that are never measured.
- All get the same token ids, the same limit, temperature and seed, and no other sampling setting.
- The order is drawn anew for each prompt, so that a busy neighbour hits all alike; ratios are pair by pair.

Time: loading comes off the budget first. Of the rest a system in one mode may use its share in each round
(one temperature, all prompts; the first temperature has twice the time of the others). One that would overrun
it sits out the rest of the round; repeats are dropped rather than the budget overrun.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.compare.rows import Sample
from bench.peers.child import PeerFailed
from bench.peers.pool import Pool
from bench.peers.systems import Entry
from bench.workload import Prompt, alternating

HEADROOM: Final = 64  # context beyond the longest prompt and answer, for drafts
ANSWERED_LATE: Final = 4.0  # an answer may take that many shares before it counts as hung
FIRST_COUNTS: Final = 2


@dataclass(frozen=True)
class Plan:
    """The measures of a comparison."""

    model: Path
    entries: Sequence[Entry]
    prompts: Sequence[Prompt]
    temperatures: Sequence[float] = (0.0,)
    repeats: int = 1
    max_tokens: int = 128
    threads: int = 2
    seed: int = 0
    ignore_eos: bool = False
    budget: float = float("inf")  # seconds
    warm_up: Sequence[int] = ()
    others: Sequence[Prompt] = ()  # never measured: what a system that learns from traffic has seen before
    ends: Sequence[int] = ()

    @property
    def context(self) -> int:
        longest = max((len(p.tokens) for p in self.prompts), default=0)
        return longest + self.max_tokens + HEADROOM

    def share(self, number: int, loading: float = 0.0) -> float:
        """Seconds for one entry in a round of the temperature with this number."""
        rest = max(self.budget - loading, self.budget / 2)
        weight = FIRST_COUNTS if number == 0 else 1
        return rest * weight / max(1, len(self.entries) * (len(self.temperatures) + FIRST_COUNTS - 1))


@dataclass
class Outcome:
    samples: list[Sample] = field(default_factory=list)
    errors: dict[Entry, str] = field(default_factory=dict)
    peaks: dict[Entry, float] = field(default_factory=dict)
    versions: dict[Entry, str] = field(default_factory=dict)
    sat_out: dict[Entry, int] = field(default_factory=dict)  # prompts there was no time for
    repeats: int = 0
    seconds: float = 0.0


class Comparison:
    def __init__(self, plan: Plan, say: Callable[[str], None] = print) -> None:
        self._plan = plan
        self._say = say
        self._rng = random.Random(plan.seed)
        self._outcome = Outcome()
        self._pool = Pool(plan.model, plan.threads, plan.context, list(plan.warm_up), say)
        self._pool.patience = min(self._pool.patience, max(30.0, ANSWERED_LATE * plan.share(0)))
        self._spent: dict[Entry, float] = {}
        self._longest: dict[Entry, float] = {}

    def run(self) -> Outcome:
        started = time.monotonic()
        try:
            self._load()
            loading = time.monotonic() - started
            for repeat in range(self._plan.repeats):
                begun = time.monotonic()
                for number, temperature in enumerate(self._plan.temperatures):
                    self._round(repeat, temperature, self._plan.share(number, loading))
                self._outcome.repeats += 1
                now = time.monotonic()
                if now - started + (now - begun) > self._plan.budget:
                    break
        finally:
            self._pool.close()
            self._outcome.peaks, self._outcome.versions = self._pool.peaks, self._pool.versions
            self._outcome.seconds = time.monotonic() - started
        return self._outcome

    def _load(self) -> None:
        """Everything once; what does not start is out, and where memory is short some have to load again."""
        for entry in self._plan.entries:
            try:
                self._pool.get(entry)
                if entry.learns:
                    self._show_others(entry)
            except PeerFailed as problem:
                self._fail(entry, problem)

    def _show_others(self, entry: Entry) -> None:
        for prompt in self._plan.others:
            self._pool.generate(
                entry,
                prompt=list(prompt.tokens),
                max_tokens=self._plan.max_tokens,
                ends=list(self._plan.ends),
                user=prompt.workload,
                learn=True,
            )

    def _fail(self, entry: Entry, problem: PeerFailed) -> None:
        self._outcome.errors[entry] = str(problem)
        self._say(f"{entry.system} {entry.label}: {problem}")

    def _round(self, repeat: int, temperature: float, share: float) -> None:
        self._spent = dict.fromkeys(self._plan.entries, 0.0)
        for entry in self._plan.entries:
            if entry.remembers and self._outcome.samples:
                self._pool.drop(entry)
        for prompt in alternating(self._plan.prompts, self._plan.seed + repeat):
            for entry in self._rng.sample(list(self._plan.entries), len(self._plan.entries)):
                if entry in self._outcome.errors:
                    continue
                if self._spent[entry] + self._longest.get(entry, 0.0) > share:
                    self._outcome.sat_out[entry] = self._outcome.sat_out.get(entry, 0) + 1
                    continue
                self._measure(entry, prompt, repeat, temperature)

    def _measure(self, entry: Entry, prompt: Prompt, repeat: int, temperature: float) -> None:
        plan, started = self._plan, time.monotonic()
        try:
            self._pool.get(entry)
            started = time.monotonic()
            answer = self._pool.generate(
                entry,
                prompt=list(prompt.tokens),
                max_tokens=plan.max_tokens,
                temperature=temperature,
                seed=plan.seed + repeat,
                ends=list(plan.ends),
                ignore_eos=plan.ignore_eos,
                user=prompt.workload,
            )
        except PeerFailed as problem:
            self._fail(entry, problem)
            return
        finally:
            self._spent[entry] += time.monotonic() - started
        self._longest[entry] = max(self._longest.get(entry, 0.0), answer.total)
        self._outcome.samples.append(
            Sample(
                entry,
                repeat,
                temperature,
                prompt.workload,
                prompt.id,
                tuple(answer.tokens),
                answer.ttft,
                answer.total,
                answer.passes,
            )
        )
