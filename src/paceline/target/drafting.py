"""What runs a trained drafter beside a target, and why."""

import logging

from paceline.heads.block import BlockConfig
from paceline.heads.head_checkpoint import Stored
from paceline.target.native.block_head import NativeBlock, reason_against
from paceline.target.native.target import NativeTarget
from paceline.types import Target

log = logging.getLogger("paceline")


def native_block(head: Stored, target: Target) -> NativeBlock | None:
    """On the threads of a native target, for a head that fills blocks; None where torch is to run it."""
    shape = head.card.shape
    if not isinstance(target, NativeTarget) or not isinstance(shape, BlockConfig):
        return None
    against = reason_against(shape, target.shape)
    if against:
        log.warning("the block drafter runs on torch, which is slower here: %s", against)
        return None
    return NativeBlock(shape, head.draft_ids, head.weights, target.lent, target.team)
