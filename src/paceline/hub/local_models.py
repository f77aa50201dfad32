"""Models on this machine: names to paths, and which of them are complete.

home/models/NAME/        a catalogue model
    MANIFEST             written last: without it the model is incomplete
    partial/             of an unfinished pull
home/hub/OWNER/NAME/     a hub repository, renamed from NAME.partial when it is complete
"""

import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from paceline.atomic import read_json
from paceline.errors import ModelError, PullError, UnknownModel
from paceline.hub.catalog import CATALOGUE, CatalogueModel
from paceline.paths import home

MANIFEST: Final = "paceline.json"
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Installed:
    """One line of the list of models; path is where the model is, or would be."""

    name: str
    path: Path
    size: int  # bytes
    licence: str
    pulled: bool


def resolve(name_or_path: str | os.PathLike[str]) -> Path:
    """The folder or GGUF file of a model; a catalogue name wins over a folder of the same name."""
    name = os.fspath(name_or_path)
    if model := CATALOGUE.get(name):
        if is_pulled(model):
            return model_file(model)
        raise UnknownModel(f"model {name!r} has not been pulled yet: run `paceline pull {name}`")
    if path := local_model(name):
        return path
    if is_hub_id(name) and (hub_folder(name) / MANIFEST).is_file():
        return hub_folder(name)
    raise unknown(name)


def installed() -> list[Installed]:
    """Every catalogue model, pulled or not, then every pulled hub repository."""
    known = [
        Installed(model.name, model_file(model), model.size, model.licence, is_pulled(model))
        for model in CATALOGUE.values()
    ]
    manifests = sorted((home() / "hub").glob(f"*/*/{MANIFEST}"))
    return known + [_installed_from_hub(path.parent) for path in manifests if is_hub_id(_hub_id(path.parent))]


def local_model(name: str) -> Path | None:
    """The folder or GGUF file of that name; None when there is nothing of that name."""
    path = Path(os.path.expanduser(name))
    if not name or not os.path.exists(path):  # unlike those of Path, these two never raise
        return None
    try:
        if path.is_file() and path.suffix.lower() == ".gguf":
            return path
        if (path / "config.json").is_file():
            return path
        ggufs = sorted(path.glob("*.gguf"))
    except OSError as error:
        raise ModelError.unreadable(path, error) from error
    hint = (
        f"name the file in it: {ggufs[0]}" if ggufs else "expected a folder with config.json or a .gguf file"
    )
    raise UnknownModel(f"{name!r} is not a model: {hint}")


def is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and not name.endswith((".gguf", ".partial"))


def model_folder(model: CatalogueModel) -> Path:
    return home() / "models" / model.name


def model_file(model: CatalogueModel) -> Path:
    return model_folder(model) / model.file


def hub_folder(repository: str) -> Path:
    return home() / "hub" / repository


def is_pulled(model: CatalogueModel) -> bool:
    """A quick check: the manifest names this file and the size is right."""
    manifest = read_json(model_folder(model) / MANIFEST)
    file = model_file(model)
    return manifest.get("sha256") == model.sha256 and file.is_file() and file.stat().st_size == model.size


def unknown(name: str) -> UnknownModel:
    near = get_close_matches(name, CATALOGUE, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    hub = f"run `paceline pull {name}` to get it from the model hub, or " if is_hub_id(name) else ""
    return UnknownModel(
        f"no model, folder or file {name!r}: {hint}{hub}"
        f"use one of {', '.join(CATALOGUE)}, a folder with config.json or a .gguf file"
    )


def _hub_id(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def _installed_from_hub(folder: Path) -> Installed:
    manifest = read_json(folder / MANIFEST)
    size, licence = manifest.get("size", 0), manifest.get("licence", "unknown")
    return Installed(_hub_id(folder), folder, size, licence, pulled=True)


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def require_space(folder: Path, needed: int, name: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PullError(
            f"pulling {name} needs {needed / 1e6:,.0f} MB under {folder}, "
            f"where {free / 1e6:,.0f} MB are free: "
            "make room, or set PACELINE_HOME to a folder on a larger disk"
        )
