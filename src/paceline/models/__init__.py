"""Where models come from: a folder, a GGUF file, the catalogue of plain wheels, or a model hub."""

from paceline.folders import home
from paceline.models.catalogue import CATALOGUE, DEFAULT_MODEL, CatalogueModel, Piece
from paceline.models.progress import Progress, silent
from paceline.models.pulling import pull
from paceline.models.store import Installed, installed, resolve

__all__ = [
    "CATALOGUE",
    "DEFAULT_MODEL",
    "CatalogueModel",
    "Installed",
    "Piece",
    "Progress",
    "home",
    "installed",
    "pull",
    "resolve",
    "silent",
]
