"""Fits Platt scaling of a head's confidence to replayed drafts, one position at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from paceline.heads.calibration import Calibration, calibration_error, identity_calibration, logit
from paceline.train.evaluate import DraftOutcome

MIN_DRAFTS: Final = 50  # that reach a position, for it to be fitted
_PRIOR: Final = 1.0  # weight of the identity, in drafts


@dataclass(frozen=True, slots=True)
class CalibrationFit:
    calibration: Calibration
    before: float  # expected calibration error
    after: float


def calibrate(
    drafts: Sequence[DraftOutcome], positions: int, before: Calibration | None = None
) -> CalibrationFit:
    """drafts: with scores as the head gives them. before: stays at positions that too few drafts reach.

    A position counts where all tokens before it were right, as in a pass. There is a shift beside the
    scale: the head learns the overlap of two distributions, which is not how often the target agrees.
    """
    before = before or identity_calibration(positions)
    scale, shift = list(before.scale), list(before.shift)
    raw: list[float] = []
    fitted: list[float] = []
    accepted: list[bool] = []
    for position in range(positions):
        reached = [
            d for d in drafts if d.counted > position and d.right >= position and len(d.scores) > position
        ]
        logits = [logit(d.scores[position]) for d in reached]
        right = [d.right > position for d in reached]
        if len(reached) >= MIN_DRAFTS:
            scale[position], shift[position] = _fit(logits, right)
        now = Calibration(tuple(scale), tuple(shift))
        raw += [d.scores[position] for d in reached]
        fitted += [now.chance(position, x) for x in logits]
        accepted += right
    errors = calibration_error(raw, accepted), calibration_error(fitted, accepted)
    return CalibrationFit(Calibration(tuple(scale), tuple(shift)), *errors)


def _fit(logits: Sequence[float], right: Sequence[bool]) -> tuple[float, float]:
    """Scale and shift of a logistic regression, pulled towards the identity."""
    x = torch.tensor(logits, dtype=torch.float64).clamp(-20, 20)
    y = torch.tensor(right, dtype=torch.float64)
    line = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([line], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        solver.zero_grad()
        prior = _PRIOR * ((line[0] - 1) ** 2 + line[1] ** 2)
        value = F.binary_cross_entropy_with_logits(line[0] * x + line[1], y, reduction="sum") + prior
        value.backward()  # type: ignore[no-untyped-call]
        return value

    solver.step(loss)  # type: ignore[no-untyped-call]
    return float(line[0].detach()), float(line[1].detach())
