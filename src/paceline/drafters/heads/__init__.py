"""Drafters that serve trained heads: small networks that read the target's hidden states.

tree_growth.py  chains and trees out of the distributions a head gives for the next positions
head_cache.py   HeadCache: the head's KV cache, which outlives its sequence
medusa.py       MedusaDrafter: one head per position (arXiv 2401.10774)
eagle.py        EagleDrafter: one autoregressive layer (arXiv 2401.15077, EAGLE-3 arXiv 2503.01840)
block.py        BlockDrafter: a whole block in one pass (DFlash, DSpark)
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from paceline.drafters.heads.block import BlockDrafter
from paceline.drafters.heads.eagle import EagleDrafter
from paceline.drafters.heads.head_cache import DEFAULT_POSITIONS
from paceline.drafters.heads.medusa import MedusaDrafter
from paceline.errors import UnknownArchitecture
from paceline.heads.base import DraftHead
from paceline.heads.block import BlockHead
from paceline.heads.calibration import Calibration
from paceline.heads.eagle import EagleHead
from paceline.heads.medusa import MedusaHead
from paceline.heads.runner import TorchBlock
from paceline.types import Drafter

__all__ = ["BlockDrafter", "EagleDrafter", "MedusaDrafter", "drafter_of"]

_Make = Callable[[Any, Calibration | None, int], Drafter]  # head, calibration, cached positions

_DRAFTERS: Final[Mapping[type[DraftHead], _Make]] = {
    BlockHead: lambda head, calibration, positions: BlockDrafter(TorchBlock(head), calibration, positions),
    EagleHead: lambda head, _, positions: EagleDrafter(head, positions),
    MedusaHead: lambda head, *_: MedusaDrafter(head),
}


def drafter_of(
    head: DraftHead, calibration: Calibration | None = None, cached_positions: int = DEFAULT_POSITIONS
) -> Drafter:
    """The drafter that serves a head.

    calibration: of the confidences, if the head has any. cached_positions: of ended sequences, see HeadCache.
    """
    make = next((_DRAFTERS[kind] for kind in type(head).__mro__ if kind in _DRAFTERS), None)
    if make is None:
        raise UnknownArchitecture(f"no drafter serves a {type(head).__name__}; known: block, eagle, medusa")
    return make(head, calibration, cached_positions)
