"""Loss of Medusa heads (arXiv 2401.10774, Medusa-1: the target is frozen)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.heads.medusa import MedusaHead
from paceline.train.losses.base import TrainBatch, checkpointed, draft_metrics, shift_left, valid_starts


def medusa_loss(net: MedusaHead, batch: TrainBatch, decay: float = 0.8) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy with the tokens of the text; a head weighs `decay` times the one before it."""
    hidden = batch.hidden[net.shape.taps[-1]]
    total, outcomes = torch.zeros((), device=hidden.device), []
    real = valid_starts(batch)  # and all tokens up to the drafted one are the target's own
    for i in range(net.shape.block):
        real = real & shift_left(batch.mask, 2 + i)
        target_ids = net.draft_index[shift_left(batch.tokens, 2 + i)]
        counts = real & (target_ids < net.shape.draft_vocab)
        right = torch.zeros_like(real)
        if counts.any():
            loss, right[counts] = checkpointed(_head_loss, net, hidden[counts], i, target_ids[counts])
            total = total + decay**i * loss
        outcomes.append((right, real))
    right, real = (torch.stack(part, -1) for part in zip(*outcomes, strict=True))
    return total, draft_metrics(right, real)


def _head_loss(net: MedusaHead, hidden: Tensor, i: int, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of head i, and which of its predictions [r] are right."""
    logits = net.logits(hidden, i)
    return F.cross_entropy(logits, target_ids), logits.argmax(-1) == target_ids
