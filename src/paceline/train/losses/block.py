"""Loss of block heads: cross-entropy weighted by prefix (D-PACE), total variation, and confidence."""

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
    """Compiles a function of tensors where they are on a GPU."""
    compiled: list[Callable[..., T]] = []

    @wraps(function)
    def call(*args: Tensor) -> T:
        if not args[0].is_cuda:
            return function(*args)
        if not compiled:
            compiled.append(torch.compile(function, dynamic=True))
        return compiled[0](*args)

    return call


@dataclass(frozen=True, slots=True)
class BlockLossWeights:
    anchors: int = 256  # in each text
    cross_entropy: float = 1.0  # with the target's likeliest token
    total_variation: float = 0.5  # distance of the two distributions
    confidence: float = 1.0
    smoothing: float = 0.5  # of the prefix weights; 1: all positions weigh as if reached
    decay: float = 4.0  # positions after which total variation and confidence weigh 1/e
    kl_share: float = 0.1  # of the training, at its start: KL divergence instead of total variation


@dataclass(frozen=True, slots=True)
class Anchors:
    """Positions to draft from, a in each text, and the drafted positions that count."""

    at: Tensor  # [b, a]
    real: Tensor  # [b, a, block] bool: all tokens up to the drafted one are the target's own


class BlockLoss:
    """head: the target's lm_head, [vocab, width]."""

    def __init__(self, net: BlockHead, head: Tensor, weights: BlockLossWeights | None = None) -> None:
        self.net, self.head, self.weights = net, head, weights or BlockLossWeights()

    def __call__(
        self, batch: TrainBatch, progress: float, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        count, block = self.weights.anchors, self.net.shape.block
        anchors = sample_anchors(batch.mask, count, block, generator, batch.starts)
        hidden, previous = (part[anchors.real] for part in run_blocks(self.net, batch, anchors.at))
        parts = self.net.logit_parts(hidden, previous)
        sure = self.net.confidence(hidden, previous)
        return self.weighted(batch, anchors, parts, sure, use_kl=progress < self.weights.kl_share)

    def weighted(
        self, batch: TrainBatch, anchors: Anchors, parts: tuple[Tensor, Tensor], sure: Tensor, use_kl: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """parts: their sum is the logits [r, draft_vocab] of the r positions that count. sure: [r]."""
        net, weights, real = self.net, self.weights, anchors.real
        best, p = self._targets(batch, anchors)
        index = net.draft_index[best]
        known = index < net.shape.draft_vocab
        cross, apart, divergence, right = token_losses(*parts, p, index.clamp(max=net.shape.draft_vocab - 1))
        prefix = prefix_weights(torch.where(known, (-cross).exp(), 0.0).detach(), real, weights.smoothing)
        positions = torch.arange(net.shape.block, device=real.device).expand_as(real)[real]
        early = torch.exp(-positions / weights.decay)
        agree = F.binary_cross_entropy_with_logits(sure, 1 - apart.detach().clamp(0, 1), reduction="none")
        loss = weights.cross_entropy * _mean(cross, prefix * known)
        loss = loss + weights.total_variation * _mean(divergence if use_kl else apart, early)
        loss = loss + weights.confidence * _mean(agree, early)
        all_right = torch.zeros_like(real)
        all_right[real] = right & known
        return loss, draft_metrics(all_right, real)

    def _targets(self, batch: TrainBatch, anchors: Anchors) -> tuple[Tensor, Tensor]:
        targets = soft_targets(batch, self.head, self.net.draft_ids)
        rows = _after(targets.index, anchors.at, self.net.shape.block, 0)[anchors.real]
        return targets.best[rows], targets.probs[rows]


@fused
def token_losses(
    base: Tensor, tie: Tensor, p: Tensor, index: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits base + tie [r, v] against distributions p [r, v] and target tokens index [r].

    Each [r]: cross-entropy, total variation (with the mass outside the draft vocabulary), KL divergence, and
    whether the likeliest token is the target.
    """
    logits = base.float() + tie.float()
    q = logits.log_softmax(-1)
    cross = -q.gather(-1, index[:, None]).squeeze(-1)
    apart = 0.5 * ((p - q.exp()).abs().sum(-1) + 1 - p.sum(-1))
    divergence = (torch.xlogy(p, p) - p * q).sum(-1)
    return cross, apart, divergence, logits.argmax(-1) == index


def run_blocks(net: BlockHead, batch: TrainBatch, at: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks from anchors `at` [b, a]: outputs [b, a, block, width], and the token before each."""
    positions = torch.arange(batch.tokens.shape[1], device=at.device).expand_as(batch.tokens)
    context = net.context(net.features(batch.hidden), positions)
    hidden = net.block(batch.tokens.gather(1, at), at, context, net.visible(at, positions))
    return hidden, _after(batch.tokens, at, net.shape.block, 0)


def draft_logits(net: BlockHead, batch: TrainBatch, at: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [b, a, block, draft_vocab] and confidences [b, a, block], teacher-forced."""
    hidden, previous = run_blocks(net, batch, at)
    return net.base_logits(hidden) + net.markov(previous), net.confidence(hidden, previous)


def sample_anchors(
    mask: Tensor, count: int, block: int, generator: torch.Generator, among: Tensor | None = None
) -> Anchors:
    """Random positions of the target's tokens that another of them follows; fewer where there are fewer.

    among [b, n]: positions that may be sampled; None: all.
    """
    nothing = mask.new_zeros(len(mask), 1)
    fit = mask & torch.cat((mask[:, 1:], nothing), 1)
    fit = fit if among is None else fit & among
    order = torch.rand(mask.shape, generator=generator).to(mask.device).masked_fill(~fit, -1.0)
    order, at = order.topk(min(count, mask.shape[1]), 1)
    padded = torch.cat((mask, nothing.expand(-1, block + 1)), 1)
    real = _after(padded, at, block, 1).cumprod(-1).bool() & (order >= 0)[:, :, None]
    return Anchors(at, real)


def prefix_weights(chance: Tensor, real: Tensor, smoothing: float) -> Tensor:
    """D-PACE: a position weighs as much as the accepted tokens that depend on it, its own and later ones.

    chance [r]: of the right token at each real position.
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
