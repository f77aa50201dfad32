"""A GGUF file as a checkpoint."""

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Final

import torch

from paceline.errors import CorruptModel
from paceline.gguf_header import GgufHeader, read_header
from paceline.target.weights.checkpoint import Checkpoint, Fields, require_family, unsupported
from paceline.target.weights.model_config import ModelConfig, Rope
from paceline.target.weights.tensors import TensorEntry, read_tensor, require_whole

FAMILIES: Final = ("llama", "qwen2", "qwen3", "gemma3")  # Mistral models come as llama
EMBED: Final = "token_embd.weight"
ROPE_DIVISORS: Final = "rope_freqs.weight"
GEMMA3_27B_LAYERS: Final = 62

OUTER: Final = {EMBED: "embed", "output_norm.weight": "norm", "output.weight": "head"}
LAYER: Final = re.compile(r"blk\.(\d+)\.(.+)")
PARTS: Final = {
    "attn_norm.weight": "attn_norm",
    "attn_q.weight": "q",
    "attn_k.weight": "k",
    "attn_v.weight": "v",
    "attn_output.weight": "o",
    "attn_q.bias": "q_bias",
    "attn_k.bias": "k_bias",
    "attn_v.bias": "v_bias",
    "attn_output.bias": "o_bias",
    "attn_q_norm.weight": "q_norm",
    "attn_k_norm.weight": "k_norm",
    "post_attention_norm.weight": "post_attn_norm",
    "ffn_norm.weight": "ffn_norm",
    "ffn_gate.weight": "gate",
    "ffn_up.weight": "up",
    "ffn_down.weight": "down",
    "post_ffw_norm.weight": "post_ffn_norm",
}


def open_gguf(path: Path) -> Checkpoint:
    header = read_header(path, long_arrays=False)
    family = require_family(path.name, header.metadata.get("general.architecture"), FAMILIES)
    if Fields(path.name, header.metadata).integer("split.count", 1) > 1:
        raise unsupported(path.name, "the other files it was split into")
    entries = _entries(path, header)
    named = {name: _canonical(name) for name in entries if name != ROPE_DIVISORS}
    return Checkpoint(
        source=path.name,
        shape=_shape(path, family, Fields(path.name, header.metadata, f"{family}."), entries),
        tensors={canonical: entries[name] for name, canonical in named.items() if canonical},
        unmapped=tuple(name for name, canonical in named.items() if not canonical),
        tied="output.weight" not in entries,
        interleaved=family == "llama",  # the converter reorders q and k of this family alone
        norm_shift=0.0,  # the converter has added gemma's 1 already
        identity=header.raw,
    )


def _entries(path: Path, header: GgufHeader) -> dict[str, TensorEntry]:
    """The file's tensors; raises unless each has a known encoding and lies within the file."""
    entries = {
        name: TensorEntry(path, name, info.encoding, info.shape, info.offset)
        for name, info in header.tensors.items()
    }
    for tensor in entries.values():
        tensor.require_readable()
    require_whole(path, {name: tensor.offset + tensor.nbytes for name, tensor in entries.items()})
    return entries


def _canonical(name: str) -> str | None:
    if name in OUTER:
        return OUTER[name]
    match = LAYER.fullmatch(name)
    part = PARTS.get(match[2]) if match else None
    return f"layers.{int(match[1])}.{part}" if match and part else None


def _shape(path: Path, family: str, keys: Fields, tensors: Mapping[str, TensorEntry]) -> ModelConfig:
    if EMBED not in tensors:
        raise CorruptModel(f"{path.name} has no tensor {EMBED}; pull it again")
    width, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", max(1, width // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise unsupported(path.name, f"{family}.{key} other than the key length {head_dim}")
    shape = ModelConfig(
        architecture=family,
        layers=keys.integer("block_count", maximum=1000),
        width=width,
        heads=heads,
        kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        ff_width=keys.integer("feed_forward_length"),
        vocab_size=tensors[EMBED].shape[0],
        max_context=keys.integer("context_length"),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(keys, tensors.get(ROPE_DIVISORS), head_dim),
    )
    return _gemma3(shape, keys) if family == "gemma3" else shape


def _rope(keys: Fields, divisors: TensorEntry | None, head_dim: int) -> Rope:
    theta = keys.number("rope.freq_base", 10_000.0)
    kind = keys.raw("rope.scaling.type") or "none"
    if kind not in ("none", "linear"):
        raise unsupported(keys.source, f"RoPE scaling {str(kind)[:40]!r}")
    if divisors is not None:
        return Rope(theta, divisors=_read_divisors(divisors, head_dim))
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    return Rope(theta, "linear", factor) if kind == "linear" and factor != 1 else Rope(theta)


def _read_divisors(entry: TensorEntry, head_dim: int) -> tuple[float, ...]:
    if entry.shape != (head_dim // 2,):
        raise CorruptModel(
            f"{entry.file.name}: {entry.name} has shape {list(entry.shape)}, expected [{head_dim // 2}]; "
            "pull it again"
        )
    with ThreadPoolExecutor(1) as pool:
        return tuple(read_tensor(entry, torch.float32, pool).tolist())


def _gemma3(shape: ModelConfig, keys: Fields) -> ModelConfig:
    """Properties of every gemma3, most of which the file does not state."""
    if keys.raw("final_logit_softcapping"):
        raise unsupported(keys.source, "soft-capped logits")
    # The reference divides by sqrt(width / heads) at 27B and by sqrt(head_dim) at the other sizes.
    queried = shape.width / shape.heads if shape.layers == GEMMA3_27B_LAYERS else shape.head_dim
    return replace(
        shape,
        local_rope=Rope(keys.number("rope.freq_base_swa", 10_000.0)),
        window=keys.integer("attention.sliding_window"),
        local_layers=_local_layers(shape.layers, keys),
        activation="gelu_tanh",
        embed_scale=sqrt(shape.width),
        attn_scale=queried**-0.5,
    )


def _local_layers(layers: int, keys: Fields) -> tuple[bool, ...]:
    """Every sixth layer has full attention, unless the file says otherwise."""
    key = "attention.sliding_window_pattern"
    listed = keys.raw(key)
    if not isinstance(listed, list):
        period = keys.integer(key, 6)
        return tuple((i + 1) % period != 0 for i in range(layers))
    if len(listed) != layers:
        raise keys.unusable(key, listed, f"{layers} values")
    return tuple(map(bool, listed))
