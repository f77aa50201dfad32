"""A simulated machine under a real engine: a pass and a draft take as long as a cost model says.

Time is simulated, so bounds on it can be asserted. Texts are scripts known beforehand; whether a drafter is
right at a position is a pure function of its name, the sequence and the position.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from paceline.config import EngineConfig, SamplingParams, SpecConfig
from paceline.drafters.none import NoDrafter
from paceline.engine.control import Rate
from paceline.engine.engine import Engine
from paceline.target.cost import CostTable
from paceline.types import (
    NO_DRAFT,
    Ask,
    CacheStats,
    Controller,
    Draft,
    Drafter,
    Feed,
    HiddenRows,
    Round,
    Scores,
    Seq,
)

VOCAB = 1 << 15
PLAIN = SpecConfig(("none",), max_draft=0)
# Milliseconds of a pass by rows, at contexts of 256 and 2048 tokens, as measured on two cores and on an H200.
SMALL_CPU = CostTable(
    {256: {1: 4.3, 2: 4.6, 4: 5.0, 8: 6.9, 16: 12.0}, 2048: {1: 5.2, 2: 5.8, 4: 7.0, 8: 10.8, 16: 19.5}}
)
LARGE_CPU = CostTable({256: {1: 23.9, 2: 25.2, 4: 31.9, 8: 48.6, 16: 92.2}})
BATCH_CPU = CostTable(
    {256: {1: 2.8, 2: 3.2, 4: 4.2, 8: 7.5, 16: 13.5, 32: 19.0, 64: 27.0, 256: 68.0}}  # of many agents
)
SMALL_GPU = CostTable({256: {1: 0.40, 2: 0.41, 8: 0.42, 16: 0.44, 32: 0.50, 64: 0.65}})


def uniform(*key: object) -> float:
    """A fixed number from 0 to 1 for each key (FNV-1a with a finalizer)."""
    h = 0xCBF29CE484222325
    for byte in repr(key).encode():
        h = (h ^ byte) * 0x100000001B3 % (1 << 64)
    for shift in (33, 29, 32):
        h = (h ^ (h >> shift)) * 0xFF51AFD7ED558CCD % (1 << 64)
    return h / (1 << 64)


@dataclass
class Timer:
    """Simulated nanoseconds."""

    now: int = 0
    late_us: float = 0.0  # by which the next pass is longer
    tap_us: float = 0.0  # by which passes are longer whose hidden states are read

    def __call__(self) -> int:
        return self.now

    def pass_us(self, us: float) -> None:
        self.now += round(1000 * us)


def scripted(seq: str, position: int) -> int:
    """The token at a position of the output."""
    return int(uniform("text", seq, position) * (VOCAB - 1))


class ScriptedTarget:
    """Writes its scripts at the price of a cost table. It computes nothing."""

    vocab_size, max_context, capacity, invariant_rows, bytes_held = VOCAB, 1 << 20, 1 << 24, 1024, 0
    fingerprint = "scripted"

    def __init__(self, cost: CostTable, timer: Timer, noise: float = 0.0) -> None:
        """noise: share by which a pass may be slower."""
        self._cost, self._timer, self._noise = cost, timer, noise
        self._seqs: dict[str, Seq] = {}
        self.passes = 0

    @property
    def cache_stats(self) -> CacheStats:
        return CacheStats(1, 1, 0, 0, 0, 0, 0)

    def describe(self) -> str:
        return "scripted"

    def open(self, seq: Seq) -> int:
        self._seqs[seq.id] = seq
        return 0

    def restore(self, seq_id: str, seconds: float) -> tuple[int, bool]:
        return 0, False

    def forward(self, feeds: Sequence[Feed], taps: Sequence[int] = ()) -> Scores:
        self.passes += 1
        tokens: list[int] = []
        starts, firsts, rows = [], [], 0
        for feed in feeds:
            seq = self._seqs[feed.seq_id]
            starts.append(len(tokens))
            firsts.append(rows)
            rows += len(feed.tokens) + len(feed.draft)
            if feed.scored:
                at = len(seq.tokens) - seq.prompt_len
                depths = (0, *(feed.draft.depth(node) for node in range(len(feed.draft))))
                tokens += [scripted(seq.id, at + depth) for depth in depths]
        context = max(len(self._seqs[feed.seq_id].tokens) for feed in feeds)
        slower = 1 + self._noise * uniform("noise", self.passes)
        added_us = self._timer.late_us + (self._timer.tap_us if taps else 0.0)
        self._timer.pass_us(1000 * self._cost(rows, context) * slower + added_us)
        self._timer.late_us = 0.0
        hidden = {tap: torch.zeros(rows, 1) for tap in taps}
        return Scores(torch.empty(0, 0), tuple(starts), tuple(firsts), hidden, tokens)

    def keep(self, seq_id: str, length: int, path: Sequence[int] = ()) -> None:
        return

    def close(self, seq_id: str) -> None:
        del self._seqs[seq_id]

    def forget(self, tenant: str) -> None:
        return


Chance = Callable[[str, int], float | None]  # sequence and position to P(right); None: no draft


def constant(chance: float) -> Chance:
    return lambda seq, position: chance


def flipping(high: float, low: float, every: int = 40) -> Chance:
    """Acceptance that flips after so many tokens."""
    return lambda seq, position: high if position // every % 2 == 0 else low


def bursts(share: float, inside: float, length: int = 24, outside: float | None = None) -> Chance:
    """Matches as retrieval finds them: it knows stretches of the text, and little or nothing of the rest."""

    def chance(seq: str, position: int) -> float | None:
        return inside if uniform("burst", seq, position // length) < share else outside

    return chance


@dataclass
class SimulatedDrafter(Drafter):
    """Right with a known probability at each position, at a known price."""

    name: str
    chance: Chance
    timer: Timer
    us: float = 0.0  # of a draft
    node_us: float = 0.0  # of each of its nodes
    batch_us: float = 0.0  # of a call, whatever the number of asks
    first_us: float = 0.0  # of the very first call: something is compiled or loaded
    begin_us: float = 0.0  # of the first draft of each sequence: its prompt is indexed
    late_us: float = 0.0  # that a draft adds to the pass after it
    read_us: float = 0.0  # of hidden states, for each sequence and pass
    read_every: int = 1  # passes, whose hidden states are read at once
    prompt_us: float = 0.0  # of those of a piece of a prompt
    claims: Callable[[float], float] | None = lambda chance: min(0.999, chance)  # None: no scores
    taps: tuple[int, ...] = ()
    asks: int = field(default=0, init=False)
    read: int = field(default=0, init=False)  # passes of sequences whose hidden states came
    _read_to: dict[str, int] = field(default_factory=dict, init=False)  # position after the last one
    _begun: set[str] = field(default_factory=set, init=False)
    _unread: Counter[str] = field(default_factory=Counter, init=False)

    def ready(self, seq: Seq) -> bool:
        return self._read_to.get(seq.id) == len(seq.tokens) - 1

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        begun = {ask.seq.id for ask in asks} - self._begun
        self.timer.pass_us(self.begin_us * len(begun) + (0.0 if self.asks else self.first_us))
        self._begun |= begun
        self.asks += len(asks)
        self.timer.pass_us(self.batch_us)
        self.timer.late_us += self.late_us
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: Ask) -> Draft:
        seq = ask.seq
        if self.taps and not self.ready(seq):
            return NO_DRAFT
        self.timer.pass_us(self.read_us * self._unread.pop(seq.id, 0))
        first = len(seq.tokens) - seq.prompt_len
        good = all(token == scripted(seq.id, first + i) for i, token in enumerate(ask.after))
        tokens, scores = [], []
        for position in range(first + len(ask.after), first + len(ask.after) + ask.budget):
            chance = self.chance(seq.id, position)
            if chance is None:
                break
            good = good and uniform(self.name, seq.id, position) < chance
            tokens.append(scripted(seq.id, position) + (not good))
            scores.append(self.claims(chance) if self.claims else 0.0)
        self.timer.pass_us(self.us + self.node_us * len(tokens))
        return Draft(tuple(tokens), None, (self.name,) * len(tokens), tuple(scores) if self.claims else ())

    def on_hidden(self, hidden_rows: Sequence[HiddenRows]) -> None:
        """A draft reads what is left."""
        for rows in hidden_rows:
            self.read += 1
            self._read_to[rows.seq.id] = rows.seq.computed
            if rows.start < rows.seq.prompt_len - 1:
                self.timer.pass_us(self.prompt_us)
                continue
            self._unread[rows.seq.id] += 1
            if self._unread[rows.seq.id] >= self.read_every:
                self.timer.pass_us(self.read_us * self._unread.pop(rows.seq.id))


@dataclass(frozen=True)
class Scenario:
    """A machine, a load and some drafters."""

    cost: CostTable
    agents: int
    answer: int  # tokens
    drafters: Callable[[Timer], list[SimulatedDrafter]]
    names: tuple[str, ...]


def random_scenario(seed: int, loads: Sequence[int]) -> Scenario:
    """Drafters that are good, bad or both by turns, honest or not, cheap or dear, on any curve."""
    rng = Random(seed)
    base, early, late = 10 ** rng.uniform(-0.3, 1.5), rng.uniform(0.01, 0.09), rng.uniform(0.02, 0.2)
    cheap = rng.choice([2, 4, 8, 16])  # rows up to which another one costs little
    by_rows = {
        n: base * (1 + early * min(n - 1, cheap) + late * max(0, n - 1 - cheap)) for n in (1, 4, 16, 32)
    }
    agents, answer = rng.choice(loads), rng.choice([30, 80, 200])
    names = rng.choice([("suffix",), ("suffix", "ngram"), ("suffix", "ngram", "block"), ("block",)])
    made: list[dict[str, Any]] = []
    for name in names:
        head = name == "block"
        chance = rng.choice(
            [
                constant(rng.choice([0.0, 0.05, 0.2, 0.5, 0.8])),
                flipping(rng.uniform(0.6, 0.95), rng.uniform(0, 0.2), rng.choice([20, 40, 80])),
                bursts(rng.uniform(0.1, 0.8), rng.uniform(0.5, 0.98), rng.choice([6, 12, 24])),
            ]
        )
        boast, modesty = rng.uniform(0.6, 0.95), rng.uniform(0.5, 1)
        claims = rng.choice([None, lambda _, b=boast: b, lambda c, m=modesty: min(0.999, m * c)])
        made.append(
            {
                "name": name,
                "chance": chance,
                "claims": claims,
                "us": 1000 * base * (rng.uniform(0.05, 0.3) if head else rng.uniform(0.001, 0.02)),
                "read_us": 1000 * base * rng.uniform(0, 0.05) if head else 0.0,
                "read_every": rng.choice([1, 17]),
                "taps": (1,) if head else (),
            }
        )
    return Scenario(
        CostTable({256: by_rows}),
        agents,
        answer,
        lambda timer: [SimulatedDrafter(timer=timer, **one) for one in made],
        names,
    )


@dataclass(frozen=True)
class Outcome:
    us: float
    tokens: int
    rounds: list[Round] = field(repr=False)

    @property
    def tokens_per_s(self) -> float:
        return 1e6 * self.tokens / self.us

    @property
    def tokens_per_pass(self) -> float:
        """Of one sequence."""
        return self.tokens / len([r for r in self.rounds if r.tokens])


def simulate(
    cost: CostTable,
    make: Callable[[Timer], Sequence[Drafter]],
    spec: SpecConfig,
    agents: int = 1,
    tokens: int = 400,
    prompt: int = 8,
    answer: int = 0,
    controller: Controller | None = None,
    noise: float = 0.0,
) -> Outcome:
    """So many agents at once, each with one request after another, until they have `tokens` each on average.

    answer: tokens of one request; 0: as many as that. Agents begin at different points of their answers.
    """
    timer = Timer()
    drafters: Mapping[str, Drafter] = {d.name: d for d in (NoDrafter(), *make(timer))}
    engine = Engine(
        ScriptedTarget(cost, timer, noise),
        drafters,
        controller or Rate(cost),
        config=EngineConfig(max_batch=64, threads=1, prefill_chunk=4096, prefill_beside=4096),
        timer=timer,
        clock=lambda: timer() / 1e9,
    )
    answer = answer or 2 * tokens
    lengths = [max(1, answer - i * answer // (2 * agents)) for i in range(agents)]  # of the first requests
    for agent, length in enumerate(lengths):
        engine.submit(_request(f"{agent}/0", prompt, length, spec))
    rounds: list[Round] = []
    done = 0
    while done < tokens * agents:
        for r in engine.step():
            done += len(r.tokens)
            rounds.append(r)
            if r.finish:
                agent_id, number = r.request.split("/")
                engine.submit(_request(f"{agent_id}/{int(number) + 1}", prompt, answer, spec))
    return Outcome(timer() / 1000, done, rounds)


@dataclass(frozen=True)
class Burst:
    """Answers that were all asked for within one pass."""

    tokens_per_s: float
    first_ms: list[float]  # until the first token of each


def burst(
    cost: CostTable,
    make: Callable[[Timer], Sequence[Drafter]],
    spec: SpecConfig,
    agents: int = 16,
    early: int = 2,
    prompt: int = 53,
    answer: int = 64,
) -> Burst:
    """The last of several bursts. early: agents before the first pass; the others ask while it runs."""
    timer = Timer()
    drafters: Mapping[str, Drafter] = {d.name: d for d in (NoDrafter(), *make(timer))}
    engine = Engine(
        ScriptedTarget(cost, timer),
        drafters,
        Rate(cost),
        config=EngineConfig(max_batch=64, threads=1),
        timer=timer,
        clock=lambda: timer() / 1e9,
        row_cost=cost.prompt_row_ms,
    )
    for number in range(4):
        began, first, tokens = timer(), dict[str, int](), 0
        seqs = [_request(f"{number}/{agent}", prompt, answer, spec) for agent in range(agents)]
        for seq in seqs[:early]:
            engine.submit(seq)
        late = seqs[early:]
        while engine.busy:
            for r in engine.step():
                tokens += len(r.tokens)
                if r.tokens:
                    first.setdefault(r.request, timer())
            while late:
                engine.submit(late.pop())
    return Burst(1e9 * tokens / (timer() - began), [(at - began) / 1e6 for at in first.values()])


def _request(name: str, prompt: int, tokens: int, spec: SpecConfig) -> Seq:
    return Seq(name, [1] * prompt, prompt, SamplingParams(max_tokens=tokens), spec)
