"""A model that paceline runs, as a Hugging Face folder that other engines load."""

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from paceline.errors import SettingError, UnknownArchitecture
from paceline.exchange.export import Dtype, known_word
from paceline.exchange.files import require_new, write_folder, write_json
from paceline.exchange.swapped import ARCHITECTURES, Written
from paceline.target.folder import GEMMA3_PARTS, PARTS
from paceline.target.load import load
from paceline.target.shape import ModelShape, Rope

TYPES: Final = {"gemma3": "gemma3_text"}  # where it is not the family's name


def export_model(path: Path, out: Path, *, dtype: Dtype = "float32") -> Path:
    """Weights as paceline computes with them, settings, tokenizer and chat template, into a new folder.

    float32 keeps every weight as it was decoded.
    """
    if path.is_dir():
        raise SettingError(f"{path.name} is a folder already: other engines load it as it is")
    known_word(dtype, Dtype)
    require_new(out)
    weights = load(path)
    shape = weights.shape
    parts = {ours: theirs for theirs, ours in (GEMMA3_PARTS if _is_gemma(shape) else PARTS).items()}
    tensors = {_name(name, parts): _stored(name, t, shape) for name, t in weights.tensors.items()}
    config = _config(shape, tied="head" not in weights.tensors, biased="layers.0.q_bias" in weights.tensors)
    ends = _write_text(path, out)
    write_folder(out, Written({**config, "eos_token_id": ends}, tensors), getattr(torch, dtype))
    return out


def _name(ours: str, parts: dict[str, str]) -> str:
    outer = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
    if ours in outer:
        return outer[ours]
    _, layer, part = ours.split(".")
    return f"model.layers.{layer}.{parts[part]}"


def _stored(name: str, tensor: Tensor, shape: ModelShape) -> Tensor:
    return tensor - 1 if _is_gemma(shape) and name.endswith("norm") else tensor


def _is_gemma(shape: ModelShape) -> bool:
    return shape.architecture == "gemma3"


def _config(shape: ModelShape, tied: bool, biased: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[shape.architecture]],
        "model_type": TYPES.get(shape.architecture, shape.architecture),
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.width,
        "intermediate_size": shape.ff_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_context,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": tied,
        "attention_bias": biased,
        "rope_theta": shape.rope.theta,
        "rope_parameters": _rope(shape.rope),
    }
    if _is_gemma(shape):
        kinds = ["sliding_attention" if local else "full_attention" for local in shape.local_layers]
        local = shape.local_rope or shape.rope
        return config | {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": round(shape.attn_scale**-2),
            "sliding_window": shape.window,
            "layer_types": kinds,
            "rope_local_base_freq": local.theta,
            "rope_parameters": {"full_attention": _rope(shape.rope), "sliding_attention": _rope(local)},
        }
    if shape.architecture == "mistral":  # whose layers have a window unless none is named
        config["sliding_window"] = shape.window or None
    elif any(shape.local_layers):
        raise UnknownArchitecture(
            f"some layers of the model see a window only, which is not written for {shape.architecture}: "
            "give other engines the folder it was made from"
        )
    return config | {"hidden_act": "silu"}


def _rope(rope: Rope) -> dict[str, Any]:
    if rope.divisors:
        raise UnknownArchitecture(
            "the model lists its rotary frequencies one by one, which config.json cannot say: "
            "give other engines the folder it was made from"
        )
    common = {"rope_type": "default" if rope.kind == "none" else rope.kind, "rope_theta": rope.theta}
    if rope.kind == "linear":
        return common | {"factor": rope.factor}
    if rope.kind == "llama3":
        return common | {
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_context,
        }
    return common


def _write_text(path: Path, out: Path) -> list[int]:
    """tokenizer.json and what stands beside it; gives the tokens that end an answer."""
    from paceline.text.gguf_vocab import vocabulary_from_gguf

    found = vocabulary_from_gguf(path)
    out.mkdir(parents=True, exist_ok=True)
    found.backend.save(str(out / "tokenizer.json"))
    ends = sorted(found.eos_ids)
    names = {name: word for name, word in found.names.items() if name in ("bos_token", "eos_token")}
    table: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": found.adds_bos}
    if "default" in found.templates:
        table["chat_template"] = found.templates["default"]
    table |= names
    write_json(out / "tokenizer_config.json", table)
    write_json(out / "generation_config.json", {"eos_token_id": ends, "bos_token_id": found.bos_id})
    return ends
