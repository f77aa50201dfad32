"""Weights from disk: a GGUF file or a Hugging Face folder, as dense tensors under canonical names."""

from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from paceline import limits
from paceline.errors import CorruptModel, ModelError, UnknownArchitecture, UnknownModel
from paceline.heads.base import DenseTargetEmbeddings
from paceline.target.weights.checkpoint import Checkpoint
from paceline.target.weights.gguf import open_gguf
from paceline.target.weights.hf_folder import open_folder
from paceline.target.weights.model_config import ModelConfig, Weights
from paceline.target.weights.tensors import EncodedMatrix, TensorEntry, fingerprint, read_raw, read_tensor

Progress = Callable[[int, int], None]  # bytes read so far, bytes in all

COMMON_PARTS: Final = ("attn_norm", "q", "k", "v", "o", "ffn_norm")
FEED_FORWARD: Final = ("gate", "up", "down")
BIASES: Final = ("q_bias", "k_bias", "v_bias", "o_bias")  # a file of any family may have them
EXPERT_BIASES: Final = ("gpt_oss",)  # families whose router and experts have them
FAMILY_PARTS: Final = {
    "llama": (),
    "mistral": (),
    "mixtral": (),
    "qwen2": ("q_bias", "k_bias", "v_bias"),
    "qwen3": ("q_norm", "k_norm"),
    "qwen3_moe": ("q_norm", "k_norm"),
    "phi3": (),
    "gemma2": ("post_attn_norm", "post_ffn_norm"),
    "gemma3": ("q_norm", "k_norm", "post_attn_norm", "post_ffn_norm"),
    "gpt_oss": (*BIASES, "sinks"),
}


def load(
    path: Path,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
    keep: Container[str] = (),
) -> Weights:
    """Reads a model. Norm weights too get `dtype`; encoded weights are decoded in float32, then rounded.

    keep: matrices in these encodings are left encoded (see kept_matrices); the embedding is decoded as well.
    """
    try:
        return _load(open_checkpoint(path), dtype, progress, keep)
    except OSError as error:
        raise ModelError.unreadable(path, error) from error


def load_embeddings(path: Path, dtype: torch.dtype = torch.float32) -> DenseTargetEmbeddings:
    """The weights that draft heads borrow, decoded as `load` decodes them; no other tensor is read."""
    try:
        checkpoint = open_checkpoint(path)
        entries = dict(canonical_tensors(checkpoint))
        digest = fingerprint(checkpoint.identity, entries.items())
        with ThreadPoolExecutor(limits.cores()) as pool:
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


def _load(
    checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress | None, keep: Container[str]
) -> Weights:
    entries = dict(canonical_tensors(checkpoint))
    kept = kept_matrices(checkpoint, entries, keep)
    total, done = sum(entry.nbytes for entry in entries.values()), 0
    tensors: dict[str, Tensor] = {}
    encoded: dict[str, EncodedMatrix] = {}
    with ThreadPoolExecutor(limits.cores()) as pool:
        for name, entry in entries.items():
            if name in kept:
                encoded[name] = _read_encoded(checkpoint, name, entry)
            if name not in kept or name == "embed":
                tensors[name] = read_canonical(checkpoint, name, entry, dtype, pool)
            done += entry.nbytes
            if progress is not None:
                progress(done, total)
    digest = fingerprint(checkpoint.identity, entries.items())
    return Weights(rounded(checkpoint.shape, dtype), tensors, digest, encoded)


def kept_matrices(
    checkpoint: Checkpoint, entries: Mapping[str, TensorEntry], encodings: Container[str]
) -> dict[str, TensorEntry]:
    """The matrices in one of these encodings; gate and up are one product, kept if they are encoded alike.

    The embedding is looked up, so it is kept only as the head that is tied to it.
    """
    return {
        name: entry
        for name, entry in entries.items()
        if len(entry.shape) == 2
        and entry.encoding in encodings
        and (name != "embed" or checkpoint.tied)
        and entry.encoding == entries[_partner(name)].encoding
    }


def _partner(name: str) -> str:
    """The matrix that shares a product with this one, whatever their encodings."""
    layer, _, part = name.rpartition(".")
    return {"gate": f"{layer}.up", "up": f"{layer}.gate"}.get(part, name)


def _read_encoded(checkpoint: Checkpoint, name: str, entry: TensorEntry) -> EncodedMatrix:
    rows = torch.from_numpy(read_raw(entry)).view(entry.shape[0], -1)
    return EncodedMatrix(entry.encoding, _rotated(checkpoint, name, rows))


def rounded(shape: ModelConfig, dtype: torch.dtype) -> ModelConfig:
    """The reference keeps the embedding's scale in the embedding's dtype, by way of float32."""
    return replace(shape, embed_scale=torch.tensor(shape.embed_scale).float().to(dtype).item())


def read_canonical(
    checkpoint: Checkpoint, name: str, entry: TensorEntry, dtype: torch.dtype, pool: Executor
) -> Tensor:
    if name.endswith("norm") and checkpoint.norm_shift:
        return (read_tensor(entry, torch.float32, pool) + checkpoint.norm_shift).to(dtype)
    return _rotated(checkpoint, name, read_tensor(entry, dtype, pool))


def _rotated(checkpoint: Checkpoint, name: str, rows: Tensor) -> Tensor:
    order = rotation_order(checkpoint, name)
    return rows if order is None else rows.index_select(0, order)


def rotation_order(checkpoint: Checkpoint, name: str) -> Tensor | None:
    """The file's row for each row of q or k in the order of the half rotation; None: they are in it already.

    Dimension d turns with d + head_dim / 2. A file may interleave them (2i with 2i + 1), or rotate the first
    `dims` of a head only: the others then follow the rotated ones of each half.
    """
    shape, part = checkpoint.shape, name.rpartition(".")[2]
    size, dims = shape.head_dim, shape.rope.dims or shape.head_dim
    if part not in ("q", "k", "q_bias", "k_bias") or not (checkpoint.interleaved or dims < size):
        return None
    if checkpoint.interleaved:
        head = torch.cat((torch.arange(0, size, 2), torch.arange(1, size, 2)))
    else:
        first, second, fixed = torch.split(torch.arange(size), [dims // 2, dims // 2, size - dims])
        head = torch.cat((first, fixed[: len(fixed) // 2], second, fixed[len(fixed) // 2 :]))
    heads = shape.heads if part[0] == "q" else shape.kv_heads
    return (torch.arange(heads)[:, None] * size + head).flatten()


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
    sizes = _part_shapes(shape)
    expected: dict[str, tuple[int, ...]] = {"embed": (shape.vocab_size, shape.width)}
    for layer in range(shape.layers):
        dense = () if shape.sparse(layer) else FEED_FORWARD
        parts = (*COMMON_PARTS, *dense, *FAMILY_PARTS[shape.architecture], *biases)
        expected |= {f"layers.{layer}.{part}": sizes[part] for part in parts}
        expected |= _expert_shapes(shape, layer)
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
        "sinks": (shape.heads,),
        "o": (width, q),
        "down": (width, ff),
    }


def _expert_shapes(shape: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    if shape.experts is None or not shape.sparse(layer):
        return {}
    ff, width = shape.experts.ff_width, shape.width
    biased = shape.architecture in EXPERT_BIASES
    matrices: dict[str, tuple[int, ...]] = {f"layers.{layer}.router": (shape.experts.count, width)}
    for expert in range(shape.experts.count):
        name = f"layers.{layer}.experts.{expert}."
        matrices |= {name + "gate": (ff, width), name + "up": (ff, width), name + "down": (width, ff)}
    return matrices | {f"{name}_bias": size[:1] for name, size in matrices.items() if biased}


def _require_consistent(source: str, shape: ModelConfig) -> None:
    if shape.heads % shape.kv_heads or shape.head_dim % 2 or shape.rope.dims % 2:
        raise CorruptModel(
            f"{source} is damaged: {shape.heads} heads of {shape.head_dim} on {shape.kv_heads} KV heads, "
            "expected a multiple and an even size; pull it again"
        )
