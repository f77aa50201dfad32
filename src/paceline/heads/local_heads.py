"""Finds trained drafters: in the local store (home/drafters), in the package, or in any folder."""

import os
from pathlib import Path
from typing import Final

from paceline.heads.head_checkpoint import CARD
from paceline.paths import home

DRAFT_CARD: Final = "draft_model.json"  # in the folder of a draft model that was trained here
SHIPPED: Final = Path(__file__).parent / "shipped"  # drafters for small models, in the package


def store_folder() -> Path:
    return home() / "drafters"


def output_path(name: str | os.PathLike[str]) -> Path:
    """The folder for a new drafter: a path, or a name in the local store."""
    path = Path(name).expanduser()
    return path if path.parts[1:] or path.exists() else store_folder() / path


def drafter_path(name: str | os.PathLike[str]) -> Path:
    """A path, or a name in the local store or the package; the store wins."""
    path = output_path(name)
    packaged, stored = SHIPPED / path.name, any((path / card).is_file() for card in (CARD, DRAFT_CARD))
    return packaged if not stored and path.parent == store_folder() and packaged.exists() else path


def available_heads() -> list[Path]:
    """Folders of all heads, by name; one in the store hides one of the same name in the package."""
    folders = {folder.name: folder for folder in shipped()}
    folders |= {card.parent.name: card.parent for card in store_folder().glob(f"*/{CARD}")}
    return [folders[name] for name in sorted(folders)]


def in_package(folder: Path) -> bool:
    """Packaged drafters are read-only."""
    return folder.resolve().parent == SHIPPED.resolve()


def shipped() -> list[Path]:
    """Folders of the drafters in the package, by name."""
    return sorted(card.parent for card in SHIPPED.glob(f"*/{CARD}"))


def local_draft_models() -> list[Path]:
    """Folders of the draft models that were trained here, by name."""
    return sorted(card.parent for card in store_folder().glob(f"*/{DRAFT_CARD}"))
