"""Where trained drafters lie on this machine: a folder for each in home/drafters, or wherever one says."""

import os
from pathlib import Path

from paceline.folders import home
from paceline.heads.folder import CARD


def shelf() -> Path:
    return home() / "drafters"


def drafter_path(name: str | os.PathLike[str]) -> Path:
    """A folder, or a name among the drafters that were trained here."""
    given = Path(name).expanduser()
    return given if given.parts[1:] or given.exists() else shelf() / given


def kept_here() -> list[Path]:
    """The folders of all that were trained here, by name."""
    return sorted(card.parent for card in shelf().glob(f"*/{CARD}"))
