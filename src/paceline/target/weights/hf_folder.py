"""A Hugging Face folder (config.json and safetensors) as a checkpoint."""

import re
from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Final

from paceline.errors import CorruptModel
from paceline.target.weights.checkpoint import FAMILIES, Checkpoint, Fields, require_family, unsupported
from paceline.target.weights.model_config import ModelConfig, Rope
from paceline.target.weights.safetensors import read_json, tensor_entries
from paceline.target.weights.tensors import TensorEntry

CONFIG: Final = "config.json"
EMBED: Final = "embed_tokens.weight"
HEAD: Final = "lm_head.weight"
UNUSED: Final = "rotary_emb.inv_freq"  # old files carry what RoPE computes itself
GEMMA3_TYPES: Final = (
    "gemma3_text",
    "gemma3",
)  # the text model alone, and the one with a vision tower beside it

# Defaults of the reference configurations, where config.json has no value.
DEFAULTS: Final[Mapping[str, Mapping[str, int]]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096},
    "qwen3": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
    },
    "gemma3": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
    },
}

OUTER: Final = {EMBED: "embed", "norm.weight": "norm"}
LAYER: Final = re.compile(r"layers\.(\d+)\.(.+)")
PARTS: Final = {
    "input_layernorm.weight": "attn_norm",
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "o",
    "self_attn.q_proj.bias": "q_bias",
    "self_attn.k_proj.bias": "k_bias",
    "self_attn.v_proj.bias": "v_bias",
    "self_attn.o_proj.bias": "o_bias",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    "post_attention_layernorm.weight": "ffn_norm",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
}
GEMMA3_PARTS: Final = PARTS | {
    "post_attention_layernorm.weight": "post_attn_norm",
    "pre_feedforward_layernorm.weight": "ffn_norm",
    "post_feedforward_layernorm.weight": "post_ffn_norm",
}


def open_folder(folder: Path) -> Checkpoint:
    config = read_json(folder / CONFIG)
    family, text = _family(folder, config)
    entries = tensor_entries(folder)
    tied = text.flag("tie_word_embeddings", family == "gemma3")
    tensors, unmapped = _canonical_entries(
        folder, entries, GEMMA3_PARTS if family == "gemma3" else PARTS, tied
    )
    return Checkpoint(
        source=folder.name,
        shape=_shape(family, text),
        tensors=tensors,
        unmapped=unmapped,
        tied=tied,
        interleaved=False,
        norm_shift=1.0 if family == "gemma3" else 0.0,
        identity=(folder / CONFIG).read_bytes(),
    )


def _family(folder: Path, config: Mapping[str, object]) -> tuple[str, Fields]:
    """The family, and the settings of its text model over the family's defaults."""
    kind = config.get("model_type")
    if kind not in GEMMA3_TYPES:
        family = require_family(folder.name, kind, FAMILIES)
        return family, Fields(CONFIG, {**DEFAULTS[family], **config})
    nested = Fields(CONFIG, config).fields("text_config").values
    return "gemma3", Fields(CONFIG, {**DEFAULTS["gemma3"], **config, **nested})


def _canonical_entries(
    folder: Path, entries: Mapping[str, TensorEntry], parts: Mapping[str, str], tied: bool
) -> tuple[dict[str, TensorEntry], tuple[str, ...]]:
    """The text model's tensors by canonical name, and the names of those that have none."""
    embed = next((name for name in entries if name.endswith(EMBED)), None)
    if embed is None:
        raise CorruptModel(f"{folder.name} has no tensor {EMBED}; pull it again")
    prefix = embed.removesuffix(EMBED)
    by_name, unmapped = {}, []
    for name, tensor in entries.items():
        if name.endswith(HEAD):
            if not tied:
                by_name["head"] = tensor
        elif name.startswith(prefix) and not name.endswith(UNUSED):
            canonical = _canonical(name.removeprefix(prefix), parts)
            if canonical is None:
                unmapped.append(name)
            else:
                by_name[canonical] = tensor
    return by_name, tuple(unmapped)


def _canonical(name: str, parts: Mapping[str, str]) -> str | None:
    if name in OUTER:
        return OUTER[name]
    match = LAYER.fullmatch(name)
    part = parts.get(match[2]) if match else None
    return f"layers.{int(match[1])}.{part}" if match and part else None


def _shape(family: str, text: Fields) -> ModelConfig:
    width, heads = text.integer("hidden_size"), text.integer("num_attention_heads")
    context = text.integer("max_position_embeddings")
    _require_activation(text, "gelu_pytorch_tanh" if family == "gemma3" else "silu")
    shape = ModelConfig(
        architecture=family,
        layers=text.integer("num_hidden_layers", maximum=1000),
        width=width,
        heads=heads,
        kv_heads=text.integer("num_key_value_heads", heads),
        head_dim=text.integer("head_dim", max(1, width // heads)),
        ff_width=text.integer("intermediate_size"),
        vocab_size=text.integer("vocab_size"),
        max_context=context,
        norm_eps=text.number("rms_norm_eps", 1e-6),
        rope=_rope(text, 1e6 if family == "gemma3" else 1e4, context),
    )
    if family == "gemma3":
        return _gemma3(shape, text)
    local = _local_layers(family, text, shape.layers)
    return replace(shape, window=text.integer("sliding_window"), local_layers=local) if any(local) else shape


def _require_activation(text: Fields, expected: str) -> None:
    activation = text.raw("hidden_activation") or text.raw("hidden_act") or expected
    if activation != expected:
        raise unsupported(text.source, f"the activation {str(activation)[:40]!r}")


def _rope(text: Fields, default_theta: float, context: int) -> Rope:
    """Reads `rope_scaling` beside `rope_theta`, or `rope_parameters` that hold both, by layer type or not."""
    parameters = text.fields("rope_parameters")
    flat = parameters.fields("full_attention").values or parameters.values
    rope = Fields(text.source, {**flat, **text.fields("rope_scaling").values})
    theta = rope.number("rope_theta", text.number("rope_theta", default_theta))
    kind = rope.raw("rope_type") or rope.raw("type") or "default"
    if (rope.raw("partial_rotary_factor") or text.raw("partial_rotary_factor") or 1) != 1:
        raise unsupported(text.source, "RoPE on a part of each head")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", rope.number("factor"))
    if kind == "llama3":
        return Rope(
            theta,
            "llama3",
            rope.number("factor"),
            rope.number("low_freq_factor"),
            rope.number("high_freq_factor"),
            rope.integer("original_max_position_embeddings", context),
        )
    raise unsupported(text.source, f"RoPE scaling {str(kind)[:40]!r}")


def _local_layers(family: str, text: Fields, layers: int) -> tuple[bool, ...]:
    """True for layers that attend to the sliding window only."""
    if family == "mistral":
        return (text.raw("sliding_window") is not None,) * layers
    if family == "gemma3":
        period = text.integer("sliding_window_pattern", text.integer("_sliding_window_pattern", 6))
        return _listed_layers(text, layers) or tuple((i + 1) % period != 0 for i in range(layers))
    if family == "llama" or not text.flag("use_sliding_window", False):
        return ()
    first = text.integer("max_window_layers", 28)
    return _listed_layers(text, layers) or tuple(i >= first for i in range(layers))


def _listed_layers(text: Fields, layers: int) -> tuple[bool, ...]:
    kinds = text.raw("layer_types")
    if kinds is None:
        return ()
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise text.unusable("layer_types", kinds, f"a list of {layers}")
    if unknown := set(map(str, kinds)) - {"full_attention", "sliding_attention"}:
        raise unsupported(text.source, f"layers of type {min(unknown)[:40]!r}")
    return tuple(kind == "sliding_attention" for kind in kinds)


def _gemma3(shape: ModelConfig, text: Fields) -> ModelConfig:
    for key in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if text.raw(key):
            raise unsupported(text.source, key)
    local = text.fields("rope_parameters").fields("sliding_attention")
    return replace(
        shape,
        local_rope=Rope(local.number("rope_theta", text.number("rope_local_base_freq", 1e4))),
        window=text.integer("sliding_window"),
        local_layers=_local_layers("gemma3", text, shape.layers),
        activation="gelu_tanh",
        embed_scale=sqrt(shape.width),
        attn_scale=text.number("query_pre_attn_scalar") ** -0.5,
    )
