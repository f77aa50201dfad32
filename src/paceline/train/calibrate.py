"""Makes a head's confidence the chance that its guess is right, place by place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from paceline.heads.calibration import Calibration, calibration_error, identity_calibration, logit
from paceline.train.evaluate import Guess

_FEW: Final = 50  # guesses that say too little about a place
_HOLD: Final = 1.0  # weight of staying as it is, in guesses


@dataclass(frozen=True, slots=True)
class Fit:
    calibration: Calibration
    before: float  # mean distance of confidence and outcome
    after: float


def calibrate(guesses: Sequence[Guess], places: int, before: Calibration | None = None) -> Fit:
    """guesses: of a drafter whose confidences are as the head gives them. before: kept where they are few.

    A place counts where all guesses before it were right, as it does in a pass. A shift beside the scale: the
    head learns how far two laws overlap, and how often the target agrees is another matter.
    """
    before = before or identity_calibration(places)
    scale, shift = list(before.scale), list(before.shift)
    said: list[float] = []
    mended: list[float] = []
    came: list[bool] = []
    for place in range(places):
        reached = [g for g in guesses if g.counted > place and g.right >= place and len(g.scores) > place]
        logits = [logit(g.scores[place]) for g in reached]
        right = [g.right > place for g in reached]
        if len(reached) >= _FEW:
            scale[place], shift[place] = _fit(logits, right)
        now = Calibration(tuple(scale), tuple(shift))
        said += [g.scores[place] for g in reached]
        mended += [now.chance(place, x) for x in logits]
        came += right
    return Fit(
        Calibration(tuple(scale), tuple(shift)),
        calibration_error(said, came),
        calibration_error(mended, came),
    )


def _fit(logits: Sequence[float], right: Sequence[bool]) -> tuple[float, float]:
    x = torch.tensor(logits, dtype=torch.float64).clamp(-20, 20)
    y = torch.tensor(right, dtype=torch.float64)
    line = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([line], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        solver.zero_grad()
        stay = _HOLD * ((line[0] - 1) ** 2 + line[1] ** 2)
        value = F.binary_cross_entropy_with_logits(line[0] * x + line[1], y, reduction="sum") + stay
        value.backward()  # type: ignore[no-untyped-call]
        return value

    solver.step(loss)  # type: ignore[no-untyped-call]
    return float(line[0].detach()), float(line[1].detach())
