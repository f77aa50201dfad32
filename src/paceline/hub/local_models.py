"""Models on this machine: names to paths, and which of them are complete.

home/models/NAME/        a catalogue model
    MANIFEST             written last: without it the model is incomplete
    partial/             of an unfinished pull
home/hub/OWNER/NAME/          a hub repository of safetensors, renamed from NAME.partial when it is complete
home/hub/OWNER/NAME:Q4_K_M/   a GGUF model of one; MANIFEST names the file to open
home/hub/OWNER/NAME@REV...    the same of a revision that was named, whatever else of the repository is here
"""

import hashlib
import os
import shutil
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from paceline.atomic import read_json
from paceline.errors import ModelError, PullError, UnknownModel
from paceline.hub.catalog import CATALOGUE, CatalogueModel
from paceline.hub.progress import bytes_under
from paceline.hub.repository import UNFINISHED, HubName, preference, quantisation
from paceline.paths import home

MANIFEST: Final = "paceline.json"
PARTIAL: Final = "partial"  # folder of an unfinished pull, in that of a catalogue model
SAFETENSORS: Final = "safetensors"


@dataclass(frozen=True, slots=True)
class Installed:
    """One line of the list of models; path is where the model is, or would be."""

    name: str
    path: Path
    size: int  # bytes; of an unfinished pull from a hub those that have arrived
    licence: str
    pulled: bool
    format: str  # the quantisation of a GGUF file, or "safetensors"
    arrived: int  # bytes on the disk
    revision: str = ""  # the commit of a repository; empty: not of a hub, or not whole


def resolve(name_or_path: str | os.PathLike[str]) -> Path:
    """The folder or GGUF file of a model; a catalogue name wins over a folder of the same name."""
    name = os.fspath(name_or_path)
    if model := CATALOGUE.get(name):
        if is_pulled(model):
            return model_file(model)
        raise UnknownModel(f"model {name!r} has not been pulled yet: run `paceline pull {name}`")
    if path := local_model(name):
        return path
    if (hub := HubName.parse(name)) and (folder := pulled_folder(hub)):
        return _opened(folder)
    raise unknown(name)


def installed() -> list[Installed]:
    """Every catalogue model, pulled or not, then what was pulled from a hub, whole or not."""
    known = [
        Installed(
            model.name,
            model_file(model),
            model.size,
            model.licence,
            is_pulled(model),
            quantisation(model.file),
            bytes_under(model_folder(model)),
        )
        for model in CATALOGUE.values()
    ]
    return known + [_installed_from_hub(name, folder) for name, folder in _hub_models()]


def _hub_models() -> list[tuple[HubName, Path]]:
    """Of each model from a hub the name and the folder, which ends in UNFINISHED while files are missing."""
    found: dict[HubName, Path] = {}
    for folder in sorted((home() / "hub").glob("*/*/")):  # a whole one before an unfinished one
        name = HubName.of_folder(f"{folder.parent.name}/{folder.name.removesuffix(UNFINISHED)}")
        if name and (folder.name.endswith(UNFINISHED) or (folder / MANIFEST).is_file()):
            found.setdefault(name, folder)
    return list(found.items())


def arrived(name: str) -> int:
    """Bytes on the disk of a pull that did not end, of any quantisation where the name has none."""
    parsed = HubName.parse(name)
    return sum(
        line.arrived
        for line in installed()
        if not line.pulled and (line.name == name or (parsed is not None and _is_of(line.name, parsed)))
    )


def _is_of(line: str, name: HubName) -> bool:
    found = HubName.parse(line)
    if found is None or replace(found, variant=name.variant) != name:
        return False
    return not name.variant or name.variant.lower() == found.variant.lower()


def pull_again(name: str) -> str:
    return f"run `paceline pull {name}` again{' to resume' if arrived(name) else ''}"


def pulled_folder(name: HubName) -> Path | None:
    """Of a hub model that is here; of several quantisations the preferred one, unless the name says.

    A revision is the one that is named, never another: it may hold other weights.
    """
    whole = {
        found.variant: folder
        for found, folder in _hub_models()
        if replace(found, variant=name.variant) == name and not folder.name.endswith(UNFINISHED)
    }
    if not name.variant and "" in whole:
        return whole[""]
    wanted = name.variant.lower()
    variants = [
        variant
        for variant, folder in whole.items()
        if variant and (not wanted or wanted == variant.lower() or wanted in _file_names(folder))
    ]
    return whole[min(variants, key=preference)] if variants else None


def _file_names(folder: Path) -> list[str]:
    """Of a GGUF model and its parts, in small letters."""
    return [str(file).lower() for file in read_json(folder / MANIFEST).get("files", ())]


def _opened(folder: Path) -> Path:
    """The GGUF file in a folder from a hub, or the folder itself."""
    file = read_json(folder / MANIFEST).get("file")
    return folder / str(file) if file else folder


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


def model_folder(model: CatalogueModel) -> Path:
    return home() / "models" / model.name


def model_file(model: CatalogueModel) -> Path:
    return model_folder(model) / model.file


def hub_folder(name: HubName) -> Path:
    """name: with the variant of a GGUF model."""
    return home() / "hub" / name.folder


def hub_partial(name: HubName) -> Path:
    folder = hub_folder(name)
    return folder.with_name(f"{folder.name}{UNFINISHED}")


def hub_lock(name: HubName) -> Path:
    folder = hub_folder(name)
    return folder.with_name(f".{folder.name}.lock")


def is_pulled(model: CatalogueModel) -> bool:
    """A quick check: the manifest names this file and the size is right."""
    manifest = read_json(model_folder(model) / MANIFEST)
    file = model_file(model)
    return manifest.get("sha256") == model.sha256 and file.is_file() and file.stat().st_size == model.size


def unknown(name: str) -> UnknownModel:
    near = get_close_matches(name, CATALOGUE, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    hub = f"run `paceline pull {name}` to get it from the model hub, or " if HubName.parse(name) else ""
    return UnknownModel(
        f"no model, folder or file {name!r}: {hint}{hub}"
        f"use one of {', '.join(CATALOGUE)}, owner/name of a model hub, a folder with config.json or a .gguf "
        "file"
    )


def _installed_from_hub(name: HubName, folder: Path) -> Installed:
    manifest, arrived = read_json(folder / MANIFEST), bytes_under(folder)
    return Installed(
        name=str(name),
        path=_opened(folder),
        size=manifest.get("size", arrived),
        licence=manifest.get("licence", "unknown"),
        pulled=not folder.name.endswith(UNFINISHED),
        format=quantisation(name.variant) or name.variant or SAFETENSORS,
        arrived=arrived,
        revision=manifest.get("revision", ""),
    )


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def require_space(folder: Path, needed: int, name: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PullError(
            f"pulling {name} needs {needed / 1e6:,.0f} MB under {folder}, "
            f"where {free / 1e6:,.0f} MB are free: "
            "make room (`paceline rm` removes models), or set PACELINE_HOME to a folder on a larger disk"
        )
