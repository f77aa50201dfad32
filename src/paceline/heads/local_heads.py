"""Where trained drafters lie: those made here in home/drafters, some in the package, others anywhere."""

import os
from pathlib import Path
from typing import Final

from paceline.heads.head_checkpoint import CARD
from paceline.paths import home

DRAFT_CARD: Final = "draft_model.json"  # beside a whole model that was trained to guess
SHIPPED: Final = Path(__file__).parent / "shipped"  # drafters for small models, in the package


def shelf() -> Path:
    return home() / "drafters"


def output_path(name: str | os.PathLike[str]) -> Path:
    """Where a drafter of this name is to lie: a folder, or a name on the shelf."""
    given = Path(name).expanduser()
    return given if given.parts[1:] or given.exists() else shelf() / given


def drafter_path(name: str | os.PathLike[str]) -> Path:
    """A folder, or a name among the drafters trained here and those in the package."""
    path = output_path(name)
    inside, made = SHIPPED / path.name, any((path / card).is_file() for card in (CARD, DRAFT_CARD))
    return inside if not made and path.parent == shelf() and inside.exists() else path


def available_heads() -> list[Path]:
    """The folders of all heads there are, by name; one trained here hides one in the package."""
    found = {folder.name: folder for folder in shipped()}
    found |= {card.parent.name: card.parent for card in shelf().glob(f"*/{CARD}")}
    return [found[name] for name in sorted(found)]


def in_package(folder: Path) -> bool:
    """Such a drafter never changes."""
    return folder.resolve().parent == SHIPPED.resolve()


def shipped() -> list[Path]:
    """The folders of the drafters in the package, by name."""
    return sorted(card.parent for card in SHIPPED.glob(f"*/{CARD}"))


def local_draft_models() -> list[Path]:
    """The folders of all draft models that were trained here, by name."""
    return sorted(card.parent for card in shelf().glob(f"*/{DRAFT_CARD}"))
