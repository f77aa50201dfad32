"""Base of all draft heads: the target embeddings they share, the interface, RMS norm and rotary positions."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class EmbeddingTable(Protocol):
    """A row for each token of the target: a tensor [vocab, width], or an object that decodes its rows."""

    @property
    def device(self) -> torch.device: ...
    def __len__(self) -> int: ...
    def __getitem__(self, tokens: Tensor, /) -> Tensor: ...  # [...] -> [..., width]


@dataclass(frozen=True)
class TargetEmbeddings:
    """The tensors of the target that a head reads and never changes."""

    embed: EmbeddingTable
    head: EmbeddingTable  # may be the same memory
    norm: Tensor  # [width]: the target's final norm
    fingerprint: str  # of the target
    embed_scale: float = 1.0


@dataclass(frozen=True)
class DenseTargetEmbeddings(TargetEmbeddings):
    """The same as whole tensors: new weights are initialised from them."""

    embed: Tensor  # [vocab, width]
    head: Tensor  # [vocab, width]


class HeadConfig(Protocol):
    """A frozen dataclass of numbers, flags and the list of taps."""

    @property
    def taps(self) -> tuple[int, ...]: ...  # indices of the target's layers whose output is read
    @property
    def draft_vocab(self) -> int: ...
    @property
    def block(self) -> int: ...  # tokens of one draft, at most


@dataclass(frozen=True, slots=True)
class DecoderHeadConfig:
    """The shape that heads with decoder layers share."""

    width: int  # the target's
    heads: int
    kv_heads: int
    head_dim: int
    ff_width: int
    vocab: int  # the target's
    draft_vocab: int  # tokens of the target that can be drafted
    taps: tuple[int, ...]  # the target's layers that are read


class DraftHead(nn.Module):
    """A draft head. Parameters are its own weights; the target's tensors are buffers that are not saved."""

    draft_ids: Tensor  # [draft_vocab]: the draft vocabulary, ascending
    draft_index: Tensor  # [vocab]: index of a token in draft_ids; draft_vocab for a token outside
    vocab_parameters: ClassVar[tuple[str, ...]] = ()  # prefixes of parameters with a row per draft token

    @property
    @abstractmethod
    def shape(self) -> HeadConfig: ...

    def attach_target(self, embeddings: TargetEmbeddings, draft_ids: Tensor, **others: Tensor) -> None:
        """Registers the draft vocabulary, its inverse, and other tensors of the target."""
        device, ids = embeddings.embed.device, draft_ids.cpu()
        index = torch.full((len(embeddings.embed),), len(ids), device="cpu")
        index[ids] = torch.arange(len(ids), device="cpu")
        for name, tensor in {"draft_ids": ids, "draft_index": index, **others}.items():
            self.register_buffer(name, tensor, persistent=False)
        self.to(device)

    @abstractmethod
    def init_weights(self, embeddings: DenseTargetEmbeddings, generator: torch.Generator) -> None:
        """Sets new weights."""

    def init_from_target(self, target: Mapping[str, Tensor], layers: int) -> None:
        """Copies what fits of the target's last layers. target: its `layers` layers, by canonical names."""
        return

    def normalize_taps(self, rms: Sequence[float]) -> None:
        """Scales new weights as if the rows of every tap had the size 1. rms: the size they have."""
        return


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 whatever the dtypes of row and weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self._eps).to(x.dtype)


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Rotary positions (arXiv 2104.09864), half-rotation layout.

    [...] -> cosines, signed sines [..., head_dim]
    """
    dims = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions[..., None].float() * theta ** (-dims / head_dim)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def apply_rotary(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = tables
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)
