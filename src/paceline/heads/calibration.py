"""Platt scaling of a head's confidence, per draft position, and the statistics of acceptance rates."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Final

_Z95: Final = 1.959964  # quantile of the normal distribution, two-sided 95 %


@dataclass(frozen=True, slots=True)
class Calibration:
    """The chance of acceptance at each position of a block: sigmoid(scale * logit + shift)."""

    scale: tuple[float, ...]
    shift: tuple[float, ...]

    def chance(self, position: int, logit: float) -> float:
        return self.chances(position, [logit])[0]

    def chances(self, first: int, logits: Sequence[float]) -> list[float]:
        """For the positions from `first` on."""
        positions = zip(self.scale[first:], self.shift[first:], logits, strict=False)
        return [1 / (1 + exp(min(-scale * logit - shift, 700))) for scale, shift, logit in positions]


def identity_calibration(positions: int) -> Calibration:
    return Calibration((1.0,) * positions, (0.0,) * positions)


def logit(chance: float) -> float:
    chance = min(max(chance, 1e-9), 1 - 1e-9)
    return log(chance / (1 - chance))


def calibration_error(chances: Sequence[float], accepted: Sequence[bool], bins: int = 10) -> float:
    """Expected calibration error: the mean distance between predicted and observed shares, over bins."""
    sums = [[0.0, 0.0] for _ in range(bins)]
    for chance, outcome in zip(chances, accepted, strict=True):
        into = sums[min(int(chance * bins), bins - 1)]
        into[0] += chance
        into[1] += outcome
    return sum(abs(predicted - observed) for predicted, observed in sums) / max(1, len(chances))


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """95 % confidence interval of a binomial proportion (Wilson score).

    Positions of one text depend on one another, so the true uncertainty is larger.
    """
    if n < 1:
        return 0.0, 1.0
    z2 = _Z95**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 * sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, middle - half), min(1.0, middle + half)
