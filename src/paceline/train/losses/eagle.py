"""How an eagle net learns from texts of its target: as it is used, fed with its own output."""

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
    """Cross-entropy with the target's law over `steps` guesses; each weighs `decay` times the one before.

    head: the target's whole one, [vocab, width]. anchors: most places of each text that are guessed from.
    """
    p, known = _wanted(net, batch, head)
    # real: whether all up to the guessed token are the target's own words
    at, real = sample_positions(valid_starts(batch) & shift_left(batch.mask, 2), anchors, generator)
    total, places = p.new_zeros(()), []
    for j, hidden in enumerate(unrolled(net, batch, at, steps)):
        real = real & shift_left(batch.mask, 2 + j).gather(1, at)
        law = shift_left(known, 1 + j).gather(1, at)  # past the end nothing is real
        counts = real & (law >= 0)
        right = torch.zeros_like(real)
        if counts.any():
            loss, right[counts] = checkpointed(_taught, net, hidden[counts], p, law[counts])
            total = total + decay**j * loss
        places.append((right, real))
    right, real = (torch.stack(part, -1) for part in zip(*places, strict=True))
    return total, draft_metrics(right, real)


def unrolled(net: EagleHead, batch: TrainBatch, at: Tensor, steps: int) -> list[Tensor]:
    """The net's output from places `at` [b, a] of the texts, [b, a, width] for each step.

    From a place, step j reads the token j + 1 after it and guesses the next. Rows of the text are those of
    step 0 at every place, and each chain sees its own later steps besides.
    """
    everywhere = torch.arange(batch.tokens.shape[1], device=at.device).expand_as(batch.tokens)
    fused = net.fused(batch.hidden)
    text = checkpointed(net.rows, shift_left(batch.tokens, 1), fused, everywhere).keys_values
    sees, chain = net.sees(at, everywhere), text.new_zeros(*at.shape, 0, *text.shape[2:])
    out = [fused.gather(1, at[:, :, None].expand(-1, -1, fused.shape[-1]))]
    for j in range(steps):
        tokens = shift_left(batch.tokens, 1 + j).gather(1, at)
        hidden, chain = checkpointed(_step, net, tokens, out[-1], at + j, text, sees, chain, j > 0)
        out.append(hidden)
    return out[1:]


def _step(
    net: EagleHead,
    tokens: Tensor,
    hidden: Tensor,
    positions: Tensor,
    text: Tensor,
    sees: Tensor,
    chain: Tensor,
    beyond: bool,
) -> tuple[Tensor, Tensor]:
    """The net's output, and the chain with these rows in it where they are beyond the text."""
    rows = net.rows(tokens, hidden, positions)
    if beyond:
        chain = torch.cat((chain, rows.keys_values[:, :, None]), 2)
    return net(rows, text, sees, chain), chain


def _taught(net: EagleHead, hidden: Tensor, laws: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of guesses [r, width] against these of the laws, and which of them [r] are right."""
    law, said = laws[which], net.logits(hidden)
    return F.cross_entropy(said, law), said.argmax(-1) == law.argmax(-1)


def _wanted(net: EagleHead, batch: TrainBatch, head: Tensor) -> tuple[Tensor, Tensor]:
    """Laws [r, draft_vocab] of what follows some tokens, and which of them [b, n] is whose; -1: none.

    Only of those whose likeliest token can be guessed; what cannot is left out of the law.
    """
    wanted = soft_targets(batch, head, net.draft_ids)
    fits = net.number[wanted.best] < net.shape.draft_vocab
    number = torch.full_like(batch.tokens, -1)
    number[wanted.which >= 0] = torch.where(fits, fits.cumsum(0) - 1, -1)
    law = wanted.law[fits]
    return law / law.sum(-1, keepdim=True), number
