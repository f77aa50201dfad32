"""Weights from disk: a GGUF file or a Hugging Face folder, as dense tensors under canonical names."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from paceline.errors import CorruptModel, ModelError, UnknownArchitecture, UnknownModel
from paceline.heads.base import DenseTargetEmbeddings
from paceline.target.weights.checkpoint import Checkpoint
from paceline.target.weights.gguf import open_gguf
from paceline.target.weights.hf_folder import open_folder
from paceline.target.weights.model_config import ModelConfig, Weights
from paceline.target.weights.tensors import TensorEntry, fingerprint, read_tensor

Progress = Callable[[int, int], None]  # bytes read so far, bytes in all

COMMON_PARTS: Final = ("attn_norm", "q", "k", "v", "o", "ffn_norm", "gate", "up", "down")
BIASES: Final = ("q_bias", "k_bias", "v_bias", "o_bias")  # a file of any family may have them
FAMILY_PARTS: Final = {
    "llama": (),
    "mistral": (),
    "qwen2": ("q_bias", "k_bias", "v_bias"),
    "qwen3": ("q_norm", "k_norm"),
    "gemma3": ("q_norm", "k_norm", "post_attn_norm", "post_ffn_norm"),
}


def load(path: Path, dtype: torch.dtype = torch.float32, progress: Progress | None = None) -> Weights:
    """Reads a model. Norm weights too get `dtype`; encoded weights are decoded in float32, then rounded."""
    try:
        return _load(open_checkpoint(path), dtype, progress)
    except OSError as error:
        raise ModelError.unreadable(path, error) from error


def load_embeddings(path: Path, dtype: torch.dtype = torch.float32) -> DenseTargetEmbeddings:
    """The weights that draft heads borrow, decoded as `load` decodes them; no other tensor is read."""
    try:
        checkpoint = open_checkpoint(path)
        entries = dict(canonical_tensors(checkpoint))
        digest = fingerprint(checkpoint.identity, entries.items())
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            tensors = {
                name: read_canonical(checkpoint, name, entries[name], dtype, pool)
                for name in ("embed", "norm", "head")
                if name in entries
            }
    except OSError as error:
        raise ModelError.unreadable(path, error) from error
    embed, scale = tensors["embed"], rounded(checkpoint.shape, dtype).embed_scale
    return DenseTargetEmbeddings(embed, tensors.get("head", embed), tensors["norm"], digest, scale)


def open_checkpoint(path: Path) -> Checkpoint:
    if path.is_dir():
        return open_folder(path)
    if path.is_file():
        return open_gguf(path)
    raise UnknownModel(f"there is no {path.name}; expected a GGUF file or a folder with config.json")


def _load(checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress | None) -> Weights:
    entries = dict(canonical_tensors(checkpoint))
    total, done = sum(entry.nbytes for entry in entries.values()), 0
    tensors: dict[str, Tensor] = {}
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for name, entry in entries.items():
            tensors[name] = read_canonical(checkpoint, name, entry, dtype, pool)
            done += entry.nbytes
            if progress is not None:
                progress(done, total)
    return Weights(
        rounded(checkpoint.shape, dtype), tensors, fingerprint(checkpoint.identity, entries.items())
    )


def rounded(shape: ModelConfig, dtype: torch.dtype) -> ModelConfig:
    """The reference keeps the embedding's scale in the embedding's dtype, by way of float32."""
    return replace(shape, embed_scale=torch.tensor(shape.embed_scale).float().to(dtype).item())


def read_canonical(
    checkpoint: Checkpoint, name: str, entry: TensorEntry, dtype: torch.dtype, pool: Executor
) -> Tensor:
    part, shape = name.rpartition(".")[2], checkpoint.shape
    if part.endswith("norm") and checkpoint.norm_shift:
        return (read_tensor(entry, torch.float32, pool) + checkpoint.norm_shift).to(dtype)
    tensor = read_tensor(entry, dtype, pool)
    if checkpoint.interleaved and part in ("q", "k", "q_bias", "k_bias"):
        return half_rotation(tensor, shape.heads if part[0] == "q" else shape.kv_heads)
    return tensor


def half_rotation(rows: Tensor, heads: int) -> Tensor:
    """Rows of q or k from the order of the interleaved RoPE (2i with 2i + 1) to that of the half rotation."""
    pairs = rows.view(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def canonical_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, TensorEntry]]:
    """Every tensor the forward pass needs, present and of the right shape, and no other."""
    _require_consistent(checkpoint.source, checkpoint.shape)
    expected = _expected(checkpoint)
    unknown = [*checkpoint.unmapped, *(name for name in checkpoint.tensors if name not in expected)]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise UnknownArchitecture(
            f"{checkpoint.source} holds {unknown[0][:80]}{more}, for which paceline's "
            f"{checkpoint.shape.architecture} has no place; use another model"
        )
    for name, shape in expected.items():
        entry = checkpoint.tensors.get(name)
        if entry is None:
            raise CorruptModel(f"{checkpoint.source} has no tensor for {name}; pull it again")
        entry.require_readable()
        if entry.shape != shape:
            raise CorruptModel(
                f"{entry.file.name}: {entry.name} has shape {list(entry.shape)}, expected {list(shape)}; "
                "pull it again"
            )
        yield name, entry


def _expected(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    shape = checkpoint.shape
    stored_parts = {name.rpartition(".")[2] for name in checkpoint.tensors}
    biases = [part for part in BIASES if part in stored_parts]
    parts = dict.fromkeys([*COMMON_PARTS, *FAMILY_PARTS[shape.architecture], *biases])
    sizes = _part_shapes(shape)
    expected: dict[str, tuple[int, ...]] = {"embed": (shape.vocab_size, shape.width)}
    for layer in range(shape.layers):
        expected |= {f"layers.{layer}.{part}": sizes[part] for part in parts}
    expected["norm"] = (shape.width,)
    if not checkpoint.tied:
        expected["head"] = (shape.vocab_size, shape.width)
    return expected


def _part_shapes(shape: ModelConfig) -> dict[str, tuple[int, ...]]:
    width, ff, head = shape.width, shape.ff_width, shape.head_dim
    q, kv = shape.heads * head, shape.kv_heads * head
    return {
        **dict.fromkeys(("attn_norm", "ffn_norm", "post_attn_norm", "post_ffn_norm", "o_bias"), (width,)),
        **dict.fromkeys(("q_norm", "k_norm"), (head,)),
        **dict.fromkeys(("k", "v"), (kv, width)),
        **dict.fromkeys(("k_bias", "v_bias"), (kv,)),
        **dict.fromkeys(("gate", "up"), (ff, width)),
        "q": (q, width),
        "q_bias": (q,),
        "o": (width, q),
        "down": (width, ff),
    }


def _require_consistent(source: str, shape: ModelConfig) -> None:
    if shape.heads % shape.kv_heads or shape.head_dim % 2:
        raise CorruptModel(
            f"{source} is damaged: {shape.heads} heads of {shape.head_dim} on {shape.kv_heads} KV heads, "
            "expected a multiple and an even size; pull it again"
        )
