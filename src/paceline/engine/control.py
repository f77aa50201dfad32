"""How far to guess: as far as makes the expected rate of tokens largest, and not at all if nothing pays."""

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

from paceline.config import SpecConfig
from paceline.types import Round, Seq

MAX_POSITION: Final = 16  # acceptance is learned by place in the draft, up to here
PRIOR: Final = (1.4, 2.0)  # accepted and tried, before anything is known
FORGET: Final = 0.97  # weight of old evidence at each new one
MARGIN: Final = 1.03  # a draft must promise this much over plain decoding
PROBE_EVERY: Final = 32  # plain rounds before one is spent on finding out whether drafting pays again
PROBE: Final = 2
SLOPE: Final = 0.04  # a row's cost against a pass of one, until measured


class Fixed:
    """Always as far as the request allows."""

    def plan(self, seqs: Sequence[Seq], rows: int) -> list[int]:
        return [seq.spec.max_draft for seq in seqs]

    def learn(self, rounds: Sequence[Round]) -> None:
        return


class CostCurve:
    """Microseconds of a target pass by its rows, as measured while decoding.

    The machine's speed drifts for all row counts together, so it is kept apart from the curve's shape.
    """

    def __init__(self) -> None:
        self._speed = 1.0
        self._shape: dict[int, float] = {}
        self._known: list[int] = []  # the row counts of the shape, ascending

    def learn(self, rows: int, us: float) -> None:
        if not self._shape:
            self._speed = us
        if rows not in self._shape:
            self._shape[rows] = us / self._speed
            insort(self._known, rows)
            return
        drift = us / (self._speed * self._shape[rows])
        drift = min(max(drift, 1 / 3), 3.0)  # one hiccup of the machine must not count for much
        self._speed *= drift**0.3
        self._shape[rows] *= drift**0.1

    def __call__(self, rows: int) -> float:
        return self._speed * self._relative(rows)

    def _relative(self, rows: int) -> float:
        """Linear between what was measured, a small slope beyond."""
        known = self._known
        if not known:
            return 1 + SLOPE * rows
        at = bisect_left(known, rows)
        if at == len(known):
            return self._shape[known[-1]] * (1 + SLOPE * (rows - known[-1]))
        if known[at] == rows or at == 0:
            return self._shape[known[at]] / (1 + SLOPE * (known[at] - rows))
        low, high = known[at - 1], known[at]
        share = (rows - low) / (high - low)
        return self._shape[low] + share * (self._shape[high] - self._shape[low])


class Acceptance:
    """P(position i is accepted | all before it were), for one list of drafters."""

    def __init__(self) -> None:
        self._cells = [PRIOR] * MAX_POSITION

    def learn(self, drafted: int, accepted: int) -> None:
        for i in range(min(drafted, accepted + 1, MAX_POSITION)):  # nothing is known of later positions
            hit, tried = self._cells[i]
            self._cells[i] = (FORGET * hit + (i < accepted), FORGET * tried + 1)

    def expected(self, k: int) -> list[float]:
        """Tokens of a round with a draft of 0, 1, ... k."""
        tokens, survive, out = 1.0, 1.0, [1.0]
        for i in range(k):
            hit, tried = self._cells[min(i, MAX_POSITION - 1)]
            survive *= hit / tried
            tokens += survive
            out.append(tokens)
        return out


class Rate:
    """Picks the draft length with the most expected tokens per measured time, 0 included.

    What is learned is kept by list of drafters: a new request starts with what earlier ones taught.
    """

    def __init__(self) -> None:
        self.cost = CostCurve()
        self._acceptance: defaultdict[tuple[str, ...], Acceptance] = defaultdict(Acceptance)
        self._draft_us: dict[tuple[str, ...], float] = {}  # per node
        self._plain_rounds: Counter[tuple[str, ...]] = Counter()

    def plan(self, seqs: Sequence[Seq], rows: int) -> list[int]:
        return [self._budget(seq.spec, rows) if seq.spec.adaptive else seq.spec.max_draft for seq in seqs]

    def _budget(self, spec: SpecConfig, rows: int) -> int:
        tokens = self._acceptance[spec.drafters].expected(spec.max_draft)
        per_node = self._draft_us.get(spec.drafters, 0.0)
        rates = [t / (self.cost(rows + k) + per_node * k) for k, t in enumerate(tokens)]
        best = max(range(len(rates)), key=rates.__getitem__)
        if best and rates[best] >= MARGIN * rates[0]:
            return best
        self._plain_rounds[spec.drafters] += 1
        due = self._plain_rounds[spec.drafters] % PROBE_EVERY == 0
        return min(PROBE, spec.max_draft) if due else 0

    def learn(self, rounds: Sequence[Round]) -> None:
        nodes = sum(len(r.draft) for r in rounds)
        for r in rounds:
            if len(r.draft):
                self._learn_acceptance(r)
                self._learn_draft_time(r.drafters, r.draft_us / nodes)
        if rounds and rounds[0].rows == len(rounds) + nodes:  # nothing but decoding
            self.cost.learn(rounds[0].rows, rounds[0].target_us)

    def _learn_acceptance(self, r: Round) -> None:
        depth = max(len(path) for path in r.draft.paths())
        judged = len(r.path) if r.finish else depth  # what lies beyond an end was not refused
        self._acceptance[r.drafters].learn(judged, len(r.path))

    def _learn_draft_time(self, drafters: tuple[str, ...], per_node: float) -> None:
        """A first draft may include reading the prompt, so a much lower figure replaces a higher at once."""
        old = self._draft_us.get(drafters, per_node)
        new = old + 0.1 * (min(per_node, 3 * old) - old)
        self._draft_us[drafters] = per_node if per_node < old / 2 else new
