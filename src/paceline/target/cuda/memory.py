"""The GPU memory of a model, known before anything is loaded."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Final

import torch
from torch import Tensor

from paceline.config import EngineConfig
from paceline.target.cuda.arguments import MAX_SEQUENCES
from paceline.target.cuda.batch import pass_groups
from paceline.target.cuda.graphs import Buffers
from paceline.target.cuda.weights import CudaWeights, WeightType
from paceline.target.kv.cache import BLOCK, TorchKVMemory, blocks_in
from paceline.target.weights.model_config import ModelConfig
from paceline.target.weights.tensors import EncodedMatrix, TensorEntry

GRAPH_BYTES: Final = 96 * 2**20  # captured graphs and the driver's own
SPARE_PER_SEQUENCE: Final = 64  # slots for nodes of side branches
_MB: Final = 2**20
_BF16: Final = 2  # bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by use."""

    weights: int
    cache: int
    buffers: int
    graphs: int = GRAPH_BYTES

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.buffers + self.graphs

    def __str__(self) -> str:
        parts = (f"{field.name} {getattr(self, field.name) / _MB:,.0f}" for field in fields(self))
        return f"{', '.join(parts)}: {self.total / _MB:,.0f} MiB"

    def cache_mb_in(self, free: int) -> int:
        """The largest cache_mb that fits into so many bytes."""
        return max(0, (free - self.total + self.cache) // _MB)


def plan(weights: CudaWeights, config: EngineConfig) -> MemoryPlan:
    """weights: on torch's meta device, where nothing takes memory."""
    shape, meta = weights.shape, torch.device("meta")
    rows, blocks, _ = make_cache(shape, config, meta)
    max_context, groups = min(shape.max_context, blocks * BLOCK), pass_groups(config.max_batch)
    buffers = Buffers(weights, max_context, meta, groups, throughput=not config.deterministic)
    histories = 8 * max(config.max_batch, MAX_SEQUENCES) * weights.padded_vocab  # bias and counts
    return MemoryPlan(nbytes(weights), nbytes(rows), nbytes(buffers) + histories)


def planned_weights(
    shape: ModelConfig,
    sizes: Mapping[str, tuple[int, ...]],
    kind: WeightType = "bf16",
    kept: Mapping[str, TensorEntry] | None = None,
) -> CudaWeights:
    """On torch's meta device. sizes: of the model's tensors; kept: matrices that stay encoded."""
    meta, kept = torch.device("meta"), kept or {}

    def empty(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=meta)

    tensors = {
        name: empty(size, torch.bfloat16)
        for name, size in sizes.items()
        if name == "embed" or name not in kept
    }
    encoded = {
        name: EncodedMatrix(
            entry.encoding, empty((entry.shape[0], entry.nbytes // entry.shape[0]), torch.uint8)
        )
        for name, entry in kept.items()
    }
    return CudaWeights(shape, tensors, meta, kind, encoded)


def make_cache(
    shape: ModelConfig, config: EngineConfig, device: torch.device
) -> tuple[TorchKVMemory, int, int]:
    """The cache's memory, its blocks and the spare slots after them."""
    blocks, spare = blocks_in(config.cache_mb, shape, _BF16), SPARE_PER_SEQUENCE * config.max_batch
    slots = blocks * BLOCK + spare
    rows = TorchKVMemory(shape.layers, shape.kv_heads, shape.head_dim, slots, torch.bfloat16, device)
    return rows, blocks, spare


def nbytes(holder: object) -> int:
    """Bytes of the tensors that an object holds, each counted once, on its device alone."""
    found = {id(t): t.numel() * t.element_size() for t in _tensors(holder) if _on_device(t)}
    return sum(found.values())


def _on_device(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
    elif hasattr(value, "__dict__"):
        for item in vars(value).values():
            yield from _tensors(item)
