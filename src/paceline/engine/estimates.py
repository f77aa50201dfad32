"""Running estimates: the time of a pass; acceptance, calibration, time and gain of each list of drafters.

All of them forget exponentially, so that they follow the text and the machine. A request starts with what
earlier requests with the same list of drafters have taught.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from paceline.types import ROOT, DrafterEstimates, Round

DEFAULT_SLOPE: Final = 0.04  # of one more row, in passes of one row, where nothing was measured
MAX_AGE: Final = 128  # passes after which the correction of a row count is dropped
CONTEXT_STEP: Final = 32  # tokens of context in which the time of a pass counts as constant
MAX_PRIORS: Final = 4096  # remembered
MAX_POSITION: Final = 16  # acceptance is learned by position in the draft, up to here
PRIOR: Final = (1.4, 2.0)  # accepted and verified nodes, before any evidence
DECAY: Final = 0.97  # weight of old evidence at each new observation
GAIN_DECAY: Final = 0.9  # the same for recent gains, in rounds
TIME_DECAY: Final = 0.93  # the same for the times of drafters and passes, in passes
MAX_CALIBRATION: Final = 1.2  # drafters that claim too little are corrected by at most this factor
# Variance of draft lengths, in nodes squared, below which they count as equal.
MIN_LENGTH_SPREAD: Final = 0.25
MAX_OUTLIER: Final = 3  # a time counts at most as this many times what was expected

Prior = Callable[[int, int], float]  # rows and context to the cost of a pass, in any unit


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

    def learn(self, rows: int, us: float, context: int = 0) -> None:
        expected = self._expected(rows, context)
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
            found = self._priors[key] = self._prior(rows, key[1] * CONTEXT_STEP)
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
    """P(position i is accepted | all before it were), for one list of drafters."""

    def __init__(self) -> None:
        self._cells = [PRIOR] * MAX_POSITION  # accepted, verified

    def learn(self, drafted: int, accepted: int) -> None:
        for i in range(min(drafted, accepted + 1, MAX_POSITION)):  # later positions were not verified
            hits, verified = self._cells[i]
            self._cells[i] = (DECAY * hits + (i < accepted), DECAY * verified + 1)

    def expected(self, max_length: int) -> list[float]:
        """Expected tokens of a round with a draft of 0, 1, ... max_length nodes."""
        tokens, survive, out = 1.0, 1.0, [1.0]
        for i in range(max_length):
            hits, verified = self._cells[min(i, MAX_POSITION - 1)]
            survive *= hits / verified
            tokens += survive
            out.append(tokens)
        return out


class ScoreCalibration:
    """Accepted nodes over the sum of their scores, for each drafter."""

    def __init__(self) -> None:
        self._accepted: defaultdict[str, float] = defaultdict(lambda: PRIOR[1])
        self._claimed: defaultdict[str, float] = defaultdict(lambda: PRIOR[1])

    def __call__(self, drafter: str) -> float:
        return min(self._accepted[drafter] / self._claimed[drafter], MAX_CALIBRATION)

    def learn(self, r: Round) -> None:
        """Verified are the nodes that follow the last committed token or an accepted node."""
        accepted = {ROOT, *r.path}
        for node, score in enumerate(r.draft.scores):
            parent = r.draft.parent(node)
            if parent not in accepted or (r.finish and parent == (r.path[-1] if r.path else ROOT)):
                continue
            source = r.draft.sources[node]
            if score < 1:
                self._accepted[source] = DECAY * self._accepted[source] + (node in accepted)
                self._claimed[source] = DECAY * self._claimed[source] + score

    def forget(self, drafter: str) -> None:
        self._accepted.pop(drafter, None)
        self._claimed.pop(drafter, None)


class DraftTime:
    """Microseconds of a draft by its nodes: a least-squares line, one part per draft and one per node.

    Only drafts of different lengths can tell the two apart; until then all of it counts as per node.
    """

    def __init__(self) -> None:
        self._weight = self._nodes = self._us = self._squares = self._products = 0.0
        self._line: tuple[float, float] | None = None  # of no nodes, of each node

    def learn(self, nodes: int, us: float, target_us: int) -> None:
        us = min(us, MAX_OUTLIER * max(self(nodes), target_us))
        self._weight = DECAY * self._weight + 1
        self._nodes = DECAY * self._nodes + nodes
        self._us = DECAY * self._us + us
        self._squares = DECAY * self._squares + nodes * nodes
        self._products = DECAY * self._products + nodes * us
        self._line = None

    def __call__(self, nodes: int) -> float:
        if not self._weight or not nodes:
            return 0.0
        if self._line is None:
            self._line = self._fitted()
        return self._line[0] + self._line[1] * nodes

    def _fitted(self) -> tuple[float, float]:
        mean, us = self._nodes / self._weight, self._us / self._weight
        spread = self._squares / self._weight - mean**2
        covariance = self._products / self._weight - mean * us
        share = us / mean
        slope = min(max((covariance + MIN_LENGTH_SPREAD * share) / (spread + MIN_LENGTH_SPREAD), 0.0), share)
        return us - slope * mean, slope


class RecentGain:
    """Moving averages of tokens and time of rounds with a draft, also if all of it was cut."""

    def __init__(self) -> None:
        self.rounds, self._tokens, self._nodes, self._us = 0, 0.0, 0.0, 0.0

    def learn(self, r: Round, draft_us: float) -> None:
        self.rounds += 1
        weight = max(1 - GAIN_DECAY, 1 / self.rounds)
        self._tokens += weight * (len(r.tokens) - self._tokens)
        self._nodes += weight * (len(r.draft) - self._nodes)
        self._us += weight * (min(draft_us, MAX_OUTLIER * max(self._us, r.target_us)) - self._us)

    def rate(self, cost: CostCurve, rows: int, context: int) -> float:
        """Tokens per microsecond."""
        return self._tokens / (cost(rows + round(self._nodes), context) + self._us)


class DraftCost:
    """Moving averages of the time each drafter takes for a draft, against that of a pass."""

    def __init__(self) -> None:
        self._us: dict[str, float] = {}
        self._pass_us = 0.0

    def learn(self, r: Round, decoding: bool = True) -> None:
        """One round of a pass tells of all of it. decoding: no prompt is in it, so its time counts too."""
        if decoding:
            self._pass_us = _moved(self._pass_us or None, r.target_us)
        for name, us in r.draft_us_by.items():
            self._us[name] = _moved(self._us.get(name), us)

    def __call__(self, drafter: str) -> float | None:
        """In passes of the target; None: unknown."""
        return self._us[drafter] / self._pass_us if drafter in self._us and self._pass_us else None


def _moved(average: float | None, value: float) -> float:
    return value if average is None else TIME_DECAY * average + (1 - TIME_DECAY) * value


@dataclass(slots=True)
class ListEstimates(DrafterEstimates):
    """Everything that is known about one list of drafters."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    scores: ScoreCalibration = field(default_factory=ScoreCalibration)
    draft_us: DraftTime = field(default_factory=DraftTime)
    gain: RecentGain = field(default_factory=RecentGain)
    costs: DraftCost = field(default_factory=DraftCost)
    scored: bool = False  # the last draft had scores
    plain_rounds: int = 0

    def calibration(self, drafter: str) -> float:
        return self.scores(drafter)

    def cost(self, drafter: str) -> float | None:
        return self.costs(drafter)

    def without(self, drafter: str) -> "ListEstimates":
        """For a list with another drafter of this name; only the calibration of the others stays."""
        self.scores.forget(drafter)
        return ListEstimates(scores=self.scores)
