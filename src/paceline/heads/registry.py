"""The kinds of heads there are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from paceline.heads.base import DraftHead, TargetEmbeddings
from paceline.heads.block import BlockConfig, BlockHead
from paceline.heads.eagle import EagleConfig, EagleHead
from paceline.heads.medusa import MedusaConfig, MedusaHead


@dataclass(frozen=True, slots=True)
class HeadType:
    shape: type[Any]  # a Shape, which the network is made of
    net: Callable[[Any, TargetEmbeddings, Tensor], DraftHead]


HEAD_TYPES: Final = {
    "block": HeadType(BlockConfig, BlockHead),
    "eagle": HeadType(EagleConfig, EagleHead),
    "medusa": HeadType(MedusaConfig, MedusaHead),
}


class _Nothing:
    """A table that has no numbers. A tensor would do, but for what torch loads to index one without any."""

    device = torch.device("meta")

    def __init__(self, width: int) -> None:
        self._width = width

    def __len__(self) -> int:
        return 1

    def __getitem__(self, tokens: Tensor) -> Tensor:
        return torch.empty(*tokens.shape, self._width, device=self.device)


def parameter_shapes(kind: str, shape: Any) -> dict[str, tuple[int, ...]]:
    """What the network's own weights are called, and how large each is; none is made."""
    nothing, ids = _Nothing(shape.width), torch.zeros(shape.draft_vocab, dtype=torch.int64)
    with nothing.device:
        net = HEAD_TYPES[kind].net(
            shape, TargetEmbeddings(nothing, nothing, torch.empty(shape.width), ""), ids
        )
    return {name: tuple(weight.shape) for name, weight in net.state_dict().items()}
