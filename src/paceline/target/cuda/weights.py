"""The model's weights as the kernels read them, and which models the kernels know."""

from collections.abc import Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.heads.base import TargetEmbeddings
from paceline.target.cuda.packing import pack_fp8, pack_gguf, quantise_fp8, unpacked
from paceline.target.weights.model_config import ModelConfig
from paceline.target.weights.tensors import EncodedMatrix

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3", "phi3")
HEAD_DIMS: Final = (64, 128)
VOCAB_TILE: Final = 64  # tokens of the output matrix that one block computes
WeightType = Literal["bf16", "int8", "fp8", "gguf"]
INPUT_GROUP: Final[dict[WeightType, int]] = {  # inputs a warp takes at a time
    "bf16": 64, "int8": 128, "fp8": 64, "gguf": 64
}  # fmt: skip


def unsupported_reason(shape: ModelConfig, names: Collection[str], kind: WeightType = "bf16") -> str | None:
    """Why the kernels cannot run this model; None: they can."""
    if shape.experts is not None:
        return f"the kernels know no mixtures of experts ({shape.architecture})"
    parts = {name.rpartition(".")[2] for name in names}
    if shape.architecture not in FAMILIES or parts & {"post_attn_norm", "post_ffn_norm"}:
        return f"the kernels do not know the architecture {shape.architecture}"
    if shape.activation != "silu" or shape.embed_scale != 1 or shape.local_rope is not None:
        return f"the kernels do not know this kind of {shape.architecture}"
    if shape.head_dim not in HEAD_DIMS:
        return f"attention heads of {shape.head_dim}, the kernels know {HEAD_DIMS}"
    group = INPUT_GROUP[kind]
    for what, size in (("width", shape.width), ("feed-forward width", shape.ff_width)):
        if size % group:
            return f"a {what} of {size} is not a multiple of {group}"
    return None if shape.heads * shape.head_dim % group == 0 else f"too few attention heads for {kind}"


@dataclass(frozen=True, slots=True)
class Matrix:
    """[features, inputs], row-major or packed. int8 and fp8 weights have a float32 scale for each feature."""

    weight: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None  # of all parts of a product
    type: str = "bf16"  # as the kernels' names end: bf16, int8, or a packed format
    packed_shape: tuple[int, int] | None = None  # features, inputs
    first_feature: int = 0  # among those of a product that comes in parts

    @property
    def features(self) -> int:
        return (self.packed_shape or self.weight.shape)[0]

    @property
    def inputs(self) -> int:
        return (self.packed_shape or self.weight.shape)[1]

    @property
    def nbytes(self) -> int:
        tensors = (self.weight, self.scale, self.bias)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    qkv: tuple[Matrix, ...]  # parts in the order of their features, each of one type
    o: Matrix
    gate_up: Matrix
    down: Matrix
    attn_norm: Tensor  # float32, as every vector
    ffn_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


class CudaWeights:
    """Takes the tensors out of `tensors`: q, k, v become one product, gate and up another.

    encoded: matrices that stay as a GGUF file holds them, taken out as well. Gate and up are encoded alike.
    An encoded embedding is a tied head; it is among the tensors too.
    """

    def __init__(
        self,
        shape: ModelConfig,
        tensors: MutableMapping[str, Tensor],
        device: torch.device,
        kind: WeightType = "bf16",
        encoded: MutableMapping[str, EncodedMatrix] | None = None,
    ) -> None:
        self.shape, self.kind, self.device = shape, kind, device
        self._tensors, self._encoded = tensors, {} if encoded is None else encoded
        self._tied = "head" not in tensors and "head" not in self._encoded
        self.embed = self._padded(self._take("embed"))
        self.layers = [self._layer(f"layers.{i}.") for i in range(shape.layers)]
        self.norm = self._vector("norm")
        self.head = self._head()
        self.nbytes = sum(m.nbytes for _, m in self.products())
        self.nbytes += 0 if self.head.weight is self.embed else self.embed.numel() * self.embed.element_size()

    @property
    def kernels(self) -> frozenset[tuple[str, str]]:
        """Names of products and types of weights: the kernels that are needed."""
        return frozenset((name, matrix.type) for name, matrix in self.products())

    def products(self) -> Iterator[tuple[str, Matrix]]:
        """Every matrix with the name of the kernels that multiply with it."""
        for layer in self.layers:
            qkv = "qkv" if layer.q_norm is None else "store"
            yield from ((qkv, part) for part in layer.qkv)
            yield from (("residual", layer.o), ("gated", layer.gate_up), ("residual", layer.down))
        yield "store", self.head

    @property
    def padded_vocab(self) -> int:
        return self.head.features

    def embeddings(self, fingerprint: str) -> TargetEmbeddings:
        vocab = self.shape.vocab_size
        head = self.embed if self._tied else dense(self.head)
        return TargetEmbeddings(self.embed[:vocab], head[:vocab], self.norm.to(self.embed.dtype), fingerprint)

    def _layer(self, name: str) -> LayerWeights:
        return LayerWeights(
            qkv=self._parts(*(name + part for part in "qkv")),
            o=self._matrix(name + "o"),
            gate_up=self._matrix(name + "gate", name + "up"),
            down=self._matrix(name + "down"),
            attn_norm=self._vector(name + "attn_norm"),
            ffn_norm=self._vector(name + "ffn_norm"),
            q_norm=self._vector(name + "q_norm") if name + "q_norm" in self._tensors else None,
            k_norm=self._vector(name + "k_norm") if name + "k_norm" in self._tensors else None,
        )

    def _parts(self, *names: str) -> tuple[Matrix, ...]:
        """One product: neighbours of one encoding are one matrix."""
        bias, parts, first = self._biases(*names), [], 0
        for _, run in groupby(names, self._encoding):
            parts.append(self._joined(list(run), bias, first))
            first += parts[-1].features
        return tuple(parts)

    def _encoding(self, name: str) -> str | None:
        return self._encoded[name].encoding if name in self._encoded else None

    def _matrix(self, *names: str) -> Matrix:
        return self._joined(names, self._biases(*names))

    def _joined(self, names: Sequence[str], bias: Tensor | None, first_feature: int = 0) -> Matrix:
        """Matrices of one encoding become one."""
        if names[0] not in self._encoded:
            parts = [self._take(name) for name in names]
            return self._typed(parts[0] if len(parts) == 1 else torch.cat(parts), bias, first_feature)
        kept = [self._encoded.pop(name) for name in names]
        rows = torch.cat([matrix.rows.to(self.device) for matrix in kept])
        return _packed(EncodedMatrix(kept[0].encoding, rows), bias, first_feature)

    def _head(self) -> Matrix:
        name = "embed" if self._tied else "head"
        if name in self._encoded:
            kept = self._encoded.pop(name)
            return _packed(EncodedMatrix(kept.encoding, self._padded(kept.rows.to(self.device))))
        return self._typed(self.embed if self._tied else self._padded(self._take("head")))

    def _biases(self, *names: str) -> Tensor | None:
        if not any(f"{name}_bias" in self._tensors for name in names):
            return None
        return torch.cat([self._bias(name) for name in names])

    def _bias(self, name: str) -> Tensor:
        if f"{name}_bias" in self._tensors:
            return self._vector(f"{name}_bias")
        matrix = self._encoded[name] if name in self._encoded else self._tensors[name]
        return torch.zeros(matrix.shape[0], device=self.device)

    def _typed(self, weight: Tensor, bias: Tensor | None = None, first_feature: int = 0) -> Matrix:
        if self.kind == "int8":
            return Matrix(*quantise_int8(weight), bias, "int8", None, first_feature)
        if self.kind == "fp8":
            codes, scale = quantise_fp8(weight)
            return Matrix(
                pack_fp8(codes), scale, bias, "FP8", (codes.shape[0], codes.shape[1]), first_feature
            )
        return Matrix(weight.contiguous(), None, bias, "bf16", None, first_feature)

    def _take(self, name: str) -> Tensor:
        return self._tensors.pop(name).to(self.device, torch.bfloat16)

    def _vector(self, name: str) -> Tensor:
        return self._tensors.pop(name).to(self.device, torch.float32, copy=True)

    def _padded(self, rows: Tensor) -> Tensor:
        """Zero rows up to a whole tile of tokens."""
        missing = -len(rows) % VOCAB_TILE
        return F.pad(rows, (0, 0, 0, missing)).contiguous() if missing else rows.contiguous()


def _packed(matrix: EncodedMatrix, bias: Tensor | None = None, first_feature: int = 0) -> Matrix:
    weight = pack_gguf(matrix.encoding, matrix.rows)
    return Matrix(weight, None, bias, matrix.encoding, matrix.shape, first_feature)


def dense(matrix: Matrix) -> Tensor:
    """[features, inputs] bf16."""
    if matrix.type == "bf16":
        return matrix.weight
    packed = matrix.type != "int8"
    values = unpacked(matrix.type, matrix.weight, matrix.inputs) if packed else matrix.weight.float()
    return (values if matrix.scale is None else values * matrix.scale[:, None]).bfloat16()


def quantise_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds to 8 bits with one scale for each feature."""
    rows = weight.float()
    scale = rows.abs().amax(1).clamp_min(1e-12) / 127
    return (rows / scale[:, None]).round_().to(torch.int8), scale
