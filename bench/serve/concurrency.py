"""Many agents at once and one alone, against the servers that are here.

In every round each agent has a name of its own and asks twice: a first turn, which no cache has seen, and a
next turn, whose prompt is the first, its answer and a further message. One agent alone asks one thing after
another; several ask at the same moment.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from statistics import fmean, quantiles
from typing import Any, Final

from bench.serve.cut_prompts import after
from bench.serve.http_client import Reading, burst, read
from bench.serve.servers import COMPLETIONS, ServerMode
from bench.spread import Spread
from paceline.text import Tokenizer

FIRST, NEXT = "first", "next"
TURNS: Final = (FIRST, NEXT)
ALONE: Final = 4  # prompts that one agent asks in a round


@dataclass(frozen=True)
class Sample:
    """One round of one way with so many agents."""

    way: ServerMode
    agents: int
    turn: str
    round: int
    tokens_per_s: float
    readings: tuple[Reading, ...]


@dataclass
class Rounds:
    tokenizer: Tokenizer
    prompts: Sequence[list[int]]
    max_tokens: int
    agents: int
    say: Callable[[str], None] = print

    def __post_init__(self) -> None:
        self._users = count()

    def run(self, ways: Sequence[ServerMode], repeats: int, seed: int = 0) -> list[Sample]:
        """Ways take turns in an order drawn anew for each round."""
        rng, found = random.Random(seed), list[Sample]()
        for number in range(repeats):
            for way in rng.sample(list(ways), len(ways)):
                for agents in (1, self.agents):
                    found += self._both_turns(way, agents, number)
                rates = ", ".join(f"{s.agents} {s.turn} {s.tokens_per_s:.1f}" for s in found[-4:])
                self.say(f"round {number + 1}: {way.name}: tokens/s {rates}")
        return found

    def _both_turns(self, way: ServerMode, agents: int, number: int) -> list[Sample]:
        start = number * ALONE % len(self.prompts)
        prompts = list(self.prompts) if agents > 1 else list(self.prompts[start : start + ALONE])
        users = [f"agent-{next(self._users)}" for _ in prompts]
        first = self._turn(way, agents, number, prompts, users, 0)
        next_prompts = [
            after(self.tokenizer, p, r.text) for p, r in zip(prompts, first.readings, strict=True)
        ]
        return [first, self._turn(way, agents, number, next_prompts, users, 1)]

    def _turn(
        self,
        way: ServerMode,
        agents: int,
        number: int,
        prompts: Sequence[list[int]],
        users: Sequence[str],
        turn: int,
    ) -> Sample:
        bodies = [
            way.body(prompt, self.max_tokens, user, slot, turn)
            for slot, (prompt, user) in enumerate(zip(prompts, users, strict=True))
        ]
        asks = [partial(read, way.served.port, COMPLETIONS, body) for body in bodies]
        groups = [asks[i : i + agents] for i in range(0, len(asks), agents)]
        done = [burst(group) for group in groups]
        readings = tuple(reading for group, _ in done for reading in group)
        rate = sum(r.tokens for r in readings) / sum(seconds for _, seconds in done)
        return Sample(way, agents, TURNS[turn], number, rate, readings)


def percentile(values: Sequence[float], which: int) -> float:
    return values[0] if len(values) == 1 else quantiles(values, n=100, method="inclusive")[which - 1]


def rows(samples: Sequence[Sample], ways: Sequence[ServerMode], agents: int) -> list[dict[str, Any]]:
    """One for each way, turn and number of agents."""
    made = []
    for turn in TURNS:
        for many in (1, agents):
            group = [s for s in samples if s.turn == turn and s.agents == many]
            for way in ways:
                made.append(_row([s for s in group if s.way == way]))
    return made


def _row(samples: Sequence[Sample]) -> dict[str, Any]:
    first, readings = samples[0], [r for sample in samples for r in sample.readings]
    waits = [1000 * r.first for r in readings]
    return {
        "system": first.way.system,
        "mode": first.way.mode,
        "turn": first.turn,
        "agents": first.agents,
        "tokens_per_s": asdict(Spread.of([s.tokens_per_s for s in samples])),
        "ttft_p50_ms": percentile(waits, 50),
        "ttft_p99_ms": percentile(waits, 99),
        "tpot_ms": fmean(r.ms_per_token for r in readings),
        "answers": len(readings),
        "tokens": sum(r.tokens for r in readings),
    }


def scaling(samples: Sequence[Sample], way: ServerMode, turn: str, agents: int) -> Spread:
    """How many times one agent's tokens per second all together have, round by round."""
    many, alone = (_rates(samples, way, turn, n) for n in (agents, 1))
    return Spread.of([a / b for a, b in zip(many, alone, strict=True)])


def against(
    samples: Sequence[Sample], ours: ServerMode, others: Sequence[ServerMode], turn: str, agents: int
) -> Any:
    """Our tokens per second over those of the fastest other, round by round; None without others."""
    if not others:
        return None
    by_way = {way: _rates(samples, way, turn, agents) for way in others}
    best = max(by_way, key=lambda way: Spread.of(by_way[way]).median)
    pairs = zip(_rates(samples, ours, turn, agents), by_way[best], strict=True)
    return {"peer": best.name, **asdict(Spread.of([a / b for a, b in pairs]))}


def _rates(samples: Sequence[Sample], way: ServerMode, turn: str, agents: int) -> list[float]:
    mine = [s for s in samples if (s.way, s.turn, s.agents) == (way, turn, agents)]
    return [s.tokens_per_s for s in sorted(mine, key=lambda s: s.round)]
