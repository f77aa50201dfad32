"""`paceline rm`: what of a model is on the disk, and its removal."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.atomic import locked
from paceline.errors import UnknownModel
from paceline.hub.catalog import CATALOGUE
from paceline.hub.local_models import (
    MANIFEST,
    hub_folder,
    hub_lock,
    hub_partial,
    installed,
    local_model,
    model_folder,
    pulled_folder,
    unknown,
)
from paceline.hub.progress import bytes_under
from paceline.hub.repository import HubName


@dataclass(frozen=True, slots=True)
class Removal:
    """A model's own folders, whole or unfinished, and the lock that a pull of it holds."""

    name: str
    folders: tuple[Path, ...]
    lock: Path

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return sum(map(bytes_under, self.folders))

    def run(self) -> None:
        """The manifest goes first: a removal that is cut short leaves no model that looks whole."""
        with locked(self.lock):
            for folder in self.folders:
                (folder / MANIFEST).unlink(missing_ok=True)
                for path in folder.iterdir():
                    if path != self.lock:
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
                if folder != self.lock.parent:
                    folder.rmdir()


def removal(name: str) -> Removal:
    """Only of what was pulled: a file or folder of the user's is theirs to delete."""
    if model := CATALOGUE.get(name):
        folder = model_folder(model)
        if not bytes_under(folder):
            raise UnknownModel(f"{name} is not here: `paceline ls` lists what is")
        return Removal(name, (folder,), folder / ".lock")
    if path := local_model(name):
        raise UnknownModel(f"{path} was not pulled: delete it yourself")
    parsed = HubName.parse(name)
    if parsed is None:
        raise unknown(name)
    found = _in_full(parsed)
    folders = tuple(folder for folder in (hub_folder(found), hub_partial(found)) if folder.is_dir())
    return Removal(str(found), folders, hub_lock(found))


def _in_full(name: HubName) -> HubName:
    """A name without a quantisation is that of the only one here; with several, the user chooses."""
    here = [
        found
        for line in installed()
        if (found := HubName.parse(line.name)) and replace(found, variant=name.variant) == name
    ]
    if folder := pulled_folder(name):
        wanted = HubName.of_folder(f"{folder.parent.name}/{folder.name}")
    else:
        wanted = next((found for found in here if found.variant.lower() == name.variant.lower()), None)
        wanted = wanted or (here[0] if len(here) == 1 and not name.variant else None)
    if wanted is None:
        raise UnknownModel(f"{name} is not here: `paceline ls` lists what is")
    if not name.variant and len(here) > 1:
        raise UnknownModel(f"{name} is here more than once: name one of {', '.join(map(str, here))}")
    return wanted
