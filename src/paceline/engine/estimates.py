"""Running estimates: the time of a pass; acceptance, time and gain of each drafter.

All of them forget exponentially, so that they follow the text and the machine. A request starts with what
earlier requests of its route have taught. Nothing here reads a clock: the same formulas serve an engine that
runs and a replay of its traces.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

DEFAULT_SLOPE: Final = 0.04  # of one more row, in passes of one row, where nothing was measured
MAX_AGE: Final = 128  # passes after which the correction of a row count is dropped
CONTEXT_STEP: Final = 32  # tokens of context in which the time of a pass counts as constant
MAX_PRIORS: Final = 4096  # remembered
MIN_PRIOR: Final = 1e-6  # no pass is free, whatever a table says
DECAY: Final = 0.97  # weight of old evidence at each new observation
READ_DECAY: Final = 0.99  # the same for the passes that heads read
MAX_READS: Final = 64.0  # passes that one ask may have to pay for
TEXT_DECAY: Final = 0.9  # the same for what is special about one text
MAX_CALIBRATION: Final = 1.2  # drafters that claim too little are corrected by at most this factor
# Variance of draft lengths, in nodes squared, below which they count as equal.
MIN_LENGTH_SPREAD: Final = 0.25
MAX_OUTLIER: Final = 3  # a time counts at most as this many times what was expected

SCORES: Final = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96)  # edges of the bins of scores
UNSCORED: Final = len(SCORES) + 1  # the bin of nodes without a score
DEPTHS: Final = (0, 1, 2, 2, 3, 3, 3, 3, 4)  # the bin of each depth in the draft; deeper: the last
NO_SCORE: Final = 0.7  # P(accepted) of a node without a score, before any evidence
TRUST: Final = 0.9  # accepted nodes over the sum of their scores, before any evidence
MIN_CLAIMED: Final = 1e-6  # sum of scores: a drafter may score all its nodes 0
CELL_WEIGHT: Final = 5.0  # observations that the prior of a cell counts for
TEXT_WEIGHT: Final = 4.0  # the same for what is special about one text
CHANCES: Final = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)  # edges of the bins of chances
FIRST_CHANCES: Final = (0.6, 0.4, 0.25, 0.15)  # of the nodes of a draft, before any evidence

Prior = Callable[[int, int], float]  # rows and context to the cost of a pass, in any unit
State = list[float]  # an estimate as numbers, for a file
MAX_OBSERVED: Final = 1 / (1 - DECAY)  # the sum of the weights of all observations, at most


def _default_prior(rows: int, context: int) -> float:
    return 1 + DEFAULT_SLOPE * rows


class CostCurve:
    """Microseconds of a target pass by its rows and the tokens before them.

    The prior curve is corrected by the times of decoding passes. The machine's speed drifts for all row
    counts together, so it is a factor of its own. Corrections that are not renewed expire: a row count that
    looked expensive in a slow moment is not chosen, so its correction would never be renewed.
    """

    def __init__(self, prior: Prior | None = None) -> None:
        self._prior = prior or _default_prior
        self._speed = 1000.0 if prior else 1.0  # microseconds per unit of the prior, until measured
        self._fresh = True
        self._correction: dict[int, float] = {}
        self._learned: dict[int, int] = {}  # row count -> the pass of its last correction, oldest first
        self._passes = 0
        self._known: list[int] = []  # the row counts with a correction, ascending
        self._priors: dict[tuple[int, int], float] = {}  # by rows and steps of context

    @property
    def measured(self) -> bool:
        """False: only the form of the curve is known."""
        return not self._fresh

    def learn(self, rows: int, us: float, context: int = 0) -> None:
        us, expected = max(us, 1.0), self._expected(rows, context)
        self._forget(rows)
        if self._fresh:
            self._speed, self._fresh = us / expected, False
        if rows not in self._correction:
            seen = us / (self._speed * expected)
            near = self._corrected(rows)
            self._correction[rows] = min(max(seen, near / 2), near * 2)
            insort(self._known, rows)
            return
        drift = us / (self._speed * self._correction[rows] * expected)
        drift = min(max(drift, 1 / 3), 3.0)  # outliers count for little
        self._speed *= drift**0.3
        self._correction[rows] *= drift**0.1

    def _forget(self, rows: int) -> None:
        """Drops the oldest correction if it is stale; that of `rows` is renewed."""
        self._passes += 1
        self._learned.pop(rows, None)
        self._learned[rows] = self._passes
        oldest = next(iter(self._learned))
        if self._learned[oldest] < self._passes - MAX_AGE:
            del self._learned[oldest], self._correction[oldest]
            self._known.remove(oldest)

    def __call__(self, rows: int, context: int = 0) -> float:
        return self._speed * self._expected(rows, context) * self._corrected(rows)

    def curve(self, rows: int, count: int, context: int = 0) -> list[float]:
        """Of `count` row counts, from `rows` on."""
        speed, correction = self._speed, self._correction
        priors, step = self._priors, context // CONTEXT_STEP
        return [
            speed
            * (priors.get((n, step)) or self._expected(n, context))
            * (correction[n] if n in correction else self._corrected(n))
            for n in range(rows, rows + count)
        ]

    def _expected(self, rows: int, context: int) -> float:
        """The prior, which is asked once for every CONTEXT_STEP tokens."""
        key = (rows, context // CONTEXT_STEP)
        found = self._priors.get(key)
        if found is None:
            if len(self._priors) >= MAX_PRIORS:
                self._priors.clear()
            found = self._priors[key] = max(self._prior(rows, key[1] * CONTEXT_STEP), MIN_PRIOR)
        return found

    def _corrected(self, rows: int) -> float:
        """Linear between measured row counts, constant beyond."""
        if rows in self._correction:
            return self._correction[rows]
        known = self._known
        at = bisect_left(known, rows)
        if not known:
            return 1.0
        if at == len(known) or at == 0:
            return self._correction[known[min(at, len(known) - 1)]]
        low, high = known[at - 1], known[at]
        share = (rows - low) / (high - low)
        return self._correction[low] + share * (self._correction[high] - self._correction[low])


class Acceptance:
    """P(a node is accepted | its parent was) of one drafter: discounted counts by score and depth.

    The prior of a cell is the score itself, corrected by what the drafter's scores were good for in all.
    Nodes that no committed token has reached are censored: they are never observed.
    """

    __slots__ = ("_accepted", "_cells", "_claimed")

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], tuple[float, float]] = {}  # score and depth -> accepted, observed
        self._accepted, self._claimed = TRUST * CELL_WEIGHT, CELL_WEIGHT

    def chances(self, scores: Sequence[float | None], depth: int = 0, text: float = 1.0) -> list[float]:
        """Of nodes that follow one another, the first at this depth.

        A score of 1 is certain; None: the drafter gives none. text: a factor on all, see TextFactor.
        """
        factor, get, out = min(self._accepted / self._claimed, MAX_CALIBRATION), self._cells.get, []
        for score in scores:
            if score == 1:
                out.append(1.0)
            else:
                at = DEPTHS[depth] if depth < 8 else DEPTHS[8]
                if score is None:
                    chance, cell = NO_SCORE, get((UNSCORED, at))
                else:
                    chance, cell = factor * score, get((bisect_right(SCORES, score), at))
                if cell is not None:
                    chance = (cell[0] + CELL_WEIGHT * chance) / (cell[1] + CELL_WEIGHT)
                chance *= text
                out.append(chance if chance < 0.999 else 0.999)
            depth += 1
        return out

    def learn(self, scores: Sequence[float | None], depth: int, accepted: int) -> float:
        """So many of these nodes were accepted, and the one after them, if any, was not.

        Returns how many were to be expected before, but for those that were certain.
        """
        factor, cells, expected = min(self._accepted / self._claimed, MAX_CALIBRATION), self._cells, 0.0
        for i, score in enumerate(scores):
            if score == 1:
                continue
            at = DEPTHS[min(depth + i, 8)]
            key = (UNSCORED if score is None else bisect_right(SCORES, score), at)
            prior = NO_SCORE if score is None else factor * score
            hits, observed = cells.get(key, (0.0, 0.0))
            expected += (hits + CELL_WEIGHT * prior) / (observed + CELL_WEIGHT)
            hit = i < accepted
            cells[key] = (DECAY * hits + hit, DECAY * observed + 1)
            if score is not None:
                self._accepted = DECAY * self._accepted + hit
                self._claimed = max(DECAY * self._claimed + score, MIN_CLAIMED)
        return expected

    def state(self) -> State:
        """Accepted and claimed; then bin of score, bin of depth, accepted and observed of each cell."""
        cells = [x for key, counts in self._cells.items() for x in (*key, *counts)]
        return [self._accepted, self._claimed, *cells]

    @classmethod
    def of_state(cls, state: State) -> "Acceptance":
        """Raises ValueError where the numbers are no state."""
        acceptance, cells = cls(), list(zip(*[iter(state[2:])] * 4, strict=True))
        acceptance._accepted, acceptance._claimed = state[:2]
        _require(0 <= state[0] <= 2 * MAX_OBSERVED and 0 < state[1] <= 2 * MAX_OBSERVED)
        for score, depth, accepted, observed in cells:
            _require(score in range(UNSCORED + 1) and depth in DEPTHS)
            _require(0 <= accepted <= observed <= MAX_OBSERVED + 1e-6)
            acceptance._cells[int(score), int(depth)] = (accepted, observed)
        return acceptance


class TextFactor:
    """How much worse than elsewhere a drafter does on one text: accepted over expected nodes, at most 1.

    From a few dozen nodes a factor above 1 is mostly luck, and where rows are dear only such nodes are taken.
    """

    __slots__ = ("_accepted", "_expected", "value")

    def __init__(self) -> None:
        self._accepted = self._expected = 0.0
        self.value = 1.0

    def learn(self, nodes: int, expected: float, accepted: int) -> None:
        """Forgets towards 1: what was special about a text long ago need not be special now."""
        keep = TEXT_DECAY**nodes
        self._accepted = keep * self._accepted + accepted
        self._expected = keep * self._expected + expected
        value = (TEXT_WEIGHT + self._accepted) / (TEXT_WEIGHT + self._expected)
        self.value = min(max(value, 0.05), 1.0)


class Gain:
    """Expected tokens of a draft beyond the price of its rows, at any price: discounted counts of its nodes.

    A node pays where its chance of being accepted exceeds the price of a row, so the mean of the chances says
    too little: half of the drafts sure and half hopeless gain more than all of them doubtful. The gain on one
    text is that on its whole route, as far as the text says nothing else.
    """

    __slots__ = ("_chances", "_decay", "_drafts", "_newest", "_nodes", "_route")

    def __init__(self, route: "Gain | None" = None) -> None:
        """route: the gain on the text's route; without one this is a route's."""
        self._route, self._decay = route, DECAY if route is None else TEXT_DECAY
        self._newest = 1.0  # the weight of the newest draft: weights grow, instead of old ones being decayed
        self._drafts = 0.0  # drafts, their nodes by chance, and the sum of the chances
        self._nodes, self._chances = [0.0] * (len(CHANCES) + 1), [0.0] * (len(CHANCES) + 1)
        if route is None:
            self._add(FIRST_CHANCES, list(map(_bin, FIRST_CHANCES)), CELL_WEIGHT)

    def __call__(self, price: float) -> float:
        """Tokens of a draft, at this price of a row in tokens."""
        first, gain = bisect_right(CHANCES, price), 0.0
        for nodes, chances in zip(self._nodes[first:], self._chances[first:], strict=True):
            net = chances - price * nodes
            if net > 0:
                gain += net
        return self._mean(gain, self._route(price) if self._route is not None else 0.0)

    def nodes_above(self, price: float) -> float:
        """How many nodes of a draft exceed this price, on average."""
        nodes = sum(self._nodes[bisect_right(CHANCES, price) :])
        return self._mean(nodes, self._route.nodes_above(price) if self._route is not None else 0.0)

    def _mean(self, total: float, on_route: float) -> float:
        if self._route is None:
            return total / self._drafts
        prior = TEXT_WEIGHT * self._newest
        return (total + prior * on_route) / (self._drafts + prior)

    def learn(self, chances: Sequence[float]) -> None:
        """chances: P(node is accepted) of each node of a draft, its ancestors included; none for no draft."""
        bins = [bisect_right(CHANCES, chance) for chance in chances]
        self._add(chances, bins, 1.0)
        if self._route is not None:
            self._route._add(chances, bins, 1.0)

    def _add(self, chances: Sequence[float], bins: Sequence[int], count: float) -> None:
        self._newest /= self._decay
        if self._newest > 1e6:
            self._scale(1 / self._newest)
        weight, nodes, sums = count * self._newest, self._nodes, self._chances
        self._drafts += weight
        for i, chance in zip(bins, chances, strict=True):
            nodes[i] += weight
            sums[i] += weight * chance

    def state(self) -> State:
        """Of a route: its drafts, their nodes by chance, and the sums of the chances."""
        return [x / self._newest for x in (self._drafts, *self._nodes, *self._chances)]

    @classmethod
    def of_state(cls, state: State) -> "Gain":
        """Raises ValueError where the numbers are no state."""
        gain, bins = cls(), len(CHANCES) + 1
        drafts, nodes, chances = state[0], state[1 : 1 + bins], state[1 + bins :]
        _require(len(chances) == bins and 0 < drafts <= 2 * MAX_OBSERVED)
        _require(all(0 <= c <= n * (1 + 1e-9) for n, c in zip(nodes, chances, strict=True)))
        gain._newest, gain._drafts, gain._nodes, gain._chances = 1.0, drafts, nodes, chances
        return gain

    def _scale(self, factor: float) -> None:
        self._newest *= factor
        self._drafts *= factor
        self._nodes = [factor * x for x in self._nodes]
        self._chances = [factor * x for x in self._chances]


def _bin(chance: float) -> int:
    return bisect_right(CHANCES, chance)


class DraftTime:
    """Microseconds of a draft by its nodes: a least-squares line, one part per draft and one per node.

    Only drafts of different lengths can tell the two apart; until then all of it counts as per draft.
    """

    __slots__ = ("_nodes", "_products", "_squares", "_us", "_weight", "draft_us", "node_us", "observed")

    def __init__(self) -> None:
        self._weight = self._nodes = self._us = self._squares = self._products = 0.0
        self.draft_us = 0.0  # of a draft, whatever its nodes
        self.node_us = 0.0  # of each node
        self.observed = 0  # drafts

    def learn(self, nodes: float, us: float, max_us: float = 0.0) -> None:
        """max_us: a longer time is an outlier, unless earlier ones were as long."""
        if self._weight:
            us = min(us, MAX_OUTLIER * max(self(nodes), max_us))
        self.observed += 1
        self._weight = DECAY * self._weight + 1
        self._nodes = DECAY * self._nodes + nodes
        self._us = DECAY * self._us + us
        self._squares = DECAY * self._squares + nodes * nodes
        self._products = DECAY * self._products + nodes * us
        self._fit()

    def _fit(self) -> None:
        weight = self._weight
        mean_nodes, mean_us = self._nodes / weight, self._us / weight
        spread = self._squares / weight - mean_nodes**2
        covariance = self._products / weight - mean_nodes * mean_us
        slope = max(covariance / (spread + MIN_LENGTH_SPREAD), 0.0)
        self.node_us = min(slope, mean_us / mean_nodes) if mean_nodes else 0.0
        self.draft_us = mean_us - self.node_us * mean_nodes

    def __call__(self, nodes: float) -> float:
        """0 before any evidence."""
        return self.draft_us + self.node_us * nodes

    def state(self) -> State:
        """Drafts observed, and the sums of the fit."""
        return [self.observed, self._weight, self._nodes, self._us, self._squares, self._products]

    @classmethod
    def of_state(cls, state: State) -> "DraftTime":
        """Raises ValueError where the numbers are no state."""
        time = cls()
        observed, time._weight, time._nodes, time._us, time._squares, time._products = state
        _require(min(state) >= 0 and 0 < time._weight <= MAX_OBSERVED + 1e-6 and observed == int(observed))
        time.observed = int(observed)
        time._fit()
        return time


class ReadShare:
    """How many passes of a sequence a head reads for each time that it is asked: what an ask must pay for."""

    __slots__ = ("_asked", "_read", "per_ask")

    def __init__(self) -> None:
        self._read = self._asked = 0.0
        self.per_ask = 1.0

    def learn(self, read: int, asked: int) -> None:
        self._read = READ_DECAY * self._read + read
        self._asked = READ_DECAY * self._asked + asked
        self.per_ask = min((self._read + 1) / (self._asked + 1), MAX_READS)


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError("a number is out of its range")


Key = tuple[str, str]  # route and drafter


@dataclass(slots=True)
class Estimates:
    """All estimates about drafters that outlive a sequence."""

    acceptance: dict[Key, Acceptance] = field(default_factory=dict)
    gains: dict[Key, Gain] = field(default_factory=dict)
    draft_us: dict[str, DraftTime] = field(default_factory=dict)  # of one ask, by drafter
    read_us: dict[str, DraftTime] = field(default_factory=dict)  # of one sequence's hidden states, by drafter
    own_us: float = 0.0  # of the controller and of the list of drafters, for one ask
    plain_us: float = 0.0  # of late: as long as plain decoding would have taken
    real_us: float = 0.0  # and as long as it took

    @property
    def speedup(self) -> float:
        """Of late, over plain decoding; 1 where it is less."""
        return max(1.0, self.plain_us / self.real_us) if self.real_us else 1.0

    def forget(self, drafter: str) -> None:
        for by_route in (self.acceptance, self.gains):
            for key in [key for key in by_route if key[1] == drafter]:
                del by_route[key]
        self.draft_us.pop(drafter, None)
        self.read_us.pop(drafter, None)
