"""The kinds of heads there are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from paceline.heads.block import BlockNet, BlockShape
from paceline.heads.eagle import EagleNet, EagleShape
from paceline.heads.medusa import MedusaNet, MedusaShape
from paceline.heads.net import Net, Pieces


@dataclass(frozen=True, slots=True)
class Kind:
    shape: type[Any]  # a Shape, which the network is made of
    net: Callable[[Any, Pieces, Tensor], Net]


KINDS: Final = {
    "block": Kind(BlockShape, BlockNet),
    "eagle": Kind(EagleShape, EagleNet),
    "medusa": Kind(MedusaShape, MedusaNet),
}
