"""The kinds of draft heads: a config and a network for each name."""

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
    shape: type[Any]  # its HeadConfig
    net: Callable[[Any, TargetEmbeddings, Tensor], DraftHead]


HEAD_TYPES: Final = {
    "block": HeadType(BlockConfig, BlockHead),
    "eagle": HeadType(EagleConfig, EagleHead),
    "medusa": HeadType(MedusaConfig, MedusaHead),
}


class _MetaTable:
    """An embedding table without data. Indexing a meta tensor would do, but makes torch import much."""

    device = torch.device("meta")

    def __init__(self, width: int) -> None:
        self._width = width

    def __len__(self) -> int:
        return 1

    def __getitem__(self, tokens: Tensor) -> Tensor:
        return torch.empty(*tokens.shape, self._width, device=self.device)


def parameter_shapes(kind: str, shape: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the network's own weights; no weight is allocated."""
    table, ids = _MetaTable(shape.width), torch.zeros(shape.draft_vocab, dtype=torch.int64)
    with table.device:
        net = HEAD_TYPES[kind].net(shape, TargetEmbeddings(table, table, torch.empty(shape.width), ""), ids)
    return {name: tuple(weight.shape) for name, weight in net.state_dict().items()}
