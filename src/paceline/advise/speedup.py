"""Speed-up of speculative decoding from acceptance and cost curves (Leviathan et al., arXiv 2211.17192).

A draft of K tokens gives E(K) = (1 - a^(K+1)) / (1 - a) tokens per pass if each token is accepted with
probability a, given that all before it were. The paper takes the pass for K + 1 rows to cost as much as the
pass for one; here it has the cost that its rows have, and so has the draft.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from operator import mul
from typing import Any, Final

from paceline.config import require, require_between, require_whole

Cost = Callable[[int, int], float]  # rows of a pass, and sequences that share it evenly, to milliseconds
DraftTime = Callable[[int, int], float]  # tokens of each draft, and sequences that have one, to milliseconds

MAX_LENGTH: Final = 16  # longest draft that is considered
LONGEST: Final = 64  # that can be
MIN_MS, MAX_MS = 1e-6, 1e9  # of a pass: no figure overflows between them
BATCHES: Final = (1, 2, 4, 8, 16, 32, 64)
_MANY_ROWS: Final = 4096  # far beyond the crossover of any curve


@dataclass(frozen=True, slots=True)
class Roofline:
    """The pass of a model: bound by memory for few rows, by arithmetic for many (Williams et al., 2009)."""

    target_ms: float  # of one row
    row_ms: float = 0.0  # of each further row while the pass is bound by memory
    compute_ms: float = 0.0  # arithmetic of one row

    def __post_init__(self) -> None:
        require_between(self, MIN_MS, MAX_MS, "target_ms")
        require_between(self, 0, MAX_MS, "row_ms", "compute_ms")

    def __call__(self, rows: int, sequences: int = 1) -> float:
        return max(self.target_ms + self.row_ms * (rows - 1), self.compute_ms * rows)

    @property
    def crossover_rows(self) -> float | None:
        """Rows from which on a pass is bound by arithmetic; None: it never is."""
        if self.compute_ms <= self.row_ms:
            return None
        return max(1.0, (self.target_ms - self.row_ms) / (self.compute_ms - self.row_ms))


@dataclass(frozen=True, slots=True)
class DraftCost:
    """The time of drafts that are made together: one part for each round, one for each token of a draft."""

    draft_ms: float = 0.0  # of each drafted token
    draft_start_ms: float = 0.0  # of each draft
    draft_row_ms: float = 0.0  # of each drafted token of each further sequence
    # Measured drafts of one sequence, instead of the first two: tokens, and milliseconds.
    curve: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        require_between(self, 0, MAX_MS, "draft_ms", "draft_start_ms", "draft_row_ms")
        require(
            _is_curve,
            "draft_ms",
            self.curve,
            f"two or more lengths that rise, 1 to {LONGEST}, with 0 to {MAX_MS:g} ms",
        )

    def __call__(self, length: int, batch: int = 1) -> float:
        if not length:
            return 0.0
        alone = self._on_curve(length) if self.curve else self.draft_start_ms + self.draft_ms * length
        return alone + self.draft_row_ms * length * (batch - 1)

    def _on_curve(self, length: int) -> float:
        """Linear between the points, as the first below it, beyond the last by the last two if these rise."""
        points = self.curve
        if length <= points[0][0]:
            return points[0][1]
        i = next((i for i, (at, _) in enumerate(points) if at >= length), len(points) - 1)
        (x0, y0), (x1, y1) = points[i - 1], points[i]
        if length > x1 and y1 < y0:
            return y1
        return y0 + (y1 - y0) * (length - x0) / (x1 - x0)


def _is_curve(points: Sequence[tuple[int, float]]) -> bool:
    lengths = [length for length, _ in points]
    return (
        len(lengths) != 1
        and lengths == sorted(set(lengths))
        and all(1 <= length <= LONGEST for length in lengths)
        and all(0 <= ms <= MAX_MS for _, ms in points)
    )


@dataclass(frozen=True, slots=True)
class Costs:
    """A round of `batch` sequences: one draft each, made together, then one pass over all of them."""

    target: Cost
    draft: DraftTime = field(default_factory=DraftCost)
    batch: int = 1

    def __post_init__(self) -> None:
        require_whole(self, "batch")
        require_between(self, 1, 4096, "batch")

    def verify_ms(self, length: int) -> float:
        return self.target(self.batch * (1 + length), self.batch)

    def draft_ms(self, length: int) -> float:
        return self.draft(length, self.batch)

    def round_ms(self, length: int) -> float:
        return self.verify_ms(length) + self.draft_ms(length)

    def speedup(self, tokens: float, length: int) -> float:
        """Against plain decoding of the same batch. tokens: expected of each sequence in a round."""
        return tokens * self.verify_ms(0) / self.round_ms(length)


def expected_tokens(acceptance: float, length: int) -> float:
    """E(K): the accepted tokens of a draft, and the token that the target adds."""
    return tokens_by_length([acceptance] * length)[-1]


def tokens_by_length(acceptance: Sequence[float]) -> list[float]:
    """E(0), E(1), ... where position i is accepted with probability acceptance[i], if all before it were."""
    survival = accumulate(acceptance, mul, initial=1.0)
    return list(accumulate(survival))


def best_length(tokens: Sequence[float], costs: Costs) -> int:
    """The length with the highest rate, of all of them: a measured cost curve may have steps."""
    return max(range(len(tokens)), key=lambda length: costs.speedup(tokens[length], length))


def break_even(costs: Costs, length: int) -> float | None:
    """The acceptance at which drafts of this length gain nothing; None: no acceptance is enough."""
    if costs.speedup(1.0 + length, length) < 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):  # bisection
        middle = (low + high) / 2
        pays = costs.speedup(expected_tokens(middle, length), length) >= 1
        low, high = (low, middle) if pays else (middle, high)
    return high


def crossover_rows(target: Cost) -> float | None:
    """Rows from which on a pass is bound by arithmetic; with fewer it is by memory, and a row is cheap.

    Of a measured curve: at which its rows, at the price of one of many, take as long as a pass of one row,
    which reads the weights. None: it never is.
    """
    if isinstance(target, Roofline):
        return target.crossover_rows
    one, row_ms = target(1, 1), target(_MANY_ROWS, 1) - target(_MANY_ROWS - 1, 1)
    return max(1.0, one / row_ms) if row_ms > 1e-9 * one else None


@dataclass(frozen=True, slots=True)
class LengthEstimate:
    """Drafts of one length."""

    draft_length: int
    tokens_per_pass: float
    draft_ms: float
    verify_ms: float
    speedup: float


@dataclass(frozen=True, slots=True)
class BatchEstimate:
    """The best length for a number of sequences in a pass; 0: plain decoding."""

    batch: int
    draft_length: int
    speedup: float
    chosen_speedup: float  # of the length that was asked for


@dataclass(frozen=True, slots=True)
class Textbook:
    """The common rule of thumb: a x K accepted tokens for the price of one pass and K drafted tokens."""

    accepted: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Estimate:
    acceptance: float
    chosen: LengthEstimate
    best: LengthEstimate
    break_even_acceptance: float | None
    crossover_rows: float | None
    crossover_batch: float | None  # sequences whose drafts of the chosen length have these rows
    textbook: Textbook
    batch: int
    lengths: tuple[LengthEstimate, ...]
    batches: tuple[BatchEstimate, ...]

    @property
    def accepted(self) -> float:
        """Drafted tokens, in a pass."""
        return self.chosen.tokens_per_pass - 1

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "accepted": self.accepted}


def estimate(acceptance: float, length: int, costs: Costs, max_length: int | None = None) -> Estimate:
    """The expected speed-up at one acceptance, by draft length and by batch.

    max_length: the longest draft that is considered; None: MAX_LENGTH, or `length` where that is longer.
    """
    longest = require_lengths(acceptance, length, max_length)
    tokens, crossover = tokens_by_length([acceptance] * longest), crossover_rows(costs.target)
    lengths = tuple(_at(k, tokens, costs) for k in range(len(tokens)))
    return Estimate(
        acceptance,
        lengths[length],
        lengths[best_length(tokens, costs)],
        break_even(costs, length),
        crossover,
        None if crossover is None else crossover / (1 + length),
        _textbook(acceptance, length, costs),
        costs.batch,
        lengths,
        tuple(_at_batch(batch, length, tokens, costs) for batch in sorted({*BATCHES, costs.batch})),
    )


def require_lengths(acceptance: float, length: int, max_length: int | None = None) -> int:
    """Refuses what `estimate` cannot use. Returns the longest draft that is considered."""
    require(lambda x: 0 <= x <= 1, "acceptance", acceptance, "0 to 1")
    require(lambda x: 1 <= x <= LONGEST, "draft_length", length, f"1 to {LONGEST}")
    longest = max(length, MAX_LENGTH) if max_length is None else max_length
    require(
        lambda x: length <= x <= LONGEST, "max_draft", longest, f"{length} (the draft length) to {LONGEST}"
    )
    return longest


def _at(length: int, tokens: Sequence[float], costs: Costs) -> LengthEstimate:
    speedup = costs.speedup(tokens[length], length)
    return LengthEstimate(length, tokens[length], costs.draft_ms(length), costs.verify_ms(length), speedup)


def _at_batch(batch: int, chosen: int, tokens: Sequence[float], costs: Costs) -> BatchEstimate:
    shared = replace(costs, batch=batch)
    best = best_length(tokens, shared)
    speedups = [shared.speedup(tokens[length], length) for length in (best, chosen)]
    return BatchEstimate(batch, best, *speedups)


def _textbook(acceptance: float, length: int, costs: Costs) -> Textbook:
    """Verification costs as much as one row, every drafted token is accepted by itself."""
    pass_ms, accepted = costs.verify_ms(0), acceptance * length
    return Textbook(accepted, accepted * pass_ms / (pass_ms + costs.draft_ms(length)))
