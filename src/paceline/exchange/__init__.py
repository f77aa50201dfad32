"""Trained heads and models in the formats of other engines: written for them, and read from them."""

from paceline.exchange.export import METHODS, export
from paceline.exchange.model import export_model
from paceline.exchange.take import import_

__all__ = ["METHODS", "export", "export_model", "import_"]
