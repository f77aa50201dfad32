"""Drafters: one file each, behind the one protocol."""

from typing import Final

from paceline.drafters.grammar import Grammar
from paceline.drafters.ngram import Ngram
from paceline.drafters.none import NoDrafter
from paceline.drafters.prediction import Prediction
from paceline.drafters.recycle import Recycle
from paceline.drafters.suffix import Suffix
from paceline.types import Drafter

OF_THE_TARGET: Final = (
    "self",
    "quantized",
)  # made of the target itself, for those who name them at the start


def model_free() -> dict[str, Drafter]:
    """Every drafter that needs no model, by name."""
    made: list[Drafter] = [NoDrafter(), Ngram(), Suffix(), Prediction(), Grammar(), Recycle()]
    return {drafter.name: drafter for drafter in made}
