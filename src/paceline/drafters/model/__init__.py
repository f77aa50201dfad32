"""Drafters that run a model: another one, or some layers of the target itself."""

from paceline.drafters.model.model import ModelDrafter
from paceline.drafters.model.own_layers import SelfDrafter

__all__ = ["ModelDrafter", "SelfDrafter"]
