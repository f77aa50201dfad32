"""A Hugging Face folder (config.json and safetensors) as a checkpoint."""

import re
from collections.abc import Mapping
from dataclasses import replace
from math import log, sqrt
from pathlib import Path
from typing import Final

from paceline.errors import CorruptModel
from paceline.target.weights.checkpoint import (
    FAMILIES,
    JOINED_EXPERTS,
    Checkpoint,
    Fields,
    require_family,
    split_joined,
    unsupported,
)
from paceline.target.weights.model_config import Experts, ModelConfig, Rope, longrope_amplitude
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
DEFAULTS: Final[Mapping[str, Mapping[str, float]]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    "mixtral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096},
    "qwen3": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
    },
    "phi3": {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    "gemma2": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
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
    "gpt_oss": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
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
GEMMA_PARTS: Final = PARTS | {
    "post_attention_layernorm.weight": "post_attn_norm",
    "pre_feedforward_layernorm.weight": "ffn_norm",
    "post_feedforward_layernorm.weight": "post_ffn_norm",
}


FAMILY_PARTS: Final[Mapping[str, Mapping[str, str]]] = {  # those of other families are PARTS
    "gemma2": GEMMA_PARTS,
    "gemma3": GEMMA_PARTS,
    "phi3": PARTS | {"self_attn.qkv_proj.weight": "qkv", "mlp.gate_up_proj.weight": "gate_up"},
    "qwen3_moe": PARTS | {"mlp.gate.weight": "router"},
    "mixtral": PARTS | {"block_sparse_moe.gate.weight": "router"},
    "gpt_oss": PARTS
    | {"self_attn.sinks": "sinks", "mlp.router.weight": "router", "mlp.router.bias": "router_bias"}
    | {f"mlp.experts.{name.replace('experts', 'proj')}": name for name in JOINED_EXPERTS},
}
EXPERT: Final = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
EXPERT_PARTS: Final = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
DEFAULT_THETA: Final = {"gemma3": 1e6, "mixtral": 1e6, "gpt_oss": 1.5e5}  # of other families 1e4


def open_folder(folder: Path) -> Checkpoint:
    config = read_json(folder / CONFIG)
    family, text = _family(folder, config)
    gemma, shape = family in ("gemma2", "gemma3"), _shape(family, text)
    tied = text.flag("tie_word_embeddings", gemma)
    tensors, unmapped = _canonical_entries(
        folder, tensor_entries(folder), FAMILY_PARTS.get(family, PARTS), tied
    )
    return Checkpoint(
        source=folder.name,
        shape=shape,
        tensors=split_joined(tensors, shape),
        unmapped=unmapped,
        tied=tied,
        interleaved=False,
        norm_shift=1.0 if gemma else 0.0,
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
    part = (parts.get(match[2]) or _expert_part(match[2])) if match else None
    return f"layers.{int(match[1])}.{part}" if match and part else None


def _expert_part(name: str) -> str | None:
    match = EXPERT.fullmatch(name)
    part = EXPERT_PARTS.get(match[2]) if match else None
    return f"experts.{int(match[1])}.{part}" if match and part else None


def _shape(family: str, text: Fields) -> ModelConfig:
    width, heads = text.integer("hidden_size"), text.integer("num_attention_heads")
    context = text.integer("max_position_embeddings")
    layers = text.integer("num_hidden_layers", maximum=1000)
    head_dim = text.integer("head_dim", max(1, width // heads))
    gemma = family in ("gemma2", "gemma3")
    _require_activation(text, "gelu_pytorch_tanh" if gemma else "silu")
    shape = ModelConfig(
        architecture=family,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=text.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        ff_width=text.integer("intermediate_size"),
        vocab_size=text.integer("vocab_size"),
        max_context=context,
        norm_eps=text.number("rms_norm_eps", 1e-6),
        rope=_rope(family, text, head_dim, context),
        experts=_experts(family, text, layers),
    )
    if gemma:
        return _gemma(shape, text)
    if family == "gpt_oss":
        limit, slope = text.number("swiglu_limit"), text.number("swiglu_alpha")
        shape = replace(shape, activation="clamped_swiglu", gate_limit=limit, gate_slope=slope)
    local = _local_layers(family, text, shape.layers)
    if not any(local) or (window := text.integer("sliding_window")) >= context:
        return shape
    return replace(shape, window=window, local_layers=local)


def _experts(family: str, text: Fields, layers: int) -> Experts | None:
    if family not in ("mixtral", "qwen3_moe", "gpt_oss"):
        return None
    count = text.integer("num_local_experts", text.integer("num_experts", 128), maximum=4096)
    used = text.integer("num_experts_per_tok", maximum=count)
    if family in ("mixtral", "gpt_oss"):
        return Experts(count, used, text.integer("intermediate_size"), (True,) * layers, renormalise=True)
    period, dense = text.integer("decoder_sparse_step", 1), text.raw("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise text.unusable("mlp_only_layers", dense, "a list of layers")
    sparse = tuple((i + 1) % period == 0 and i not in dense for i in range(layers))
    width = text.integer("moe_intermediate_size")
    return Experts(count, used, width, sparse, renormalise=text.flag("norm_topk_prob", False))


def _require_activation(text: Fields, expected: str) -> None:
    activation = text.raw("hidden_activation") or text.raw("hidden_act") or expected
    if activation != expected:
        raise unsupported(text.source, f"the activation {str(activation)[:40]!r}")


def _rope(family: str, text: Fields, head_dim: int, context: int) -> Rope:
    """Reads `rope_scaling` beside `rope_theta`, or `rope_parameters` that hold both, by layer type or not."""
    parameters = text.fields("rope_parameters")
    flat = parameters.fields("full_attention").values or parameters.values
    rope = Fields(text.source, {**flat, **text.fields("rope_scaling").values})
    if family == "gpt_oss" and not rope.values:
        raise text.unusable("rope_scaling", None, "YaRN's settings")
    theta = rope.number("rope_theta", text.number("rope_theta", DEFAULT_THETA.get(family, 1e4)))
    kind = rope.raw("rope_type") or rope.raw("type") or "default"
    part = rope.number("partial_rotary_factor", text.number("partial_rotary_factor", 1.0, 1.0), 1.0)
    if part != 1 and family != "phi3":
        raise unsupported(text.source, "RoPE on a part of each head")
    plain = Rope(theta, dims=int(head_dim * part) if part != 1 else 0)
    if kind == "default":
        return plain
    if kind == "linear":
        return replace(plain, kind="linear", factor=rope.number("factor"))
    if kind == "llama3":
        return replace(
            plain,
            kind="llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_context=rope.integer("original_max_position_embeddings", context),
        )
    if kind == "yarn":
        return _yarn(plain, rope, context)
    if kind in ("longrope", "su"):
        return _longrope(plain, rope, text, head_dim, context)
    raise unsupported(text.source, f"RoPE scaling {str(kind)[:40]!r}")


def _yarn(plain: Rope, rope: Fields, context: int) -> Rope:
    original = rope.integer("original_max_position_embeddings", context)
    factor = rope.number("factor", context / original)

    def amplitude(by: float) -> float:
        return 0.1 * by * log(factor) + 1 if factor > 1 else 1.0

    amplitudes = rope.raw("mscale"), rope.raw("mscale_all_dim")
    usual = amplitude(1)
    if all(amplitudes):
        usual = amplitude(rope.number("mscale")) / amplitude(rope.number("mscale_all_dim"))
    return replace(
        plain,
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        whole_bounds=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", usual),
    )


def _longrope(plain: Rope, rope: Fields, text: Fields, head_dim: int, context: int) -> Rope:
    original = text.integer(
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", context)
    )
    count = (plain.dims or head_dim) // 2
    return replace(
        plain,
        divisors=rope.numbers("long_factor", count),
        short_divisors=rope.numbers("short_factor", count),
        original_context=original,
        attention_factor=rope.number(
            "attention_factor", longrope_amplitude(rope.number("factor", context / original), original)
        ),
    )


def _local_layers(family: str, text: Fields, layers: int) -> tuple[bool, ...]:
    """True for layers that attend to the sliding window only."""
    if family in ("mistral", "mixtral", "phi3"):
        return (text.raw("sliding_window") is not None,) * layers
    if family in ("gemma2", "gpt_oss"):
        return _listed_layers(text, layers) or tuple(i % 2 == 0 for i in range(layers))
    if family == "gemma3":
        period = text.integer("sliding_window_pattern", text.integer("_sliding_window_pattern", 6))
        return _listed_layers(text, layers) or tuple((i + 1) % period != 0 for i in range(layers))
    if family == "llama" or not text.flag("use_sliding_window", False):
        return ()
    if family == "qwen3_moe":
        return (True,) * layers
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


def _gemma(shape: ModelConfig, text: Fields) -> ModelConfig:
    caps = {key: text.raw(f"{key}_logit_softcapping") for key in ("attn", "final")}
    if shape.architecture == "gemma3" and any(caps.values()):
        raise unsupported(text.source, "soft-capping in a gemma3")
    if text.raw("use_bidirectional_attention"):
        raise unsupported(text.source, "use_bidirectional_attention")
    shape = replace(
        shape,
        window=text.integer("sliding_window"),
        local_layers=_local_layers(shape.architecture, text, shape.layers),
        activation="gelu_tanh",
        embed_scale=sqrt(shape.width),
        attn_scale=text.number("query_pre_attn_scalar") ** -0.5,
        attn_softcap=text.number("attn_logit_softcapping") if caps["attn"] else 0.0,
        logit_softcap=text.number("final_logit_softcapping") if caps["final"] else 0.0,
    )
    if shape.architecture == "gemma2":
        return shape
    local = text.fields("rope_parameters").fields("sliding_attention")
    theta = local.number("rope_theta", text.number("rope_local_base_freq", 1e4))
    return replace(shape, local_rope=Rope(theta))
