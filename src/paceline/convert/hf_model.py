"""A model as a Hugging Face folder that transformers, vLLM and paceline load: weights, config, tokenizer.

What a model that came as a folder says of itself stays word for word; of a GGUF file it is written anew.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from paceline.convert.export import Dtype, known_word
from paceline.convert.files import require_new, write_json
from paceline.convert.model_config import config_of
from paceline.errors import UsageError
from paceline.target.weights.hf_folder import CONFIG, GEMMA3_PARTS, HEAD, OUTER, PARTS
from paceline.target.weights.model_config import ModelConfig
from paceline.target.weights.reader import load
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
    """A GGUF file, with the weights as paceline computes with them, into a new folder.

    float32 keeps every weight as it was decoded.
    """
    if path.is_dir():
        raise UsageError(f"{path.name} is a folder already: other engines load it as it is")
    known_word(dtype, Dtype)
    require_new(out)
    weights = load(path)
    write_model(out, path, weights.shape, weights.tensors, getattr(torch, dtype))
    return out


def write_model(
    folder: Path,
    source: Path,
    shape: ModelConfig,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """source: the model that the weights are of, or were before training. tensors: by canonical name."""
    from safetensors.torch import save_file

    if source.resolve() == folder.resolve():
        raise UsageError(f"{folder.name} is the model itself: give another folder for the trained one")
    folder.mkdir(parents=True, exist_ok=True)
    name = str(dtype).removeprefix("torch.")
    if source.is_dir():
        _copy_description(source, folder, name)
    else:
        _write_description(source, folder, shape, tensors, name)
    stored = {n: tensor.to("cpu", dtype).contiguous() for n, tensor in _named(shape, tensors)}
    beside = folder / f"{SINGLE}.new"
    save_file(stored, beside, {"format": "pt"})
    beside.chmod((folder / CONFIG).stat().st_mode)  # safetensors lets nobody else read what it writes
    beside.replace(folder / SINGLE)


def _named(shape: ModelConfig, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """As the family's checkpoints name and keep them."""
    gemma = shape.architecture == "gemma3"
    parts = {ours: theirs for theirs, ours in (GEMMA3_PARTS if gemma else PARTS).items()}
    outer = {ours: PREFIX + theirs for theirs, ours in OUTER.items()} | {"head": HEAD}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        kept = tensor - 1.0 if gemma and part.endswith("norm") else tensor
        yield (f"{PREFIX}{layer}.{parts[part]}" if layer else outer[name]), kept


def _copy_description(source: Path, folder: Path, dtype: str) -> None:
    config = read_json(source / CONFIG)
    text = config.get("text_config")
    if isinstance(text, dict):  # a vision tower stands beside it, which is not trained and not kept
        config = {**text, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    dropped = ("torch_dtype", "quantization_config")
    write_json(folder / CONFIG, {k: v for k, v in config.items() if k not in dropped} | {"dtype": dtype})
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
    write_json(folder / CONFIG, config_of(shape, tensors, dtype, ends))
    write_json(folder / "generation_config.json", ends)
    write_json(folder / "tokenizer.json", _tokenizer(tokenizer))
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": tokenizer.adds_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_context,
        **names,
    }
    if template := tokenizer.templates.get("default"):
        about["chat_template"] = template
    write_json(folder / "tokenizer_config.json", about)


def _tokenizer(tokenizer: "Tokenizer") -> dict[str, Any]:
    """With a step that puts the begin token first, where the model wants one."""
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
