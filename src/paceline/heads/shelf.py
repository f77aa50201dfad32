"""Where trained drafters lie on this machine: a folder for each in home/drafters, or wherever one says."""

import os
from pathlib import Path
from typing import Final

from paceline.folders import home
from paceline.heads.folder import CARD

DRAFT_CARD: Final = "draft_model.json"  # beside a whole model that was trained to guess


def shelf() -> Path:
    return home() / "drafters"


def drafter_path(name: str | os.PathLike[str]) -> Path:
    """A folder, or a name among the drafters that were trained here."""
    given = Path(name).expanduser()
    return given if given.parts[1:] or given.exists() else shelf() / given


def kept_here() -> list[Path]:
    """The folders of all heads that were trained here, by name."""
    return sorted(card.parent for card in shelf().glob(f"*/{CARD}"))


def draft_models_here() -> list[Path]:
    """The folders of all draft models that were trained here, by name."""
    return sorted(card.parent for card in shelf().glob(f"*/{DRAFT_CARD}"))
