"""A model's shape as the config.json that transformers, vLLM and paceline read."""

from collections.abc import Collection, Mapping
from typing import Any, Final

from paceline.convert.foreign_checkpoint import ARCHITECTURES
from paceline.errors import UnknownArchitecture
from paceline.target.weights.model_config import ModelConfig, Rope

TYPES: Final = {"gemma3": "gemma3_text"}  # where it is not the family's name
WRITTEN_FOR: Final = "5.0.0"  # of transformers; a folder that does not say has its tokenizer suspected


def config_of(
    shape: ModelConfig, names: Collection[str], dtype: str, ends: Mapping[str, int | list[int]]
) -> dict[str, Any]:
    """names: of the weights there are, canonical. ends: ids of the tokens that begin and end a text."""
    activation = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[shape.activation]
    return {
        "architectures": [ARCHITECTURES[shape.architecture]],
        "model_type": TYPES.get(shape.architecture, shape.architecture),
        "transformers_version": WRITTEN_FOR,
        "dtype": dtype,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.width,
        "intermediate_size": shape.ff_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_context,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": "head" not in names,
        ("hidden_activation" if shape.architecture == "gemma3" else "hidden_act"): activation,
        **_family(shape, names),
        **_positions(shape),
        **ends,
    }


def _family(shape: ModelConfig, names: Collection[str]) -> dict[str, Any]:
    biased = any(name.endswith("q_bias") for name in names)
    if shape.architecture == "llama":
        if any(shape.local_layers):
            raise UnknownArchitecture(
                "some layers of the model see a window only, which config.json cannot say of a llama: "
                "start from the model's own folder instead"
            )
        return {"attention_bias": biased}
    if shape.architecture == "mistral":
        return {"sliding_window": shape.window or None}
    if shape.architecture in ("qwen2", "qwen3"):
        bias = {"attention_bias": biased} if shape.architecture == "qwen3" else {}
        return {**bias, "use_sliding_window": any(shape.local_layers), **_windows(shape)}
    return {"query_pre_attn_scalar": _whole(shape.attn_scale**-2), **_windows(shape)}


def _windows(shape: ModelConfig) -> dict[str, Any]:
    if not any(shape.local_layers):
        return {}
    kinds = ["sliding_attention" if local else "full_attention" for local in shape.local_layers]
    return {"sliding_window": shape.window, "layer_types": kinds}


def _positions(shape: ModelConfig) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_theta": shape.rope.theta, "rope_scaling": _scaling(shape.rope)}
    if shape.local_rope is not None:
        found["rope_local_base_freq"] = shape.local_rope.theta
    return found


def _scaling(rope: Rope) -> dict[str, Any] | None:
    if rope.divisors:
        raise UnknownArchitecture(
            "a GGUF file that lists RoPE's divisors has no config.json of the same meaning: "
            "start from the model's own folder instead"
        )
    if rope.kind == "none":
        return None
    if rope.kind == "linear":
        return {"rope_type": "linear", "factor": rope.factor}
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_context,
    }


def _whole(value: float) -> float | int:
    """Where a number is whole but for rounding, it is."""
    return round(value) if abs(value - round(value)) < 1e-6 * value else value
