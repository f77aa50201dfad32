"""What runs a trained drafter beside a target, and why."""

import logging

from paceline.heads.block import BlockNet
from paceline.heads.block_runner import BlockRunner, TorchBlock
from paceline.target.native.native_block import NativeBlock, reason_against
from paceline.target.native.native_target import NativeTarget
from paceline.types import Target

log = logging.getLogger("paceline")


def block_runner(net: BlockNet, target: Target) -> BlockRunner:
    """Native where the target is, on its threads; else torch."""
    if not isinstance(target, NativeTarget):
        return TorchBlock(net)
    against = reason_against(net)
    if against:
        log.warning("the block drafter runs on torch, which is slower here: %s", against)
        return TorchBlock(net)
    return NativeBlock(net, target.team)
