"""The time of a pass on this machine, from passes that were run while outputs were written.

The cost curve has the fastest passes of one sequence, without the choice of tokens. What passes really take
of it is a factor for each row count. A machine changes its speed within minutes, by as much as drafts gain.
So every output has passes of one row right after it, and only ratios to these are compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from paceline.trace.record import RoundRecord

PassCost = Callable[[int, int], float]  # rows and context to the milliseconds of a pass

MIN_PASSES: Final = 5  # of one kind, before their times count
_TYPICAL_CONTEXT: Final = 512  # tokens, at which curves are compared


@dataclass(frozen=True, slots=True)
class TimedPass:
    """One that only decodes, after the first token of every sequence in it."""

    rows: int
    context: int  # tokens of the longest sequence
    ms: float
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Milliseconds of a pass by what is in it."""

    cost: PassCost  # of one sequence
    prompt_row_ms: float = 0.0  # that a row of a prompt adds; 0: as the curve goes on
    # What several sequences take beyond a single one with as many rows, in passes of one row: each has keys
    # and values of its own to read, and a token to be chosen for.
    beside: Sequence[tuple[int, float]] = ()  # sequences, ascending, and the share

    def __call__(self, rows: int, sequences: int, prompt_rows: int, context: int) -> float:
        """rows: of the sequences that decode. The curve may cross where it is extrapolated."""
        if not self.prompt_row_ms:
            rows, prompt_rows = rows + prompt_rows, 0
        least = max(1, sequences)
        ms = max(self.cost(max(rows, least), context), self.cost(least, context))
        return ms + self._beside_ms(sequences, context) + prompt_rows * self.prompt_row_ms

    def row_ms(self, context: int) -> float:
        """That a row of a prompt adds."""
        return self.prompt_row_ms or (self.cost(16, context) - self.cost(8, context)) / 8

    def _beside_ms(self, sequences: int, context: int) -> float:
        """Lines between the measured numbers of sequences, and beyond them by the mean of one."""
        if sequences < 2 or not self.beside:
            return 0.0
        most, share = self.beside[-1]
        if sequences > most:
            return self.cost(1, context) * share * (sequences - 1) / (most - 1)
        known = [(1, 0.0), *self.beside]
        share = float(np.interp(sequences, [n for n, _ in known], [s for _, s in known]))
        return self.cost(1, context) * share


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
    shares = [one.ms / cost(1, one.context) for one in passes if one.rows == one.sequences == 1]
    return median(shares) if len(shares) >= MIN_PASSES else None


def beside(
    cost: PassCost, alone: Sequence[TimedPass], together: Sequence[TimedPass]
) -> list[tuple[int, float]]:
    """See PassTimes. alone: passes of one row, right beside `together`. cost: corrected."""
    speed = _speed(cost, alone)
    if speed is None:
        return []
    shares: dict[int, list[float]] = {}
    for one in together:
        extra = one.ms / speed - cost(one.rows, one.context)
        shares.setdefault(one.sequences, []).append(max(0.0, extra / cost(1, one.context)))
    return [(n, median(some)) for n, some in sorted(shares.items()) if n > 1 and len(some) >= MIN_PASSES]
