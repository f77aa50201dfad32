"""The target embeddings that draft heads borrow: rows of packed matrices, unpacked to float32 on demand."""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.heads.base import TargetEmbeddings
from paceline.target.native import library
from paceline.target.native.packing import PackedWeights
from paceline.target.weights.model_config import ModelConfig


class PackedTable:
    """A row for each token, in float32."""

    device = torch.device("cpu")

    def __init__(
        self, lib: ctypes.CDLL, linear: library.Linear, size: tuple[int, int], owner: object
    ) -> None:
        """size: tokens, and the width of a row. owner: of the memory that the matrix lies in."""
        self.linear, self._owner = linear, owner
        self._lib, (self._vocab, self._width) = lib, size

    def __len__(self) -> int:
        return self._vocab

    def __getitem__(self, tokens: Tensor) -> Tensor:
        ids = np.ascontiguousarray(tokens.numpy(force=True), np.int32)
        if ids.size and not 0 <= ids.min() <= ids.max() < self._vocab:
            raise IndexError(f"a token is not one of the model's {self._vocab}")
        rows = torch.empty(*tokens.shape, self.linear.inputs)
        arguments = ids.ctypes.data, ids.size, rows.data_ptr()
        self._lib.paceline_unpack(ctypes.byref(self.linear), *arguments)
        return rows[..., : self._width]


@dataclass(frozen=True)
class PackedEmbeddings(TargetEmbeddings):
    embed: PackedTable
    head: PackedTable


def packed_embeddings(
    lib: ctypes.CDLL, shape: ModelConfig, weights: PackedWeights, fingerprint: str
) -> PackedEmbeddings:
    size = shape.vocab_size, shape.width
    embed = PackedTable(lib, weights.matrix("embed"), size, weights)
    tied = "head" not in weights.layout.matrices
    head = embed if tied else PackedTable(lib, weights.matrix("head"), size, weights)
    norm = torch.from_numpy(weights.floats("norm")[: shape.width])
    return PackedEmbeddings(embed, head, norm, fingerprint, shape.embed_scale)
