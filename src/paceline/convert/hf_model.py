"""Writes a model as a Hugging Face folder that transformers, vLLM and paceline load.

Config and tokenizer of a model that came as a folder are copied; those of a GGUF file are generated.
"""

import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from paceline.atomic import remove_unfinished, replacing, write_json
from paceline.convert.export import Dtype, known_word
from paceline.convert.foreign_checkpoint import ARCHITECTURES, require_new
from paceline.errors import UnknownArchitecture, UsageError
from paceline.target.weights.hf_folder import CONFIG, GEMMA_PARTS, HEAD, OUTER, PARTS
from paceline.target.weights.model_config import ModelConfig, Rope
from paceline.target.weights.reader import load, open_checkpoint
from paceline.target.weights.safetensors import SINGLE, read_json

if TYPE_CHECKING:
    from paceline.text import Tokenizer

TOKENIZER: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
COPIED: Final = (*TOKENIZER, "generation_config.json")
PREFIX: Final = "model."


def export_model(path: Path, out: Path, *, dtype: Dtype = "float32") -> Path:
    """Writes a GGUF file, dequantized as paceline computes with it, into a new folder.

    float32 keeps every weight as it was decoded.
    """
    if path.is_dir():
        raise UsageError(f"{path.name} is a folder already: other engines load it as it is")
    known_word(dtype, Dtype)
    require_new(out)
    require_writable(open_checkpoint(path).shape)
    weights = load(path)
    write_model(out, path, weights.shape, weights.tensors, getattr(torch, dtype))
    return out


def require_writable(shape: ModelConfig) -> None:
    if shape.architecture not in WRITABLE:
        known = ", ".join(WRITABLE)
        raise UnknownArchitecture(
            f"models of the {shape.architecture} family cannot be written as a folder; known: {known}"
        )


def write_model(
    folder: Path,
    source: Path,
    shape: ModelConfig,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """source: the model of the weights, before training. tensors: by canonical name."""
    from safetensors.torch import save_file

    require_writable(shape)
    if source.resolve() == folder.resolve():
        raise UsageError(f"{folder.name} is the model itself: give another folder for the trained one")
    folder.mkdir(parents=True, exist_ok=True)
    name = str(dtype).removeprefix("torch.")
    if source.is_dir():
        _copy_description(source, folder, name)
    else:
        _write_description(source, folder, shape, tensors, name)
    stored = {n: tensor.to("cpu", dtype).contiguous() for n, tensor in _named(shape, tensors)}
    remove_unfinished(folder / SINGLE)
    with replacing(folder / SINGLE) as fresh:
        save_file(stored, fresh, {"format": "pt"})
        fresh.chmod((folder / CONFIG).stat().st_mode)  # safetensors lets nobody else read what it writes


def _named(shape: ModelConfig, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Under the names of the family's checkpoints."""
    gemma = shape.architecture == "gemma3"
    parts = {ours: theirs for theirs, ours in (GEMMA_PARTS if gemma else PARTS).items()}
    outer = {ours: PREFIX + theirs for theirs, ours in OUTER.items()} | {"head": HEAD}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        stored = tensor - 1.0 if gemma and part.endswith("norm") else tensor
        yield (f"{PREFIX}{layer}.{parts[part]}" if layer else outer[name]), stored


def _copy_description(source: Path, folder: Path, dtype: str) -> None:
    config = read_json(source / CONFIG)
    text = config.get("text_config")
    if isinstance(text, dict):  # a multimodal model: its vision tower is dropped
        config = {**text, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    dropped = ("torch_dtype", "quantization_config")
    write_json(
        folder / CONFIG,
        {k: v for k, v in config.items() if k not in dropped} | {"dtype": dtype},
        indent=2,
        ascii=False,
    )
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _write_description(
    source: Path, folder: Path, shape: ModelConfig, tensors: Mapping[str, Tensor], dtype: str
) -> None:
    from paceline.text import Tokenizer

    tokenizer = Tokenizer.load(source)
    names = tokenizer.names
    ends: dict[str, int | list[int]] = {"eos_token_id": sorted(tokenizer.eos_ids)}
    if tokenizer.bos_id is not None:
        ends["bos_token_id"] = tokenizer.bos_id
    write_json(folder / CONFIG, config_of(shape, tensors, dtype, ends), indent=2, ascii=False)
    write_json(folder / "generation_config.json", ends, indent=2, ascii=False)
    write_json(folder / "tokenizer.json", _tokenizer(tokenizer), indent=2, ascii=False)
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": tokenizer.adds_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_context,
        **names,
    }
    if template := tokenizer.templates.get("default"):
        about["chat_template"] = template
    write_json(folder / "tokenizer_config.json", about, indent=2, ascii=False)


def _tokenizer(tokenizer: "Tokenizer") -> dict[str, Any]:
    """tokenizer.json, with a post-processor that adds the BOS token if the model has one."""
    table: dict[str, Any] = json.loads(tokenizer.to_json())
    begin = tokenizer.names.get("bos_token")
    if tokenizer.adds_bos and begin is not None:
        first = {"SpecialToken": {"id": begin, "type_id": 0}}
        text, other = ({"Sequence": {"id": which, "type_id": 0}} for which in "AB")
        table["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [first, text],
            "pair": [first, text, first, other],
            "special_tokens": {begin: {"id": begin, "ids": [tokenizer.bos_id], "tokens": [begin]}},
        }
    return table


WRITABLE: Final = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
TYPES: Final = {"gemma3": "gemma3_text"}  # where it is not the family's name
WRITTEN_FOR: Final = "5.0.0"  # version of transformers: it distrusts the tokenizer of a folder without one


def config_of(
    shape: ModelConfig, names: Collection[str], dtype: str, ends: Mapping[str, int | list[int]]
) -> dict[str, Any]:
    """names: canonical names of the weights. ends: BOS and EOS ids."""
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
    config: dict[str, Any] = {"rope_theta": shape.rope.theta, "rope_scaling": _scaling(shape.rope)}
    if shape.local_rope is not None:
        config["rope_local_base_freq"] = shape.local_rope.theta
    return config


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
    if rope.kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_context,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.whole_bounds,
            "attention_factor": rope.attention_factor,
        }
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_context,
    }


def _whole(value: float) -> float | int:
    """An int where the value is whole but for rounding."""
    return round(value) if abs(value - round(value)) < 1e-6 * value else value
