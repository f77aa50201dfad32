"""Exports a trained drafter in the speculators format, which vLLM loads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch

from paceline.convert import dspark, eagle3
from paceline.convert.foreign_checkpoint import OutputCheckpoint, TargetModel, require_new, write_folder
from paceline.errors import UnknownArchitecture, UsageError
from paceline.heads.head_checkpoint import Card, load

Format = Literal["speculators"]
Dtype = Literal["float32", "bfloat16", "float16"]
METHODS: Final = {"block": "dspark", "eagle": "eagle3"}  # kind of head -> its name in the format
WRITERS: Final[dict[str, Callable[[Any, Card, TargetModel, str], OutputCheckpoint]]] = {
    "block": dspark.to_checkpoint,
    "eagle": eagle3.to_checkpoint,
}


def known_word(given: str, known: Any) -> None:
    if given not in get_args(known):
        raise UsageError(f"{given!r} is not known: expected one of {', '.join(get_args(known))}")


def export(
    folder: Path,
    model: Path,
    out: Path,
    format: Format = "speculators",
    *,
    dtype: Dtype = "float32",
    verifier: str = "",
) -> Path:
    """Writes config.json and model.safetensors into `out`, a new folder.

    model: the target that it was trained for. verifier: where the other engine finds that model, a folder or
    a name on a hub; without one, its name here. float32 keeps every weight exactly.
    """
    known_word(format, Format)
    known_word(dtype, Dtype)
    require_new(out)
    target = TargetModel.open(model)
    loaded = load(folder, target.embeddings)
    if loaded.card.kind not in WRITERS:
        raise UnknownArchitecture(
            f"{folder.name} is a {loaded.card.kind} drafter, which the format {format} does not know: "
            f"export one of kind {' or '.join(WRITERS)}"
        )
    name = verifier or (str(model) if model.is_dir() else loaded.card.target)
    output = WRITERS[loaded.card.kind](loaded.net, loaded.card, target, name)
    write_folder(out, output, getattr(torch, dtype))
    return out
