"""How an eagle net learns from texts of its target: as it is used, fed with its own output."""

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.heads.eagle import EagleNet
from paceline.heads.teach import Lesson, ahead, begins, figures, wishes


def eagle_loss(
    net: EagleNet, lesson: Lesson, head: Tensor, steps: int = 4, decay: float = 0.8
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy with the target's law over `steps` guesses; each weighs `decay` times the one before.

    head: the target's whole one, [vocab, width].
    """
    p, known = _wanted(net, lesson, head)
    total, places = p.new_zeros(()), []
    real = begins(lesson)  # and whether all up to the guessed token are the target's own words
    for j, hidden in enumerate(unrolled(net, lesson, steps)):
        real = real & ahead(lesson.mask, 2 + j)
        counts = real & ahead(known >= 0, 1 + j)
        right = torch.zeros_like(real)
        if counts.any():
            law = p[ahead(known, 1 + j)[counts]]
            said = net.logits(hidden[counts])
            total = total + decay**j * F.cross_entropy(said, law)
            right[counts] = said.argmax(-1) == law.argmax(-1)
        places.append((right, real))
    right, real = (torch.stack(part, -1) for part in zip(*places, strict=True))
    return total, figures(right, real)


def unrolled(net: EagleNet, lesson: Lesson, steps: int) -> list[Tensor]:
    """The net's output at every place, [b, n, width] for each step.

    From every place, step j reads the token j + 1 after it and guesses the next. Rows of the text are those
    of step 0, and each place sees its own later steps besides.
    """
    at = torch.arange(lesson.tokens.shape[1], device=lesson.tokens.device).expand_as(lesson.tokens)
    rows = net.rows(ahead(lesson.tokens, 1), net.fused(lesson.hidden), at)
    text, sees = rows.keys_values, net.sees(at, at)
    chain = text[:, :, None][:, :, :0]
    out = [net(rows, text, sees, chain)]
    for j in range(1, steps):
        rows = net.rows(ahead(lesson.tokens, 1 + j), out[-1], at + j)
        chain = torch.cat((chain, rows.keys_values[:, :, None]), 2)
        out.append(net(rows, text, sees, chain))
    return out


def _wanted(net: EagleNet, lesson: Lesson, head: Tensor) -> tuple[Tensor, Tensor]:
    """Laws [r, draft_vocab] of what follows some tokens, and which of them [b, n] is whose; -1: none.

    Only of those whose likeliest token can be guessed; what cannot is left out of the law.
    """
    wanted = wishes(lesson, head, net.draft_ids)
    fits = net.number[wanted.best] < net.shape.draft_vocab
    number = torch.full_like(lesson.tokens, -1)
    number[wanted.which >= 0] = torch.where(fits, fits.cumsum(0) - 1, -1)
    law = wanted.law[fits]
    return law / law.sum(-1, keepdim=True), number
