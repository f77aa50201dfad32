"""How often a guess really is right that a head is so sure of."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log


@dataclass(frozen=True, slots=True)
class Calibration:
    """For each place of a block, the chance is sigmoid(scale * logit + shift)."""

    scale: tuple[float, ...]
    shift: tuple[float, ...]

    def chance(self, place: int, logit: float) -> float:
        return self.chances(place, [logit])[0]

    def chances(self, first: int, logits: Sequence[float]) -> list[float]:
        """Of the places from `first` on."""
        places = zip(self.scale[first:], self.shift[first:], logits, strict=False)
        return [1 / (1 + exp(min(-scale * logit - shift, 700))) for scale, shift, logit in places]


def identity_calibration(places: int) -> Calibration:
    return Calibration((1.0,) * places, (0.0,) * places)


def logit(chance: float) -> float:
    chance = min(max(chance, 1e-9), 1 - 1e-9)
    return log(chance / (1 - chance))


def calibration_error(chances: Sequence[float], right: Sequence[bool], bins: int = 10) -> float:
    """The mean distance between what was said and what came true (expected calibration error)."""
    sums = [[0.0, 0.0] for _ in range(bins)]
    for chance, came in zip(chances, right, strict=True):
        into = sums[min(int(chance * bins), bins - 1)]
        into[0] += chance
        into[1] += came
    return sum(abs(said - came) for said, came in sums) / max(1, len(chances))
