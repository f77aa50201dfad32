"""Every drafter answers the same turns, taking turns, within a time limit.

A lane is a drafter at one temperature, with a fixed draft length or with the controller's. Its memory of
texts is its own, and new in each repeat: it learns from the turns before and never meets a turn again;
what its controller learned stays. Before a turn its prompt is in all caches, but for its last tokens; the
order of the lanes is drawn anew for each turn. Time is the clock's, of the whole answer.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import Final

from bench.drafters.arms import PLAIN, Arm, Stock
from bench.drafters.turns import Turn
from paceline import SamplingParams, SpecConfig
from paceline.engine.control import Rate
from paceline.engine.engine import Engine
from paceline.engine.estimates import Prior
from paceline.types import Drafter, Round, Seq, Target

FIRST_PART: Final = 0.9  # of a repeat's share of the time, what the first may use: the later ones must fit
WARM: Final = 2  # tokens of an answer that only fills caches
SHORT: Final = 16  # tokens of the answer after which memory is looked at


@dataclass(frozen=True)
class Lane:
    arm: Arm
    temperature: float
    planned: bool  # the controller sets the draft length


@dataclass
class Figures:
    """One answer, from its first pass to its last."""

    tokens: int = 0
    passes: int = 0
    rows: int = 0
    drafts: int = 0  # passes with a draft, or with a budget for one
    draft_us: int = 0
    target_us: int = 0
    seconds: float = 0.0

    def add(self, r: Round) -> None:
        self.tokens += len(r.tokens)
        self.passes += bool(r.tokens)
        self.rows += r.rows
        self.drafts += r.budget > 0 or r.drafted > 0
        self.draft_us += r.draft_us
        self.target_us += r.target_us


@dataclass(frozen=True)
class Sample:
    """One answer."""

    lane: Lane
    repeat: int
    turn: str
    kind: str
    text: tuple[int, ...]
    figures: Figures

    @property
    def moment(self) -> tuple[int, str, float]:
        """The turns that all lanes answer with the same text."""
        return self.repeat, self.turn, self.lane.temperature


@dataclass(frozen=True)
class Settings:
    temperatures: Sequence[float] = (0.0, 0.7)
    length: int = 5
    most: int = 8
    width: int = 4
    max_tokens: int = 64
    repeats: int = 3
    seed: int = 0


@dataclass
class Outcome:
    """Whole repeats only: each has an answer of every lane to every turn it is for."""

    samples: list[Sample] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    repeats: int = 0
    seconds: float = 0.0


class Runs:
    def __init__(
        self,
        target: Target,
        stock: Stock,
        settings: Settings,
        eos: frozenset[int] = frozenset(),
        prior: Prior | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._target, self._stock, self._settings = target, stock, settings
        self._eos, self._prior, self._clock = eos, prior, clock
        self._ids = count()
        self._rng = random.Random(settings.seed)

    def try_out(self, prompt: Sequence[int]) -> Callable[[Mapping[str, Drafter], str], None]:
        """For the stock: a short answer with one drafter alone, to a prompt the target has seen."""
        self._fill({}, SpecConfig((), max_draft=0), prompt, SHORT)

        def use(drafters: Mapping[str, Drafter], name: str) -> None:
            spec = SpecConfig((name,), self._settings.length, adaptive=False)
            self._fill(drafters, spec, prompt, SHORT)

        return use

    def _fill(
        self,
        drafters: Mapping[str, Drafter],
        spec: SpecConfig,
        prompt: Sequence[int],
        most: int,
        tenant: str = "",
    ) -> None:
        params = SamplingParams(max_tokens=most)
        seq = Seq(self._id(), list(prompt), len(prompt), params, spec, tenant)
        self._answered(self._engine(drafters), seq)

    def run(
        self,
        arms: Sequence[Arm],
        turns: Sequence[Turn],
        kept: Callable[[Outcome], None],
        limit: float,
        told: Callable[[str], None] = lambda _: None,
    ) -> Outcome:
        """`kept` is told after each whole repeat, `told` how far it is.

        limit: seconds; turns are left out rather than repeats, one of each kind is not.
        """
        started, controllers = self._clock(), {lane: Rate(self._prior) for lane in self._lanes(arms)}
        share = FIRST_PART * limit / self._settings.repeats
        outcome, took = Outcome(), dict[str, float]()
        for repeat in range(self._settings.repeats):
            lanes = {lane: self._engine(self._stock.every(), rate) for lane, rate in controllers.items()}
            samples: list[Sample] = []
            for turn in outcome.turns if repeat else turns:
                spent = self._clock() - started
                if repeat and spent + took[turn.name] > limit:
                    return outcome
                if not repeat and _enough(outcome.turns, turns) and spent + max(took.values()) > share:
                    break
                samples += self._turn(lanes, turn, repeat)
                took[turn.name] = self._clock() - started - spent
                told(f"repeat {repeat + 1}, {turn.name}: {len(lanes)} lanes in {took[turn.name]:.0f} s")
                if not repeat:
                    outcome.turns.append(turn)
            outcome.samples += samples
            outcome.repeats, outcome.seconds = repeat + 1, self._clock() - started
            kept(outcome)
        return outcome

    def _lanes(self, arms: Sequence[Arm]) -> Iterator[Lane]:
        for arm in arms:
            for temperature in self._settings.temperatures:
                for planned in (False, True):
                    yield Lane(arm, temperature, planned)

    def _engine(self, drafters: Mapping[str, Drafter], rate: Rate | None = None) -> Engine:
        return Engine(self._target, drafters, rate or Rate(self._prior), eos=self._eos)

    def _turn(self, lanes: Mapping[Lane, Engine], turn: Turn, repeat: int) -> list[Sample]:
        self._warm(turn)
        mine = [lane for lane in lanes if turn.bound or not lane.arm.bound]
        return [self._sample(lane, lanes[lane], turn, repeat) for lane in self._rng.sample(mine, len(mine))]

    def _warm(self, turn: Turn) -> None:
        """Those who read hidden states must see the prompt's only pass, so they come first, together."""
        prompt, tenant, drafters = turn.prompt.tokens, turn.prompt.workload, self._stock.drafters
        tapped = tuple(name for name, drafter in drafters.items() if drafter.taps)
        for names in (tapped or (PLAIN,), *((name,) for name in drafters if name not in tapped)):
            self._fill(self._stock.every(), SpecConfig(names, 1, adaptive=False), prompt, WARM, tenant)

    def _sample(self, lane: Lane, engine: Engine, turn: Turn, repeat: int) -> Sample:
        settings = self._settings
        spec = lane.arm.spec(settings.length, settings.most, settings.width, lane.planned)
        params = SamplingParams(
            temperature=lane.temperature, seed=settings.seed + repeat, max_tokens=settings.max_tokens
        )
        prompt = list(turn.prompt.tokens)
        seq = Seq(self._id(), prompt, len(prompt), params, spec, turn.prompt.workload, cursor=turn.cursor())
        return Sample(lane, repeat, turn.name, turn.kind, *self._answered(engine, seq))

    def _answered(self, engine: Engine, seq: Seq) -> tuple[tuple[int, ...], Figures]:
        figures, started = Figures(), perf_counter()
        engine.submit(seq)
        while engine.busy:
            for r in engine.step():
                if r.error is not None:
                    raise r.error
                figures.add(r)
        figures.seconds = perf_counter() - started
        return tuple(seq.output), figures

    def _id(self) -> str:
        return f"bench {next(self._ids)}"


def _enough(done: Sequence[Turn], turns: Sequence[Turn]) -> bool:
    """True if there was a turn of each kind."""
    return {turn.kind for turn in done} == {turn.kind for turn in turns}
