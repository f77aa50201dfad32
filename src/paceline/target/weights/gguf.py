"""A GGUF file, or the files it was split into, as a checkpoint."""

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import log, sqrt
from pathlib import Path
from typing import Final

import torch

from paceline.errors import CorruptModel, ModelError
from paceline.gguf_header import GgufHeader, read_header
from paceline.target.weights.checkpoint import (
    EXPERT_STACKS,
    Checkpoint,
    Fields,
    require_family,
    split_joined,
    unsupported,
)
from paceline.target.weights.model_config import Experts, ModelConfig, Rope, longrope_amplitude
from paceline.target.weights.tensors import TensorEntry, read_tensor, require_whole

# Mistral and Mixtral models come as llama.
FAMILIES: Final = ("llama", "qwen2", "qwen3", "qwen3moe", "phi3", "gemma2", "gemma3", "gpt-oss")
RENAMED: Final = {"qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}
EMBED: Final = "token_embd.weight"
ROPE_DIVISORS: Final = "rope_freqs.weight"
LONG_DIVISORS: Final = "rope_factors_long.weight"
SHORT_DIVISORS: Final = "rope_factors_short.weight"
UNLAYERED: Final = (ROPE_DIVISORS, LONG_DIVISORS, SHORT_DIVISORS)  # no weights of a layer
GEMMA_27B_LAYERS: Final = {"gemma2": 46, "gemma3": 62}

SPLIT: Final = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf", re.ASCII | re.IGNORECASE)
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
EXPERT_PARTS: Final = PARTS | {
    "ffn_gate_inp.weight": "router",
    **{f"ffn_{stack}.weight": stack for stack in EXPERT_STACKS if not stack.endswith("bias")},
}
GPT_OSS_PARTS: Final = EXPERT_PARTS | {
    "attn_sinks.weight": "sinks",
    "post_attention_norm.weight": "ffn_norm",
    "ffn_gate_inp.bias": "router_bias",
    **{f"ffn_{stack.removesuffix('_bias')}.bias": stack for stack in EXPERT_STACKS if stack.endswith("bias")},
}
PHI3_PARTS: Final = PARTS | {"attn_qkv.weight": "qkv", "ffn_up.weight": "gate_up"}
OWN_PARTS: Final = {"phi3": PHI3_PARTS, "gpt-oss": GPT_OSS_PARTS}


def open_gguf(path: Path) -> Checkpoint:
    header = read_header(path, long_arrays=False)
    parts = [(file, read_header(file, long_arrays=False)) for file in _other_parts(path, header)]
    family = require_family(path.name, header.metadata.get("general.architecture"), FAMILIES)
    entries = _entries(path, header)
    for file, part in parts:
        if again := entries.keys() & part.tensors.keys():
            raise CorruptModel(f"{file.name} has {min(again)}, as another part has; pull the model again")
        entries |= _entries(file, part)
    shape = _shape(path, family, Fields(path.name, header.metadata, f"{family}."), entries)
    names = OWN_PARTS.get(family) or (EXPERT_PARTS if shape.experts else PARTS)
    named = {name: _canonical(name, names) for name in entries if name not in UNLAYERED}
    tensors = {canonical: entries[name] for name, canonical in named.items() if canonical}
    return Checkpoint(
        source=path.name,
        shape=shape,
        tensors=split_joined(tensors, shape),
        unmapped=tuple(name for name, canonical in named.items() if not canonical),
        tied="output.weight" not in entries,
        interleaved=family == "llama",  # the converter reorders q and k of this family alone
        norm_shift=0.0,  # the converter has added gemma's 1 already
        identity=header.raw,
    )


def _other_parts(path: Path, header: GgufHeader) -> list[Path]:
    """The files after the first of a model that llama.cpp's gguf-split split; only the first has metadata."""
    count = Fields(path.name, header.metadata).integer("split.count", 1, maximum=99_999)
    if count == 1:
        return []
    named = SPLIT.fullmatch(path.name)
    if named is None or int(named["count"]) != count:
        expected = f"{path.stem}-00001-of-{count:05}.gguf"
        raise ModelError(f"{path.name} is one of {count} parts of a model: name it {expected}, and so on")
    files = [path.with_name(f"{named['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    if files[0].name != path.name:
        raise ModelError(f"{path.name} is a part of a model: give the first, {files[0].name}")
    return files[1:]


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


def _canonical(name: str, parts: Mapping[str, str]) -> str | None:
    if name in OUTER:
        return OUTER[name]
    match = LAYER.fullmatch(name)
    part = parts.get(match[2]) if match else None
    return f"layers.{int(match[1])}.{part}" if match and part else None


def _shape(path: Path, family: str, keys: Fields, tensors: Mapping[str, TensorEntry]) -> ModelConfig:
    if EMBED not in tensors:
        raise CorruptModel(f"{path.name} has no tensor {EMBED}; pull it again")
    width, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", max(1, width // heads))
    rotated = () if family == "phi3" else ("rope.dimension_count",)
    for key in ("attention.value_length", *rotated):
        if keys.integer(key, head_dim) != head_dim:
            raise unsupported(path.name, f"{family}.{key} other than the key length {head_dim}")
    layers, context = keys.integer("block_count", maximum=1000), keys.integer("context_length")
    experts = _experts(keys, layers)
    shape = ModelConfig(
        architecture="mixtral" if family == "llama" and experts else RENAMED.get(family, family),
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        ff_width=keys.integer("feed_forward_length"),
        vocab_size=tensors[EMBED].shape[0],
        max_context=context,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(keys, tensors, head_dim, context),
        experts=experts,
    )
    if family in GEMMA_27B_LAYERS:
        return _gemma(shape, keys)
    if family == "gpt-oss":
        return _gpt_oss(shape, keys)
    if family == "phi3" and keys.raw("attention.sliding_window"):  # 0 stands for none
        window = keys.integer("attention.sliding_window")
        if window < context:
            return replace(shape, window=window, local_layers=(True,) * layers)
    return shape


def _experts(keys: Fields, layers: int) -> Experts | None:
    """The weights of those used add up to 1 in every family that comes as a file of this kind."""
    if not keys.raw("expert_count"):
        return None
    count = keys.integer("expert_count", maximum=4096)
    width = keys.integer("expert_feed_forward_length", keys.integer("feed_forward_length"))
    used = keys.integer("expert_used_count", maximum=count)
    return Experts(count, used, width, (True,) * layers, renormalise=True)


def _rope(keys: Fields, tensors: Mapping[str, TensorEntry], head_dim: int, context: int) -> Rope:
    dims = keys.integer("rope.dimension_count", head_dim, maximum=head_dim)
    plain = Rope(keys.number("rope.freq_base", 10_000.0), dims=0 if dims == head_dim else dims)
    kind = keys.raw("rope.scaling.type") or "none"
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise unsupported(keys.source, f"RoPE scaling {str(kind)[:40]!r}")
    if ROPE_DIVISORS in tensors:
        return replace(plain, divisors=_read_divisors(tensors[ROPE_DIVISORS], dims))
    if LONG_DIVISORS in tensors and SHORT_DIVISORS in tensors:
        return _longrope(plain, keys, tensors, dims, context)
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind == "yarn":
        return _yarn(plain, keys, factor)
    return replace(plain, kind="linear", factor=factor) if kind == "linear" and factor != 1 else plain


def _yarn(plain: Rope, keys: Fields, factor: float) -> Rope:
    if keys.raw("rope.scaling.yarn_log_multiplier"):
        raise unsupported(keys.source, "rope.scaling.yarn_log_multiplier")
    amplitude = 0.1 * log(factor) + 1 if factor > 1 else 1.0
    return replace(
        plain,
        kind="yarn",
        factor=factor,
        original_context=keys.integer("rope.scaling.original_context_length"),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=amplitude * keys.number("rope.scaling.attn_factor", 1.0),
    )


def _longrope(plain: Rope, keys: Fields, tensors: Mapping[str, TensorEntry], dims: int, context: int) -> Rope:
    original = keys.integer("rope.scaling.original_context_length", context)
    usual = longrope_amplitude(context / original, original)
    return replace(
        plain,
        divisors=_read_divisors(tensors[LONG_DIVISORS], dims),
        short_divisors=_read_divisors(tensors[SHORT_DIVISORS], dims),
        original_context=original,
        attention_factor=keys.number("rope.scaling.attn_factor", usual),
    )


def _read_divisors(entry: TensorEntry, dims: int) -> tuple[float, ...]:
    if entry.shape != (dims // 2,):
        raise CorruptModel(
            f"{entry.file.name}: {entry.name} has shape {list(entry.shape)}, expected [{dims // 2}]; "
            "pull it again"
        )
    with ThreadPoolExecutor(1) as pool:
        return tuple(read_tensor(entry, torch.float32, pool).tolist())


def _gemma(shape: ModelConfig, keys: Fields) -> ModelConfig:
    """Properties of every gemma, most of which the file does not state."""
    gemma2 = shape.architecture == "gemma2"
    if not gemma2 and keys.raw("final_logit_softcapping"):
        raise unsupported(keys.source, "soft-capped logits")
    # The reference divides by sqrt(width / heads) at 27B and by sqrt(head_dim) at the other sizes.
    large = shape.layers == GEMMA_27B_LAYERS[shape.architecture]
    queried = shape.width / shape.heads if large else shape.head_dim
    return replace(
        shape,
        local_rope=None if gemma2 else Rope(keys.number("rope.freq_base_swa", 10_000.0)),
        window=keys.integer("attention.sliding_window", 4096 if gemma2 else None),
        local_layers=_local_layers(shape.layers, keys, 2 if gemma2 else 6),
        activation="gelu_tanh",
        embed_scale=sqrt(shape.width),
        attn_scale=queried**-0.5,
        attn_softcap=keys.number("attn_logit_softcapping", 50.0) if gemma2 else 0.0,
        logit_softcap=keys.number("final_logit_softcapping", 30.0) if gemma2 else 0.0,
    )


def _gpt_oss(shape: ModelConfig, keys: Fields) -> ModelConfig:
    """The reference does not round the bounds of YaRN; the file does not say so."""
    return replace(
        shape,
        rope=replace(shape.rope, whole_bounds=False),
        window=keys.integer("attention.sliding_window", 128),
        local_layers=_local_layers(shape.layers, keys, 2),
        activation="clamped_swiglu",
    )


def _local_layers(layers: int, keys: Fields, usual: int) -> tuple[bool, ...]:
    """Every second or sixth (gemma3) layer has full attention, unless the file says otherwise."""
    key = "attention.sliding_window_pattern"
    listed = keys.raw(key)
    if not isinstance(listed, list):
        period = keys.integer(key, usual)
        return tuple((i + 1) % period != 0 for i in range(layers))
    if len(listed) != layers:
        raise keys.unusable(key, listed, f"{layers} values")
    return tuple(map(bool, listed))
