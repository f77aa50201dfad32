"""What all heads have in common: the pieces they borrow from their target, and how they are made."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Table(Protocol):
    """A row for each token of the target: a tensor [vocab, width], or what gives the rows of one."""

    @property
    def device(self) -> torch.device: ...
    def __len__(self) -> int: ...
    def __getitem__(self, tokens: Tensor, /) -> Tensor: ...  # [...] -> [..., width]


@dataclass(frozen=True)
class TargetEmbeddings:
    """What a head borrows from its target and never changes."""

    embed: Table
    head: Table  # may be the same memory
    norm: Tensor  # [width], the target's last
    fingerprint: str  # of the target
    embed_scale: float = 1.0


@dataclass(frozen=True)
class DenseTargetEmbeddings(TargetEmbeddings):
    """The same, whole: what new weights are made with."""

    embed: Tensor  # [vocab, width]
    head: Tensor  # [vocab, width]


class HeadConfig(Protocol):
    """A frozen dataclass of whole numbers, numbers, and the list of taps."""

    @property
    def taps(self) -> tuple[int, ...]: ...  # the target's layers that are read
    @property
    def draft_vocab(self) -> int: ...
    @property
    def block(self) -> int: ...  # most guesses in one draft


class DraftHead(nn.Module):
    """A head. Its parameters are its own weights; what is the target's is held beside them, not stored."""

    draft_ids: Tensor  # [draft_vocab]: the tokens it can guess, ascending
    number: Tensor  # [vocab]: a token's place among them, draft_vocab for one that is not
    vocab_parameters: ClassVar[
        tuple[str, ...]
    ] = ()  # how parameters are called that have a row for each of them

    @property
    @abstractmethod
    def shape(self) -> HeadConfig: ...

    def attach_target(self, pieces: TargetEmbeddings, draft_ids: Tensor, **others: Tensor) -> None:
        """Holds the ids it can guess, each token's place among them, and what else is the target's."""
        device, ids = pieces.embed.device, draft_ids.cpu()
        number = torch.full((len(pieces.embed),), len(ids), device="cpu")
        number[ids] = torch.arange(len(ids), device="cpu")
        for name, tensor in {"draft_ids": ids, "number": number, **others}.items():
            self.register_buffer(name, tensor, persistent=False)
        self.to(device)

    @abstractmethod
    def init_weights(self, pieces: DenseTargetEmbeddings, generator: torch.Generator) -> None:
        """New weights."""


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 whatever the types of row and weight are."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self._eps).to(x.dtype)


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """[...] -> cosines and signed sines, each [..., head_dim]."""
    dims = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions[..., None].float() * theta ** (-dims / head_dim)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def apply_rotary(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turn
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)
