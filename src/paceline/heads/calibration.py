"""How often a guess really is right that a head is so sure of."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Calibration:
    """For each place of a block, the chance is sigmoid(scale * logit + shift)."""

    scale: tuple[float, ...]
    shift: tuple[float, ...]

    def chance(self, place: int, logit: float) -> float:
        x = self.scale[place] * logit + self.shift[place]
        return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def as_it_is(places: int) -> Calibration:
    return Calibration((1.0,) * places, (0.0,) * places)


def logit(chance: float) -> float:
    chance = min(max(chance, 1e-9), 1 - 1e-9)
    return math.log(chance / (1 - chance))


def gap(chances: Sequence[float], right: Sequence[bool], bins: int = 10) -> float:
    """The mean distance between what was said and what came true (expected calibration error)."""
    sums = [[0.0, 0.0] for _ in range(bins)]
    for chance, came in zip(chances, right, strict=True):
        into = sums[min(int(chance * bins), bins - 1)]
        into[0] += chance
        into[1] += came
    return sum(abs(said - came) for said, came in sums) / max(1, len(chances))
