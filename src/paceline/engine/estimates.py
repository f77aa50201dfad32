"""Running estimates: the time of a pass; acceptance, time and gain of each drafter.

All of them forget exponentially, so that they follow the text and the machine. A request starts with what
earlier requests of its route have taught. Nothing here reads a clock: the same formulas serve an engine that
runs and a replay of its traces.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

DEFAULT_SLOPE: Final = 0.04  # of one more row, in passes of one row, where nothing was measured
TRUSTED_PASSES: Final = 3  # that a curve measured before counts for, in the correction of a row count
CORRECTION_SHARE: Final = 0.04  # weight of a pass in the correction of its row count, once many are known
SPEED_SHARE: Final = 0.2  # the same in the machine's speed
MAX_AGE: Final = 128  # passes after which the correction of a row count is dropped
CONTEXT_STEP: Final = 32  # tokens of context in which the time of a pass counts as constant
MAX_STEPS: Final = 256  # of context whose priors are remembered
MIN_PRIOR: Final = 1e-6  # no pass is free, whatever a table says
DECAY: Final = 0.97  # weight of old evidence at each new observation
READ_DECAY: Final = 0.99  # the same for the passes that heads read
MAX_READS: Final = 64.0  # passes that one ask may have to pay for
TEXT_DECAY: Final = 0.9  # the same for what is special about one text
MAX_CALIBRATION: Final = 1.2  # drafters that claim too little are corrected by at most this factor
# Variance of draft lengths, in nodes squared, below which they count as equal.
MIN_LENGTH_SPREAD: Final = 0.5
MAX_OUTLIER: Final = 3  # a time counts at most as this many times what was expected
MAX_UNLIKE: Final = 8  # first drafts whose times may all differ, until what they say is believed
MEAN_SHARE: Final = 0.03  # weight of a pass in the means of its shape, once many are known
MAX_COMPARED: Final = 128  # shapes of passes whose means are kept
MIN_COUNT: Final = 0.01  # asks and readings on average, below which a head is forgotten there
FIT_SHARE: Final = 0.01  # weight of a pass in what heads add to passes, once many are known
FIRST_FITTED: Final = 16  # passes that the assumption of no slowdown counts for
MAX_SLOWDOWN: Final = 0.2  # of a pass: a larger difference is an outlier
SMALL_TIME: Final = 0.1  # of a pass: draft times below it need not be told apart
FIRST_ASKS: Final = 32.0  # of a text, before any evidence

SCORES: Final = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96)  # edges of the bins of scores
UNSCORED: Final = len(SCORES) + 1  # the bin of nodes without a score
DEPTHS: Final = (0, 1, 2, 2, 3, 3, 3, 3, 4)  # the bin of each depth in the draft; deeper: the last
MAX_DEPTH: Final = len(DEPTHS) - 1
_DEPTH_BINS: Final = DEPTHS[-1] + 1
_CELLS: Final = _DEPTH_BINS * (UNSCORED + 1)
NO_SCORE: Final = 0.7  # P(accepted) of a node without a score, before any evidence
TRUST: Final = 0.9  # accepted nodes over the sum of their scores, before any evidence
MIN_CLAIMED: Final = 1e-6  # sum of scores: a drafter may score all its nodes 0
CELL_WEIGHT: Final = 5.0  # observations that the prior of a cell counts for
TEXT_WEIGHT: Final = 4.0  # the same for what is special about one text
CHANCES: Final = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)  # edges of the bins of chances
FIRST_CHANCES: Final = (0.6, 0.4, 0.25, 0.15)  # of the nodes of a draft, before any evidence
MAX_SCALE: Final = 1e6  # of weights that grow
MIN_MADE: Final = 0.01  # drafts: what those with nodes count for at least, however many without follow

FIRST: Final = ", first"  # added to a route: what its texts begin with says little of how they go on

Prior = Callable[[int, int], float]  # rows and context to the cost of a pass, in any unit
State = list[float]  # an estimate as numbers, for a file
MAX_OBSERVED: Final = 1 / (1 - DECAY)  # the sum of the weights of all observations, at most
MAX_TEXTS: Final = 1024  # that run at the same time: each may add as much to the gain on their route


def _default_prior(rows: int, context: int) -> float:
    return 1 + DEFAULT_SLOPE * rows


class CostCurve:
    """Microseconds of a target pass by its rows and the tokens before them.

    The prior curve is corrected by the times of decoding passes. The machine's speed drifts for all row
    counts together, so it is a factor of its own. One pass says little, since the row counts that seem cheap
    are those that are chosen: a correction begins at that of its neighbours and follows the mean of its
    passes. Corrections that are not renewed expire: a row count that looked expensive in a slow moment is not
    chosen, so its correction would never be renewed.
    """

    def __init__(self, prior: Prior | None = None) -> None:
        self._prior = prior or _default_prior
        self._speed = 1000.0 if prior else 1.0  # microseconds per unit of the prior, until measured
        self._fresh = True
        self._has_prior = prior is not None
        self._correction: dict[int, float] = {}
        # Row count -> passes since its correction began, and the last of them; the oldest one first.
        self._learned: dict[int, tuple[int, int]] = {}
        self._passes = 0
        self._known: list[int] = []  # the row counts with a correction, ascending
        self._priors: dict[int, dict[int, float]] = {}  # by steps of context, then by rows

    @property
    def measured(self) -> bool:
        """False: only the form of the curve is known."""
        return not self._fresh

    def learn(self, rows: int, us: float, context: int = 0) -> None:
        expected, correction = self.prior(rows, context), self._correction
        if us < 1:
            us = 1.0
        seen = self._renew(rows)
        if self._fresh:
            self._speed, self._fresh = us / expected, False
        corrected = correction.get(rows)
        if corrected is None:
            corrected = self._corrected(rows, context)
            insort(self._known, rows)
        drift = us / (self._speed * corrected * expected)
        if not 1 / 3 <= drift <= 3:  # outliers count for little
            drift = 3.0 if drift > 1 else 1 / 3
        if seen or self._has_prior:
            self._speed *= drift**SPEED_SHARE
            share = 1 / (seen + 1 + TRUSTED_PASSES)
            correction[rows] = corrected * drift ** (share if share > CORRECTION_SHARE else CORRECTION_SHARE)
        else:  # one pass says more than the default curve
            correction[rows] = corrected * min(max(drift, 0.5), 2.0)

    def _renew(self, rows: int) -> int:
        """Drops the oldest correction if it is stale. Returns the passes of `rows` before this one."""
        learned = self._learned
        self._passes = passes = self._passes + 1
        seen = learned.pop(rows, (0, 0))[0]
        learned[rows] = seen + 1, passes
        oldest = next(iter(learned))
        if learned[oldest][1] < passes - MAX_AGE:
            del learned[oldest], self._correction[oldest]
            self._known.remove(oldest)
        return seen

    def __call__(self, rows: int, context: int = 0) -> float:
        priors = self._priors.get(context // CONTEXT_STEP)
        prior = (priors.get(rows) if priors else None) or self.prior(rows, context)
        return self._speed * prior * (self._correction.get(rows) or self._corrected(rows, context))

    def curve(self, rows: int, count: int, context: int = 0) -> list[float]:
        """Of `count` row counts, from `rows` on."""
        self.prior(rows, context)
        speed, prior = self._speed, self._priors[context // CONTEXT_STEP].get
        correction, corrected, expected = self._correction.get, self._corrected, self.prior
        return [
            speed * (prior(n) or expected(n, context)) * (correction(n) or corrected(n, context))
            for n in range(rows, rows + count)
        ]

    def prior(self, rows: int, context: int) -> float:
        """Of a pass, in its own unit and never corrected. Asked once for every CONTEXT_STEP tokens."""
        step = context // CONTEXT_STEP
        priors = self._priors.get(step)
        if priors is None:
            if len(self._priors) >= MAX_STEPS:
                self._priors.clear()
            priors = self._priors[step] = {}
        found = priors.get(rows)
        if found is None:
            found = priors[rows] = max(self._prior(rows, step * CONTEXT_STEP), MIN_PRIOR)
        return found

    def _corrected(self, rows: int, context: int) -> float:
        """Linear between measured row counts, constant below them.

        Beyond them, at most what it adds to the last one: masks, say, add the same to a pass of any size. Row
        counts that seem dear are never chosen, so never corrected.
        """
        if rows in self._correction:
            return self._correction[rows]
        known = self._known
        at = bisect_left(known, rows)
        if not known:
            return 1.0
        if at == 0:
            return self._correction[known[0]]
        if at == len(known):
            last = known[-1]
            measured = self._correction[last]
            added = (measured - 1) * self.prior(last, context)
            return min(measured, 1 + added / self.prior(rows, context))
        low, high = known[at - 1], known[at]
        share = (rows - low) / (high - low)
        return self._correction[low] + share * (self._correction[high] - self._correction[low])


class Acceptance:
    """P(a node is accepted | its parent was) of one drafter: discounted counts by score and depth.

    The prior of a cell is the score itself, corrected by what the drafter's scores were good for in all.
    Nodes that no committed token has reached are censored: they are never observed.
    """

    __slots__ = ("_accepted", "_claimed", "_hits", "_observed")

    def __init__(self) -> None:
        self._hits, self._observed = [0.0] * _CELLS, [0.0] * _CELLS  # by bin of score and of depth
        self._accepted, self._claimed = TRUST * CELL_WEIGHT, CELL_WEIGHT

    def chances(self, scores: Sequence[float | None], depth: int = 0, text: float = 1.0) -> list[float]:
        """Of nodes that follow one another, the first at this depth.

        A score of 1 is certain; None: the drafter gives none. text: a factor on all, see TextFactor.
        """
        factor, hits, observed, out = self._calibration(), self._hits, self._observed, []
        for score in scores:
            if score == 1:
                out.append(1.0)
            else:
                cell = DEPTHS[depth] if depth < MAX_DEPTH else DEPTHS[MAX_DEPTH]
                if score is None:
                    cell, chance = cell + _DEPTH_BINS * UNSCORED, NO_SCORE
                else:
                    cell, chance = cell + _DEPTH_BINS * bisect_right(SCORES, score), factor * score
                if weight := observed[cell]:
                    chance = (hits[cell] + CELL_WEIGHT * chance) / (weight + CELL_WEIGHT)
                chance *= text
                out.append(chance if chance < 0.999 else 0.999)
            depth += 1
        return out

    def _calibration(self) -> float:
        factor = self._accepted / self._claimed
        return factor if factor < MAX_CALIBRATION else MAX_CALIBRATION

    def learn(self, scores: Sequence[float | None], depth: int, accepted: int) -> float:
        """So many of these nodes were accepted, and the one after them, if any, was not.

        Returns how many were to be expected before, but for those that were certain.
        """
        factor, hits, observed, expected = self._calibration(), self._hits, self._observed, 0.0
        total, claimed = self._accepted, self._claimed
        for score in scores:
            if score != 1:
                cell = DEPTHS[depth] if depth < MAX_DEPTH else DEPTHS[MAX_DEPTH]
                hit = 1 if accepted > 0 else 0
                if score is None:
                    cell, prior = cell + _DEPTH_BINS * UNSCORED, NO_SCORE
                else:
                    cell, prior = cell + _DEPTH_BINS * bisect_right(SCORES, score), factor * score
                    total = DECAY * total + hit
                    claimed = DECAY * claimed + score
                    if claimed < MIN_CLAIMED:
                        claimed = MIN_CLAIMED
                expected += (hits[cell] + CELL_WEIGHT * prior) / (observed[cell] + CELL_WEIGHT)
                hits[cell] = DECAY * hits[cell] + hit
                observed[cell] = DECAY * observed[cell] + 1
            depth += 1
            accepted -= 1
        self._accepted, self._claimed = total, claimed
        return expected

    def state(self) -> State:
        """Accepted and claimed; then bin of score, bin of depth, accepted and observed of each cell."""
        numbers = enumerate(zip(self._hits, self._observed, strict=True))
        cells = [x for i, seen in numbers if seen[1] for x in (*divmod(i, _DEPTH_BINS), *seen)]
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
            cell = _DEPTH_BINS * int(score) + int(depth)
            acceptance._hits[cell], acceptance._observed[cell] = accepted, observed
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
        if value > 1:
            value = 1.0
        self.value = value if value > 0.05 else 0.05


class Gain:
    """Expected tokens of a draft beyond the price of its rows, at any price: discounted counts of its nodes.

    A node pays where its chance of being accepted exceeds the price of a row, so the mean of the chances says
    too little: half of the drafts sure and half hopeless gain more than all of them doubtful. The gain on one
    text is that on its whole route, as far as the text says nothing else.
    """

    __slots__ = ("_chances", "_decay", "_drafts", "_made", "_newest", "_nodes", "_route")

    def __init__(self, route: "Gain | None" = None) -> None:
        """route: the gain on the text's route; without one this is a route's."""
        self._route, self._decay = route, DECAY if route is None else TEXT_DECAY
        self._newest = 1.0  # the weight of the newest draft: weights grow, instead of old ones being decayed
        self._drafts = self._made = 0.0  # drafts asked for, and those that had a node
        # Their nodes by chance, and the sum of the chances.
        self._nodes, self._chances = [0.0] * (len(CHANCES) + 1), [0.0] * (len(CHANCES) + 1)
        if route is None:
            self._drafts = self._made = CELL_WEIGHT * self._next_weight()
            self._add(FIRST_CHANCES, self._drafts)

    def __call__(self, price: float) -> float:
        """Tokens of a draft, at this price of a row in tokens."""
        first, route = bisect_right(CHANCES, price), self._route
        gain = self._sum(first, price)
        if route is None:
            return gain / self._drafts
        prior = TEXT_WEIGHT * self._newest
        return (gain + prior * (route._sum(first, price) / route._drafts)) / (self._drafts + prior)

    def _sum(self, first: int, price: float) -> float:
        """Nodes of the bins after the first all pay; those of the first one as far as their mean does."""
        nodes, chances = self._nodes, self._chances
        gain = sum(chances[first:]) - price * sum(nodes[first:])
        below = price * nodes[first] - chances[first]
        return gain + below if below > 0 else gain

    def nodes_above(self, price: float) -> float:
        """How many nodes of a draft that has any exceed this price, on average.

        A drafter that finds nothing most of the time need not be brief when it does.
        """
        nodes, route = sum(self._nodes[bisect_right(CHANCES, price) :]), self._route
        if route is None:
            return nodes / self._made
        prior = TEXT_WEIGHT * self._newest
        return (nodes + prior * route.nodes_above(price)) / (self._made + prior)

    def learn(self, chances: Sequence[float], texts: int = 1) -> None:
        """chances: P(node is accepted) of each node of a draft, its ancestors included; none for no draft.

        texts: those of the route that run. Its evidence gets old by the passes, however many are in one: they
        may all be at the same place of their answers.
        """
        route, weight = self._route, self._next_weight()
        self._drafts += weight
        if chances:
            self._made += weight
        if route is None:
            self._add(chances, weight)
            if self._made < MIN_MADE * weight:
                self._keep_made()
            return
        nodes, sums, of_route = self._nodes, self._chances, route._next_weight(texts)
        route._drafts += of_route
        if chances:
            route._made += of_route
        elif route._made < MIN_MADE * of_route:
            route._keep_made()
        route_nodes, route_sums = route._nodes, route._chances
        for chance in chances:
            i = bisect_right(CHANCES, chance)
            nodes[i] += weight
            sums[i] += weight * chance
            route_nodes[i] += of_route
            route_sums[i] += of_route * chance

    def age(self, tokens: int) -> None:
        """Of a text: so many tokens came while nobody was asked."""
        self._newest /= self._decay**tokens
        if self._newest > MAX_SCALE:
            self._scale(1 / self._newest)

    def _next_weight(self, texts: int = 1) -> float:
        """Of one more draft."""
        self._newest = newest = self._newest / self._decay ** (1 / min(texts, MAX_TEXTS))
        if newest > MAX_SCALE:
            self._scale(1 / newest)
        return self._newest

    def _add(self, chances: Sequence[float], weight: float) -> None:
        for chance in chances:
            i = bisect_right(CHANCES, chance)
            self._nodes[i] += weight
            self._chances[i] += weight * chance

    def _keep_made(self) -> None:
        """Drafts with nodes have a mean, however long ago they were: a weight of 0 would have none."""
        made, least = self._made, MIN_MADE * self._newest
        self._nodes = [x / made * least for x in self._nodes]
        self._chances = [x / made * least for x in self._chances]
        self._made = least

    def state(self) -> State:
        """Of a route: its drafts, their nodes by chance, the sums of the chances, and drafts with nodes."""
        return [x / self._newest for x in (self._drafts, *self._nodes, *self._chances, self._made)]

    @classmethod
    def of_state(cls, state: State) -> "Gain":
        """Raises ValueError where the numbers are no state. Older ones do not tell drafts without nodes."""
        gain, bins = cls(), len(CHANCES) + 1
        _require(len(state) in (1 + 2 * bins, 2 + 2 * bins))
        drafts, nodes, chances = state[0], state[1 : 1 + bins], state[1 + bins : 1 + 2 * bins]
        made = state[-1] if len(state) == 2 + 2 * bins else drafts
        _require(0 < made <= drafts * (1 + 1e-9) <= 2 * MAX_TEXTS * MAX_OBSERVED)
        _require(all(0 <= c <= n * (1 + 1e-9) for n, c in zip(nodes, chances, strict=True)))
        gain._newest, gain._drafts, gain._made, gain._nodes, gain._chances = 1.0, drafts, made, nodes, chances
        return gain

    def _scale(self, factor: float) -> None:
        self._newest *= factor
        self._drafts *= factor
        self._made *= factor
        self._nodes = [factor * x for x in self._nodes]
        self._chances = [factor * x for x in self._chances]


class DraftTime:
    """Microseconds of a draft by its nodes: a least-squares line, one part per draft and one per node.

    Only drafts of different lengths can tell the two apart; until then all of it counts as per draft. While
    drafts are of one length again, what those have told holds. Nothing is known before two drafts in a row
    took much the same: at first, something may be compiled or loaded.
    """

    __slots__ = (
        "_last", "_nodes", "_products", "_squares", "_us", "_weight",
        "draft_us", "known", "node_us", "observed",
    )  # fmt: skip

    def __init__(self) -> None:
        self._weight = self._nodes = self._us = self._squares = self._products = 0.0
        self.draft_us = 0.0  # of a draft, whatever its nodes
        self.node_us = 0.0  # of each node
        self.observed = 0  # drafts
        self.known = False
        self._last = 0.0  # microseconds

    def learn(self, nodes: float, us: float, max_us: float = 0.0, steady: bool = False) -> None:
        """max_us: a longer time is an outlier, unless earlier ones were as long.

        steady: drafts take much the same time, so that a far shorter one shows earlier ones to be outliers.
        """
        first = self.observed < MAX_UNLIKE
        if not self.known:
            alike = 0 < max(us, self._last) < MAX_OUTLIER * min(us, self._last)
            self.known = alike or not first
        self._last = us
        if self._weight:
            expected = self.draft_us + self.node_us * nodes
            shorter = us * MAX_OUTLIER < expected and expected > SMALL_TIME * max_us
            if steady and shorter and (nodes or first):
                self._weight = self._nodes = self._us = self._squares = self._products = self.node_us = 0.0
            elif us > MAX_OUTLIER * expected and us > MAX_OUTLIER * max_us:
                us = MAX_OUTLIER * max(expected, max_us)
        self.observed += 1
        self._weight = DECAY * self._weight + 1
        self._nodes = DECAY * self._nodes + nodes
        self._us = DECAY * self._us + us
        self._squares = DECAY * self._squares + nodes * nodes
        self._products = DECAY * self._products + nodes * us
        self._fit()

    def _fit(self) -> None:
        weight = self._weight
        mean_nodes, mean_us, slope = self._nodes / weight, self._us / weight, self.node_us
        spread = self._squares / weight - mean_nodes**2
        if spread > MIN_LENGTH_SPREAD:
            covariance = self._products / weight - mean_nodes * mean_us
            slope = covariance / spread if covariance > 0 else 0.0
        if mean_nodes and slope > mean_us / mean_nodes:
            slope = mean_us / mean_nodes
        self.node_us, self.draft_us = slope, mean_us - slope * mean_nodes

    def __call__(self, nodes: float) -> float:
        """0 before any evidence."""
        return self.draft_us + self.node_us * nodes

    def state(self) -> State:
        """Drafts observed, whether their time is known, the last time, and the sums of the fit."""
        sums = [self._weight, self._nodes, self._us, self._squares, self._products]
        return [self.observed, self.known, self._last, *sums]

    @classmethod
    def of_state(cls, state: State) -> "DraftTime":
        """Raises ValueError where the numbers are no state."""
        time = cls()
        observed, known, time._last, *sums = state
        time._weight, time._nodes, time._us, time._squares, time._products = sums
        _require(min(state) >= 0 and 0 < time._weight <= MAX_OBSERVED + 1e-6 and observed == int(observed))
        time.observed, time.known = int(observed), bool(known)
        time._fit()
        return time


class StartTime:
    """Microseconds of the first draft of a text beyond those of a later one: its prompt is read or indexed.

    All asks of the text share them, so they count in the first decision and in no later one.
    """

    __slots__ = ("_asked", "_started", "_time")

    def __init__(self) -> None:
        self._asked = self._started = 0.0
        self._time = DraftTime()

    def count(self, asked: int, started: int) -> None:
        """started: texts among those asked for that had no draft before."""
        self._asked = READ_DECAY * self._asked + asked
        self._started = READ_DECAY * self._started + started

    def learn(self, us: float, max_us: float) -> None:
        self._time.learn(0, max(us, 0.0), max_us)

    @property
    def us(self) -> float:
        return self._time.draft_us

    @property
    def us_per_ask(self) -> float:
        return self.us * (self._started + 1) / (self._asked + FIRST_ASKS)

    def state(self) -> State:
        """Asks, texts, and the state of their time; nothing before any evidence."""
        return [self._asked, self._started, *self._time.state()] if self._time.observed else []

    @classmethod
    def of_state(cls, state: State) -> "StartTime":
        """Raises ValueError where the numbers are no state."""
        start = cls()
        if state:
            start._asked, start._started = state[:2]
            _require(min(state[:2]) >= 0)
            start._time = DraftTime.of_state(state[2:])
        return start


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


class Slowdown:
    """Microseconds that a head adds to a pass of the target: for each ask before, each reading in it."""

    __slots__ = ("ask_us", "observed", "read_us")

    def __init__(self, ask_us: float = 0.0, read_us: float = 0.0, observed: float = 0.0) -> None:
        """observed: passes that differed from others in what the head did."""
        self.ask_us, self.read_us, self.observed = ask_us, read_us, observed

    def __call__(self, asked: float, read: float) -> float:
        return asked * self.ask_us + read * self.read_us

    def correct(self, asked: float, read: float, us: float) -> None:
        """One step of least mean squares. us: the error, over the squares of all that differs."""
        share = max(FIT_SHARE, 1 / (self.observed + FIRST_FITTED))
        self.observed += min(1.0, asked * asked + read * read)
        self.ask_us = max(0.0, self.ask_us + share * us * asked)
        self.read_us = max(0.0, self.read_us + share * us * read)

    def state(self) -> State:
        """Of an ask, of a reading, and the passes observed."""
        return [self.ask_us, self.read_us, self.observed]

    @classmethod
    def of_state(cls, state: State) -> "Slowdown":
        """Raises ValueError where the numbers are no state."""
        _require(len(state) == 3 and min(state) >= 0)
        return cls(*state)


Counts = Mapping[str, tuple[float, float]]  # asks before a pass and readings in it, by head
Shape = tuple[int, int]  # of a pass: sequences and rows


@dataclass(slots=True)
class _SameShape:
    """Running means of the passes of one shape."""

    passes: int = 0
    time: float = 0.0  # in priors
    counts: dict[str, tuple[float, float]] = field(default_factory=dict)


class SlowdownFit:
    """Tells by how much each head slows passes of the target down.

    It pushes the target's weights out of the caches, hidden states are copied, and Python has more to do.
    Least mean squares (Widrow and Hoff 1960) on how passes differ from the mean of those of the same shape,
    for only those can tell a slowdown from the price of a row.
    """

    def __init__(self, slowdowns: dict[str, Slowdown]) -> None:
        """slowdowns: by head; updated in place."""
        self._slowdowns = slowdowns
        self._means: dict[Shape, _SameShape] = {}  # the latest last

    def __call__(self, counts: Counts) -> float:
        """Microseconds that this adds to a pass."""
        found, us = self._slowdowns.get, 0.0
        for name, count in counts.items():
            if (slowdown := found(name)) is not None:
                us += slowdown(*count)
        return us

    def learn(self, shape: Shape, time: float, us: float, counts: Counts) -> None:
        """time, us: of the pass, in priors and in microseconds."""
        means = self._means.pop(shape, None) or _SameShape()
        if len(self._means) >= MAX_COMPARED:
            del self._means[next(iter(self._means))]
        self._means[shape] = means
        means.passes += 1
        share, known = max(MEAN_SHARE, 1 / means.passes), means.counts
        beyond, limit = time - means.time, MAX_SLOWDOWN * means.time
        means.time += share * beyond
        if not counts and not known:
            return
        unlike: dict[str, tuple[float, float]] = {}
        for name in known.keys() | counts.keys():
            (asked, read), (mean_asked, mean_read) = counts.get(name, _NO_COUNT), known.get(name, _NO_COUNT)
            asked, read = asked - mean_asked, read - mean_read
            unlike[name] = asked, read
            mean_asked, mean_read = mean_asked + share * asked, mean_read + share * read
            known[name] = mean_asked, mean_read
            if mean_asked + mean_read < MIN_COUNT:
                del known[name]
        if means.passes > 1:
            self._correct(min(max(beyond, -limit), limit) / time * us, unlike)

    def _correct(self, us: float, unlike: Counts) -> None:
        """us: beyond the mean of passes of the same shape. unlike: the same of their counts."""
        us -= self(unlike)
        us /= 1 + sum([asked * asked + read * read for asked, read in unlike.values()])
        for name, count in unlike.items():
            slowdown = self._slowdowns.get(name)
            if slowdown is None:
                slowdown = self._slowdowns[name] = Slowdown()
            slowdown.correct(*count, us)

    def forget(self, head: str) -> None:
        """What it did in earlier passes; its slowdown is the owner's to drop."""
        for means in self._means.values():
            means.counts.pop(head, None)


_NO_COUNT: Final = (0.0, 0.0)


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
    start_us: dict[str, StartTime] = field(default_factory=dict)  # of the first draft of a text, by drafter
    read_us: dict[str, DraftTime] = field(default_factory=dict)  # of one sequence's hidden states, by drafter
    slowdown: dict[str, Slowdown] = field(default_factory=dict)  # of passes, by head
    own_us: float = 0.0  # of the controller and of the list of drafters, for a sequence's first ask in a pass
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
        for by_drafter in (self.draft_us, self.start_us, self.read_us, self.slowdown):
            by_drafter.pop(drafter, None)
