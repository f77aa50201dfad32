"""Writes a trained network as a drafter's folder, measures it as stored, and calibrates its confidence."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F

from paceline.drafters.heads import drafter_of
from paceline.heads.calibration import Calibration, calibration_error, identity_calibration, logit
from paceline.heads.head_checkpoint import Card, Storage, load, save, save_card
from paceline.train.evaluate import (
    DraftOutcome,
    RecordedText,
    TextKindAt,
    acceptance,
    by_text_kind,
    replay,
)
from paceline.train.recipe import Recipe, pieces_of
from paceline.train.train_decoder import TrainDecoder

EVAL_DRAFT: Final = 5  # tokens in a draft, in figures by kind of text and in comparisons
ACCEPTED: Final = f"accepted of {EVAL_DRAFT}"  # share of the drafted tokens that are reached
REPLAY_BATCH: Final = 48  # texts
MIN_DRAFTS: Final = 50  # that reach a position of a draft, for its confidence to be calibrated
_PRIOR: Final = 1.0  # weight of the identity, in drafts


def publish(
    folder: Path,
    recipe: Recipe,
    model: TrainDecoder,
    target: str,
    texts: Sequence[RecordedText],
    data: Mapping[str, Any],
    weights: Storage = "int8",
    kind_at: TextKindAt | None = None,
    on_drafts: Callable[[Sequence[DraftOutcome]], None] = lambda _: None,
) -> Card:
    """texts: held out from training. data: what it was trained on, for the card. target: its name.

    kind_at: the kinds of text that the card tells apart. on_drafts: gets every draft that was measured.
    """
    card = Card(recipe.kind, recipe.net.shape, target, model.fingerprint, weights, data=dict(data))
    save(folder, card, recipe.net)
    net, block = load(folder, pieces_of(model)).net, card.shape.block
    drafts = replay(drafter_of(net), model, texts, block, batch=REPLAY_BATCH)
    on_drafts(drafts)
    if drafts:
        measured = acceptance(drafts, texts, block)
        accepted = acceptance(drafts, texts, min(EVAL_DRAFT, block)).accepted
        card = replace(
            card,
            acceptance=measured.by_position,
            tokens_per_pass=measured.tokens_per_pass,
            data={**card.data, ACCEPTED: accepted},
            counts=measured.counts,
        )
    if kind_at is not None:
        kinds = by_text_kind(drafts, texts, min(EVAL_DRAFT, block), kind_at)
        by_kind = {kind: asdict(figures) for kind, figures in kinds.items()}
        card = replace(card, data={**card.data, "by_kind_of_text": by_kind})
    if recipe.kind == "block":  # the only one with a confidence head
        fit = calibrate(drafts, block, recipe.calibration)
        error = {"calibration gap": [round(fit.before, 4), round(fit.after, 4)]} if drafts else {}
        card = replace(card, calibration=fit.calibration, data={**card.data, **error})
    save_card(folder, card)
    return card


@dataclass(frozen=True, slots=True)
class CalibrationFit:
    calibration: Calibration
    before: float  # expected calibration error
    after: float


def calibrate(
    drafts: Sequence[DraftOutcome], positions: int, before: Calibration | None = None
) -> CalibrationFit:
    """Fits Platt scaling of a head's confidence, one position at a time.

    drafts: with scores as the head gives them. before: stays at positions that too few drafts reach.

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
