"""Loss of Medusa heads (2401.10774)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.heads.medusa import MedusaHead
from paceline.train.losses.base import TrainBatch, checkpointed, draft_metrics, shift_left, valid_starts


def medusa_loss(net: MedusaHead, batch: TrainBatch, decay: float = 0.8) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy with what was said; a head weighs `decay` times the one before it."""
    hidden = batch.hidden[net.shape.taps[-1]]
    total, places = torch.zeros((), device=hidden.device), []
    real = valid_starts(batch)  # and whether all up to the guessed token are the target's own words
    for i in range(net.shape.block):
        real = real & shift_left(batch.mask, 2 + i)
        wanted = net.number[shift_left(batch.tokens, 2 + i)]
        counts = real & (wanted < net.shape.draft_vocab)
        right = torch.zeros_like(real)
        if counts.any():
            loss, right[counts] = checkpointed(_taught, net, hidden[counts], i, wanted[counts])
            total = total + decay**i * loss
        places.append((right, real))
    right, real = (torch.stack(part, -1) for part in zip(*places, strict=True))
    return total, draft_metrics(right, real)


def _taught(net: MedusaHead, hidden: Tensor, i: int, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of head i, and which of its guesses [r] are right."""
    said = net.logits(hidden, i)
    return F.cross_entropy(said, wanted), said.argmax(-1) == wanted
