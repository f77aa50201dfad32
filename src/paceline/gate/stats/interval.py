"""An interval of plausible values."""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Interval:
    """Infinite where the data do not bound a side."""

    lower: float = -inf
    upper: float = inf

    def clipped(self, lower: float, upper: float) -> "Interval":
        return Interval(min(max(self.lower, lower), upper), max(min(self.upper, upper), lower))
