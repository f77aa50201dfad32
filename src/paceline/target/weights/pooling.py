"""How a model pools its hidden states to embeddings, by its files.

GGUF: `{architecture}.pooling_type`, as llama.cpp writes it. A folder: `1_Pooling/config.json`, as
sentence-transformers does.
"""

import json
from pathlib import Path
from typing import Any, Final

from paceline.errors import CorruptModel
from paceline.gguf_header import read_header

DEFAULT: Final = "last"  # of a decoder, whose last token alone has seen all the others
_GGUF: Final = {0: DEFAULT, 1: "mean", 2: "cls", 3: "last", 4: "rank"}  # 0: the model says nothing
_FOLDER: Final = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_FILE: Final = Path("1_Pooling", "config.json")


def read_pooling(model: Path) -> str:
    """mean, last or cls, or the name of another kind; last where the files say nothing."""
    return _of_folder(model) if model.is_dir() else _of_gguf(model)


def _of_gguf(path: Path) -> str:
    metadata = read_header(path, long_arrays=False).metadata
    number = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
    return _GGUF.get(number, f"type {number}")


def _of_folder(folder: Path) -> str:
    path = folder / _FILE
    if not path.is_file():
        return DEFAULT
    try:
        config: Any = json.loads(path.read_text("utf-8"))
        named = config.get("pooling_mode")
        kinds = [kind for key, kind in _FOLDER.items() if config.get(key)]
    except (ValueError, AttributeError):
        raise CorruptModel(f"{_FILE} of {folder.name} is damaged: fetch it again") from None
    if isinstance(named, str):
        return {"lasttoken": "last"}.get(named, named)
    return "+".join(kinds) or DEFAULT
