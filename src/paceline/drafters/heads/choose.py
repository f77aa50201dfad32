"""Which drafter serves a trained network."""

from paceline.drafters.heads.block import BlockDrafter
from paceline.drafters.heads.eagle import EagleDrafter
from paceline.drafters.heads.head_cache import MOST
from paceline.drafters.heads.medusa import MedusaDrafter
from paceline.errors import UnknownArchitecture
from paceline.heads.base import DraftHead
from paceline.heads.block import BlockHead
from paceline.heads.calibration import Calibration
from paceline.heads.eagle import EagleHead
from paceline.heads.medusa import MedusaHead
from paceline.heads.runner import TorchBlock
from paceline.types import Drafter


def drafter_of(net: DraftHead, calibration: Calibration | None = None, remembered: int = MOST) -> Drafter:
    """calibration: of the confidences of a network that has any. remembered: positions: see Kept."""
    if isinstance(net, BlockHead):
        return BlockDrafter(TorchBlock(net), calibration, remembered)
    if isinstance(net, EagleHead):
        return EagleDrafter(net, remembered)
    if isinstance(net, MedusaHead):
        return MedusaDrafter(net)
    raise UnknownArchitecture(f"no drafter serves a {type(net).__name__}; known: block, eagle, medusa")
