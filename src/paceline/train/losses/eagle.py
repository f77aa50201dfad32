"""Loss of EAGLE-3 heads (arXiv 2503.01840): training-time test, in which the head reads its own output."""

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.heads.eagle import EagleHead
from paceline.train.losses.base import (
    TrainBatch,
    checkpointed,
    draft_metrics,
    sample_positions,
    shift_left,
    soft_targets,
    valid_starts,
)


def eagle_loss(
    net: EagleHead,
    batch: TrainBatch,
    head: Tensor,
    generator: torch.Generator,
    steps: int = 4,
    anchors: int = 128,
    decay: float = 0.8,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy with the target's distribution over `steps` tokens; each weighs `decay` times the last.

    head: the target's lm_head, [vocab, width]. anchors: positions of each text to draft from, at most.
    """
    p, known = _targets(net, batch, head)
    # real: all tokens up to the drafted one are the target's own
    at, real = sample_positions(valid_starts(batch) & shift_left(batch.mask, 2), anchors, generator)
    total, outcomes = p.new_zeros(()), []
    for j, hidden in enumerate(unrolled(net, batch, at, steps)):
        real = real & shift_left(batch.mask, 2 + j).gather(1, at)
        probs = shift_left(known, 1 + j).gather(1, at)  # past the end nothing is real
        counts = real & (probs >= 0)
        right = torch.zeros_like(real)
        if counts.any():
            loss, right[counts] = checkpointed(_step_loss, net, hidden[counts], p, probs[counts])
            total = total + decay**j * loss
        outcomes.append((right, real))
    right, real = (torch.stack(part, -1) for part in zip(*outcomes, strict=True))
    return total, draft_metrics(right, real)


def unrolled(net: EagleHead, batch: TrainBatch, at: Tensor, steps: int) -> list[Tensor]:
    """The head's output from positions `at` [b, a] of the texts, [b, a, width] for each step.

    Step j reads the token j + 1 after a position and predicts the next. Rows of the text are those of step 0
    at every position; a chain also attends to its own later steps.
    """
    everywhere = torch.arange(batch.tokens.shape[1], device=at.device).expand_as(batch.tokens)
    fused = net.fuse_taps(batch.hidden)
    text = checkpointed(net.rows, shift_left(batch.tokens, 1), fused, everywhere).keys_values
    visible, chain = net.visible(at, everywhere), text.new_zeros(*at.shape, 0, *text.shape[2:])
    out = [fused.gather(1, at[:, :, None].expand(-1, -1, fused.shape[-1]))]
    for j in range(steps):
        tokens = shift_left(batch.tokens, 1 + j).gather(1, at)
        hidden, chain = checkpointed(_step, net, tokens, out[-1], at + j, text, visible, chain, j > 0)
        out.append(hidden)
    return out[1:]


def _step(
    net: EagleHead,
    tokens: Tensor,
    hidden: Tensor,
    positions: Tensor,
    text: Tensor,
    visible: Tensor,
    chain: Tensor,
    beyond: bool,
) -> tuple[Tensor, Tensor]:
    """The head's output, and the chain, extended by these rows if they are beyond the text."""
    rows = net.rows(tokens, hidden, positions)
    if beyond:
        chain = torch.cat((chain, rows.keys_values[:, :, None]), 2)
    return net(rows, text, visible, chain), chain


def _step_loss(net: EagleHead, hidden: Tensor, probs: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of rows [r, width] against the distributions with these indices, and which [r] are right."""
    probs, logits = probs[index], net.logits(hidden)
    return F.cross_entropy(logits, probs), logits.argmax(-1) == probs.argmax(-1)


def _targets(net: EagleHead, batch: TrainBatch, head: Tensor) -> tuple[Tensor, Tensor]:
    """Distributions [r, draft_vocab] and their index [b, n]; -1: none.

    Only where the likeliest token is in the draft vocabulary, over which each is normalised.
    """
    targets = soft_targets(batch, head, net.draft_ids)
    fits = net.draft_index[targets.best] < net.shape.draft_vocab
    number = torch.full_like(batch.tokens, -1)
    number[targets.index >= 0] = torch.where(fits, fits.cumsum(0) - 1, -1)
    probs = targets.probs[fits]
    return probs / probs.sum(-1, keepdim=True), number
