"""The time of a pass on this machine, from passes that were run while outputs were written.

The cost curve has the fastest passes of one sequence, without the choice of tokens. What passes really take
of it is a factor for each row count. A machine changes its speed within minutes, by as much as drafts gain.
So every output has passes of one row right after it, and only ratios to these are compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from paceline.target.cost import PassCost, batch_ms
from paceline.trace.record import RoundRecord

MIN_PASSES: Final = 5  # of one kind, before their times count
_TYPICAL_CONTEXT: Final = 512  # tokens, at which curves are compared


@dataclass(frozen=True, slots=True)
class TimedPass:
    """One of a single output that only decodes, after its first token."""

    rows: int
    context: int
    ms: float


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Milliseconds of a pass by the sequences in it."""

    cost: PassCost  # of one sequence
    prompt_row_ms: float = 0.0  # that a row of a prompt adds; 0: as the curve goes on
    beside_ms: float = 0.0  # in every pass, outside of the target: what a replay has no part of

    def __call__(self, sequences: Sequence[tuple[int, int]], prompt_rows: int = 0) -> float:
        """sequences: rows and context of each that decodes."""
        kinds = [(rows, context, 1) for rows, context in sequences]
        return batch_ms(self.cost, kinds) + prompt_rows * self.prompt_row_ms + self.beside_ms

    def row_ms(self, context: int) -> float:
        """That a row of a prompt adds."""
        return self.prompt_row_ms or (self.cost(16, context) - self.cost(8, context)) / 8


def decoding_passes(rounds: Sequence[RoundRecord]) -> list[TimedPass]:
    """Of one output alone; the first of its rounds that commits has its first token."""
    return [
        TimedPass(r.rows, r.start, r.target_us / 1000)
        for r in [r for r in rounds if r.committed][1:]
        if r.batch == 1 and r.target_us and r.rows == 1 + r.drafted
    ]


def corrected(cost: PassCost, outputs: Sequence[Sequence[TimedPass]]) -> PassCost:
    """The cost curve times what passes took of it: the median for each row count, lines in between.

    Each output counts relative to its own passes of one row, where it has enough of them. More rows take no
    less time, whatever a noisy moment gave.
    """
    shares: dict[int, list[float]] = {}
    speeds = [_speed(cost, passes) for passes in outputs]
    usual = median([speed for speed in speeds if speed is not None] or [1.0])
    for passes, speed in zip(outputs, speeds, strict=True):
        for one in passes:
            share = one.ms / cost(one.rows, one.context)
            shares.setdefault(one.rows, []).append(share if speed is None else share * usual / speed)
    known = sorted(rows for rows, some in shares.items() if len(some) >= MIN_PASSES)
    if not known:
        return cost
    at = _TYPICAL_CONTEXT
    times = np.maximum.accumulate([cost(n, at) * median(shares[n]) for n in known])
    rising = [float(ms) / cost(n, at) for n, ms in zip(known, times, strict=True)]
    return lambda rows, context: cost(rows, context) * float(np.interp(rows, known, rising))


def _speed(cost: PassCost, passes: Sequence[TimedPass]) -> float | None:
    """What passes of one row take of the curve; None: there are too few."""
    shares = [one.ms / cost(1, one.context) for one in passes if one.rows == 1]
    return median(shares) if len(shares) >= MIN_PASSES else None
