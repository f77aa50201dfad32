"""Checkpoints of other formats on disk: config.json and the tensors beside it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from paceline.convert.foreign_checkpoint import Found, Written
from paceline.errors import CorruptModel, UnknownModel, UsageError
from paceline.strings import short
from paceline.target.weights.checkpoint import Fields
from paceline.target.weights.safetensors import INDEX, SINGLE, read_json

CONFIG: Final = "config.json"
PICKLED: Final = ("pytorch_model.bin", "medusa_lm_head.pt")
PLAIN: Final = (SINGLE, "medusa_lm_head.safetensors")


def write_folder(out: Path, written: Written, dtype: torch.dtype) -> None:
    """Numbers that are not whole get `dtype`."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in written.tensors.items()
    }
    save_file(tensors, out / SINGLE, metadata={"format": "pt"})
    write_json(out / CONFIG, {**written.config, "dtype": str(dtype).removeprefix("torch.")})


def write_json(path: Path, table: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def require_new(out: Path) -> None:
    """A folder that holds something else is never written into."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there already: name a new folder, or remove it first")


def read_folder(folder: Path) -> Found:
    if not folder.is_dir():
        raise UnknownModel(f"there is no folder {folder}: expected one with {CONFIG} and weights")
    try:
        config = read_json(folder / CONFIG)
    except OSError as error:
        raise CorruptModel(f"{folder.name}/{CONFIG} cannot be read: {error}") from None
    return Found(folder.name, Fields(f"{folder.name}/{CONFIG}", config), _tensors(folder))


def _tensors(folder: Path) -> dict[str, Tensor]:
    try:
        tensors = _stored(folder)
    except Exception as error:  # torch has many
        raise CorruptModel(f"the weights in {folder.name} are damaged: {str(error)[:120]}") from None
    if tensors is None:
        raise CorruptModel(f"{folder.name} has no weights: expected one of {', '.join((*PLAIN, *PICKLED))}")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise CorruptModel(
                f"the weights in {folder.name} are damaged: {short(name)} is {type(tensor).__name__}, "
                "expected a name and a tensor"
            )
    return tensors


def _stored(folder: Path) -> dict[str, Tensor] | None:
    from safetensors.torch import load_file

    if (folder / INDEX).is_file():
        names = sorted(set(read_json(folder / INDEX)["weight_map"].values()))
        return {name: t for shard in names for name, t in load_file(_inside(folder, shard)).items()}
    for name in PLAIN:
        if (folder / name).is_file():
            return dict(load_file(folder / name))
    for name in PICKLED:
        if (folder / name).is_file():
            return dict(torch.load(folder / name, map_location="cpu", weights_only=True))
    return None


def _inside(folder: Path, name: str) -> Path:
    if Path(name).name != name:
        raise ValueError(f"{INDEX} names {name[:80]!r}, which is not a file beside it")
    return folder / name
