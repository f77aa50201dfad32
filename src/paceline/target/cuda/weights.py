"""The model's weights as the kernels read them, and which models the kernels know."""

from collections.abc import Collection, MutableMapping
from dataclasses import dataclass
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.heads.base import TargetEmbeddings
from paceline.target.weights.model_config import ModelConfig

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
HEAD_DIMS: Final = (64, 128)
VOCAB_TILE: Final = 64  # tokens of the output matrix that one block computes
WeightType = Literal["bf16", "int8"]
INPUT_GROUP: Final[dict[WeightType, int]] = {"bf16": 64, "int8": 128}  # inputs a warp takes at a time


def unsupported_reason(shape: ModelConfig, names: Collection[str], kind: WeightType = "bf16") -> str | None:
    """Why the kernels cannot run this model; None: they can."""
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
    return None if shape.heads * shape.head_dim % group == 0 else "too few attention heads for int8"


@dataclass(frozen=True, slots=True)
class Matrix:
    """[features, inputs], row-major. int8 weights have a float32 scale for each feature."""

    weight: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None

    @property
    def features(self) -> int:
        return self.weight.shape[0]

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        tensors = (self.weight, self.scale, self.bias)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    qkv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix
    attn_norm: Tensor  # float32, as every vector
    ffn_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


class CudaWeights:
    """Takes the tensors out of `tensors`: q, k, v become one matrix, gate and up another."""

    def __init__(
        self,
        shape: ModelConfig,
        tensors: MutableMapping[str, Tensor],
        device: torch.device,
        kind: WeightType = "bf16",
    ) -> None:
        self.shape, self.kind, self.device = shape, kind, device
        self._tensors = tensors
        self.embed = self._padded(self._take("embed"))
        self.layers = [self._layer(f"layers.{i}.") for i in range(shape.layers)]
        self.norm = self._vector("norm")
        if "head" in tensors:
            self.head = self._typed(self._padded(self._take("head")))
        else:
            self.head = Matrix(self.embed) if kind == "bf16" else self._typed(self.embed)
        matrices = [m for layer in self.layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        tied = self.head.weight is self.embed
        self.nbytes = sum(m.nbytes for m in matrices) + self.head.nbytes
        self.nbytes += 0 if tied else self.embed.numel() * self.embed.element_size()

    @property
    def padded_vocab(self) -> int:
        return self.head.features

    def embeddings(self, fingerprint: str) -> TargetEmbeddings:
        vocab = self.shape.vocab_size
        head = self.head.weight if self.kind == "bf16" else self.embed
        return TargetEmbeddings(self.embed[:vocab], head[:vocab], self.norm.to(self.embed.dtype), fingerprint)

    def _layer(self, name: str) -> LayerWeights:
        return LayerWeights(
            qkv=self._matrix(*(name + part for part in "qkv")),
            o=self._matrix(name + "o"),
            gate_up=self._matrix(name + "gate", name + "up"),
            down=self._matrix(name + "down"),
            attn_norm=self._vector(name + "attn_norm"),
            ffn_norm=self._vector(name + "ffn_norm"),
            q_norm=self._vector(name + "q_norm") if name + "q_norm" in self._tensors else None,
            k_norm=self._vector(name + "k_norm") if name + "k_norm" in self._tensors else None,
        )

    def _matrix(self, *names: str) -> Matrix:
        parts = [self._take(name) for name in names]
        bias = None
        if any(f"{name}_bias" in self._tensors for name in names):
            biases = [self._bias(name, len(part)) for name, part in zip(names, parts, strict=True)]
            bias = torch.cat(biases)
        return self._typed(parts[0] if len(parts) == 1 else torch.cat(parts), bias)

    def _bias(self, name: str, length: int) -> Tensor:
        if f"{name}_bias" in self._tensors:
            return self._vector(f"{name}_bias")
        return torch.zeros(length, device=self.device)

    def _typed(self, weight: Tensor, bias: Tensor | None = None) -> Matrix:
        if self.kind == "bf16":
            return Matrix(weight.contiguous(), bias=bias)
        return Matrix(*quantise_int8(weight), bias=bias)

    def _take(self, name: str) -> Tensor:
        return self._tensors.pop(name).to(self.device, torch.bfloat16)

    def _vector(self, name: str) -> Tensor:
        return self._tensors.pop(name).to(self.device, torch.float32, copy=True)

    def _padded(self, rows: Tensor) -> Tensor:
        """Zero rows up to a whole tile of tokens."""
        missing = -len(rows) % VOCAB_TILE
        return F.pad(rows, (0, 0, 0, missing)).contiguous() if missing else rows.contiguous()


def quantise_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds to 8 bits with one scale for each feature."""
    rows = weight.float()
    scale = rows.abs().amax(1).clamp_min(1e-12) / 127
    return (rows / scale[:, None]).round_().to(torch.int8), scale
