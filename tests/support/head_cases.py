"""Small heads of every kind for the tiny target, and lessons for them."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from paceline.heads.base import DraftHead
from paceline.heads.eagle import EagleConfig, EagleHead
from paceline.heads.medusa import MedusaConfig, MedusaHead
from paceline.train.losses.base import TrainBatch
from paceline.train.recipe import pieces_of
from support.tiny_heads import own, said, tiny_model
from support.torch_cases import VOCAB

N = TypeVar("N", bound=DraftHead)
MODEL = tiny_model()
WIDTH = MODEL.shape.width


def a_lesson(taps: tuple[int, ...], count: int = 4) -> TrainBatch:
    tokens = said()[:count]
    hidden, final = MODEL.features(tokens, taps)
    return TrainBatch(tokens, own(tokens), hidden, final)


def every_place(batch: TrainBatch) -> Tensor:
    return torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)


def largest_kept(loss: Callable[[], Tensor]) -> int:
    """How many numbers the largest tensor has that is kept for the gradients."""
    sizes = [0]

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss()
    return max(sizes)


def some_ids(count: int) -> Tensor:
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:count].sort().values


def medusa_net(draft_vocab: int = VOCAB, block: int = 3) -> MedusaHead:
    shape = MedusaConfig(WIDTH, VOCAB, draft_vocab, (4,), block, norm_eps=MODEL.shape.norm_eps)
    return _reset(MedusaHead(shape, pieces_of(MODEL), some_ids(draft_vocab)))


def eagle_net(draft_vocab: int = VOCAB, block: int = 4, window: int = 1024, seed: int = 0) -> EagleHead:
    shape = EagleConfig(WIDTH, 4, 2, 16, 64, VOCAB, draft_vocab, (0, 2, 4), block, window)
    return _reset(EagleHead(shape, pieces_of(MODEL), some_ids(draft_vocab)), seed)


def _reset(net: N, seed: int = 0) -> N:
    net.init_weights(pieces_of(MODEL), torch.Generator().manual_seed(seed))
    return net
