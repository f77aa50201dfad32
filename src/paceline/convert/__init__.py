"""Trained heads and models in the formats of other engines: written for them, and read from them."""

from paceline.convert.export import METHODS, export
from paceline.convert.hf_model import export_model
from paceline.convert.import_head import import_

__all__ = ["METHODS", "export", "export_model", "import_"]
