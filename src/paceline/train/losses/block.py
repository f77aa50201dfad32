"""How a block network learns from texts of its target."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.heads.block import BlockHead
from paceline.train.losses.base import TrainBatch, draft_metrics, soft_targets

T = TypeVar("T")


def fused(function: Callable[..., T]) -> Callable[..., T]:
    """Few kernels instead of one for each operation; elsewhere the function as it is."""
    quick: list[Callable[..., T]] = []

    @wraps(function)
    def call(*given: Tensor) -> T:
        if not given[0].is_cuda:
            return function(*given)
        if not quick:
            quick.append(torch.compile(function, dynamic=True))
        return quick[0](*given)

    return call


@dataclass(frozen=True, slots=True)
class BlockLossWeights:
    anchors: int = 256  # in each text
    choice: float = 1.0  # cross-entropy with what the target would choose
    overlap: float = 0.5  # distance between the two laws
    confidence: float = 1.0
    smoothing: float = 0.5  # of the chances that weigh the places of the choice; 1: all weigh as if reached
    decay: float = 4.0  # places after which overlap and confidence weigh 1/e
    gentle: float = 0.1  # share of training in which the laws' distance is their KL divergence


@dataclass(frozen=True, slots=True)
class Anchors:
    """Places to guess from, a of each text, and which of the tokens after them count."""

    at: Tensor  # [b, a]
    real: Tensor  # [b, a, block]: every place up to the guessed one is of the target's own words


class BlockLoss:
    """head: the target's whole one, [vocab, width]."""

    def __init__(self, net: BlockHead, head: Tensor, weights: BlockLossWeights | None = None) -> None:
        self.net, self.head, self.weights = net, head, weights or BlockLossWeights()

    def __call__(
        self, batch: TrainBatch, progress: float, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        most, block = self.weights.anchors, self.net.shape.block
        anchors = pick_anchors(batch.mask, most, block, generator, batch.places)
        hidden, previous = (part[anchors.real] for part in run_blocks(self.net, batch, anchors.at))
        parts = self.net.logit_parts(hidden, previous)
        sure = self.net.confidence(hidden, previous)
        return self.measured(batch, anchors, parts, sure, gentle=progress < self.weights.gentle)

    def measured(
        self, batch: TrainBatch, anchors: Anchors, parts: tuple[Tensor, Tensor], sure: Tensor, gentle: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Of the r places that count: `parts`, whose sum are the logits [r, draft_vocab], and `sure` [r]."""
        net, weights, real = self.net, self.weights, anchors.real
        best, p = self._wanted(batch, anchors)
        wanted = net.number[best]
        known = wanted < net.shape.draft_vocab
        cross, apart, divergence, right = compared(*parts, p, wanted.clamp(max=net.shape.draft_vocab - 1))
        worth = choice_weights(torch.where(known, (-cross).exp(), 0.0).detach(), real, weights.smoothing)
        places = torch.arange(net.shape.block, device=real.device).expand_as(real)[real]
        early = torch.exp(-places / weights.decay)
        agree = F.binary_cross_entropy_with_logits(sure, 1 - apart.detach().clamp(0, 1), reduction="none")
        loss = weights.choice * _mean(cross, worth * known)
        loss = loss + weights.overlap * _mean(divergence if gentle else apart, early)
        loss = loss + weights.confidence * _mean(agree, early)
        all_right = torch.zeros_like(real)
        all_right[real] = right & known
        return loss, draft_metrics(all_right, real)

    def _wanted(self, batch: TrainBatch, anchors: Anchors) -> tuple[Tensor, Tensor]:
        wanted = soft_targets(batch, self.head, self.net.draft_ids)
        places = _after(wanted.which, anchors.at, self.net.shape.block, 0)[anchors.real]
        return wanted.best[places], wanted.law[places]


@fused
def compared(base: Tensor, tie: Tensor, p: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Guesses with logits base + tie [r, v] against laws p [r, v] and the tokens wanted [r].

    Gives, each [r]: the cross-entropy, the distance of the laws (what cannot be guessed is apart too), their
    KL divergence, and whether the likeliest guess is the one wanted.
    """
    logits = base.float() + tie.float()
    q = logits.log_softmax(-1)
    cross = -q.gather(-1, wanted[:, None]).squeeze(-1)
    apart = 0.5 * ((p - q.exp()).abs().sum(-1) + 1 - p.sum(-1))
    divergence = (torch.xlogy(p, p) - p * q).sum(-1)
    return cross, apart, divergence, logits.argmax(-1) == wanted


def run_blocks(net: BlockHead, batch: TrainBatch, at: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks from anchors `at` [b, a]: the net's output [b, a, block, width], and the tokens before each."""
    positions = torch.arange(batch.tokens.shape[1], device=at.device).expand_as(batch.tokens)
    context = net.context(net.features(batch.hidden), positions)
    hidden = net.block(batch.tokens.gather(1, at), at, context, net.sees(at, positions))
    return hidden, _after(batch.tokens, at, net.shape.block, 0)


def draft_logits(net: BlockHead, batch: TrainBatch, at: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [b, a, block, draft_vocab] and confidences [b, a, block], each after the true token."""
    hidden, previous = run_blocks(net, batch, at)
    return net.base_logits(hidden) + net.markov(previous), net.confidence(hidden, previous)


def pick_anchors(
    mask: Tensor, most: int, block: int, generator: torch.Generator, among: Tensor | None = None
) -> Anchors:
    """Random places of the target's own words that another of them follows; fewer where there are fewer.

    among [b, n]: the places that may be picked; None: all.
    """
    nothing = mask.new_zeros(len(mask), 1)
    fit = mask & torch.cat((mask[:, 1:], nothing), 1)
    fit = fit if among is None else fit & among
    order = torch.rand(mask.shape, generator=generator).to(mask.device).masked_fill(~fit, -1.0)
    sample_positions, at = order.topk(min(most, mask.shape[1]), 1)
    padded = torch.cat((mask, nothing.expand(-1, block + 1)), 1)
    real = _after(padded, at, block, 1).cumprod(-1).bool() & (sample_positions >= 0)[:, :, None]
    return Anchors(at, real)


def choice_weights(chance: Tensor, real: Tensor, smoothing: float) -> Tensor:
    """What each place adds to the accepted tokens, its own and those it opens the way to (D-PACE).

    chance [r]: of the right guess at each real place.
    """
    full = torch.zeros(real.shape, device=chance.device)
    full[real] = (1 - smoothing) * chance + smoothing
    reached = full.cumprod(-1) * real
    return reached.flip(-1).cumsum(-1).flip(-1)[real]


def _after(rows: Tensor, at: Tensor, block: int, shift: int) -> Tensor:
    """[b, n, ...] -> [b, a, block, ...]: the rows from at + shift on; past the end, the last."""
    index = at[:, :, None] + torch.arange(shift, shift + block, device=at.device)
    index = index.clamp(max=rows.shape[1] - 1)
    of = torch.arange(len(rows), device=at.device)[:, None, None]
    return rows[of, index]


def _mean(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sum() / weight.sum().clamp(min=1e-6)
