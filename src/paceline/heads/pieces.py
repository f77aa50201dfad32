"""What a head borrows from its target and never changes."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pieces:
    embed: Tensor  # [vocab, width]
    head: Tensor  # [vocab, width]; may be the same memory
    norm: Tensor  # [width], the target's last
    fingerprint: str  # of the target
    embed_scale: float = 1.0
