"""Speed-up of speculative decoding from acceptance and cost curves (Leviathan et al., arXiv 2211.17192).

A draft of K tokens gives E(K) = (1 - a^(K+1)) / (1 - a) tokens per pass if each token is accepted with
probability a, given that all before it were. The paper takes the pass for K + 1 rows to cost as much as the
pass for one; here it has the cost that its rows have, and so has the draft.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any, Final

from paceline.config import require, require_between, require_min, require_positive, require_whole

Cost = Callable[[int], float]  # rows of a pass, or tokens of a draft, to milliseconds

MAX_LENGTH: Final = 16  # longest draft that is considered
BATCHES: Final = (1, 2, 4, 8, 16, 32, 64)
_MANY_ROWS: Final = 4096  # far beyond the crossover of any curve


@dataclass(frozen=True, slots=True)
class Roofline:
    """The pass of a model: bound by memory for few rows, by arithmetic for many (Williams et al., 2009)."""

    target_ms: float  # of one row
    row_ms: float = 0.0  # of each further row while the pass is bound by memory
    compute_ms: float = 0.0  # arithmetic of one row

    def __post_init__(self) -> None:
        require_positive(self, "target_ms")
        require_min(self, row_ms=0, compute_ms=0)

    def __call__(self, rows: int) -> float:
        return max(self.target_ms + self.row_ms * (rows - 1), self.compute_ms * rows)


@dataclass(frozen=True, slots=True)
class DraftCost:
    """The time of a draft: one part for each draft, one for each of its tokens."""

    draft_ms: float = 0.0  # of each drafted token
    draft_start_ms: float = 0.0  # of each draft

    def __post_init__(self) -> None:
        require_min(self, draft_ms=0, draft_start_ms=0)

    def __call__(self, length: int) -> float:
        return self.draft_start_ms + self.draft_ms * length if length else 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    """A round of `batch` sequences: one draft each, made together, then one pass over all of them."""

    target: Cost
    draft: Cost = field(default_factory=DraftCost)
    batch: int = 1

    def __post_init__(self) -> None:
        require_whole(self, "batch")
        require_between(self, 1, 4096, "batch")

    def verify_ms(self, length: int) -> float:
        return self.target(self.batch * (1 + length))

    def round_ms(self, length: int) -> float:
        return self.verify_ms(length) + self.draft(length)

    def speedup(self, tokens: float, length: int) -> float:
        """Against plain decoding of the same batch. tokens: expected of each sequence in a round."""
        return tokens * self.target(self.batch) / self.round_ms(length)


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
    """Rows at which the arithmetic of a pass takes as long as reading the weights does.

    With fewer, the pass is bound by memory and another row is cheap. None: no row costs anything.
    """
    row_ms = target(_MANY_ROWS) - target(_MANY_ROWS - 1)
    return target(1) / row_ms if row_ms > 1e-9 * target(1) else None


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


def estimate(acceptance: float, length: int, costs: Costs, max_length: int = MAX_LENGTH) -> Estimate:
    """The expected speed-up at one acceptance, by draft length and by batch."""
    require(lambda x: 0 <= x <= 1, "acceptance", acceptance, "0 to 1")
    require(lambda x: 1 <= x <= 64, "draft_length", length, "1 to 64")
    require(lambda x: 1 <= x <= 64, "max_draft", max_length, "1 to 64")
    tokens = tokens_by_length([acceptance] * max(length, max_length))
    lengths = tuple(_at(k, tokens, costs) for k in range(len(tokens)))
    return Estimate(
        acceptance,
        lengths[length],
        lengths[best_length(tokens, costs)],
        break_even(costs, length),
        crossover_rows(costs.target),
        _textbook(acceptance, length, costs),
        costs.batch,
        lengths,
        tuple(_at_batch(batch, tokens, costs) for batch in BATCHES),
    )


def _at(length: int, tokens: Sequence[float], costs: Costs) -> LengthEstimate:
    speedup = costs.speedup(tokens[length], length)
    return LengthEstimate(length, tokens[length], costs.draft(length), costs.verify_ms(length), speedup)


def _at_batch(batch: int, tokens: Sequence[float], costs: Costs) -> BatchEstimate:
    shared = Costs(costs.target, costs.draft, batch)
    length = best_length(tokens, shared)
    return BatchEstimate(batch, length, shared.speedup(tokens[length], length))


def _textbook(acceptance: float, length: int, costs: Costs) -> Textbook:
    """Verification costs as much as one row, every drafted token is accepted by itself."""
    pass_ms, accepted = costs.target(costs.batch), acceptance * length
    return Textbook(accepted, accepted * pass_ms / (pass_ms + costs.draft(length)))
