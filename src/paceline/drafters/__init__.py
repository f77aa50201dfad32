"""Drafters: one file or folder each, behind the protocol `types.Drafter`, and the registry of all of them.

support/         shared by drafters: grammar filter, sampling, node list
none.py          plain decoding
ngram.py         prompt lookup
suffix/          longest matching context, in this request and in past ones (SuffixDecoding)
prediction.py    the output the caller expects
mailbox.py       drafts that another device posts
grammar.py       tokens that the grammar forces
recycle/         the target's candidates for each token (Token Recycling)
draft_model/     a smaller model, with any tokenizer; a 4-bit copy; some layers of the target itself
heads/           trained heads: Medusa, EAGLE, block
drafter_list.py  DrafterList: a list of drafters is a drafter
imported.py      drafters of the operator's own, by import path
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from paceline.drafters.grammar import Grammar
from paceline.drafters.mailbox import Mailbox
from paceline.drafters.ngram import Ngram
from paceline.drafters.none import NoDrafter
from paceline.drafters.prediction import Prediction
from paceline.drafters.recycle import Recycle
from paceline.drafters.suffix import Suffix
from paceline.types import Drafter

Need = Literal["nothing", "prediction", "split", "grammar", "draft model", "named", "trained"]

NEEDS: Final[Mapping[Need, str]] = {
    "nothing": "nothing",
    "prediction": "a prediction with the request",
    "split": "a client that drafts: paceline serve --split",
    "grammar": "tools, a schema or a grammar with the request",
    "draft model": "--draft-model: another model",
    "named": "--drafters with its name when the model is loaded",
    "trained": "--trained: made for this model by paceline train, or in the package",
}


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    about: str  # what it drafts, in a few words for users
    needs: Need = "nothing"


DRAFTERS: Final[Mapping[str, DrafterInfo]] = {
    "grammar": DrafterInfo("what the grammar leaves no choice about", "grammar"),
    "suffix": DrafterInfo("what followed the same stretch of text, here or in past requests"),
    "ngram": DrafterInfo("what followed the latest few tokens, the last time they came"),
    "recycle": DrafterInfo("what the model thought could follow each token"),
    "prediction": DrafterInfo("the text you expect", "prediction"),
    "mailbox": DrafterInfo("what the client's own drafter sends", "split"),
    "model": DrafterInfo("what a smaller model says", "draft model"),
    "self": DrafterInfo("what the model says with some of its layers left out", "named"),
    "quantized": DrafterInfo("what a copy of the model in 4 bits says", "named"),
    "medusa": DrafterInfo("each position to come by a head of its own", "trained"),
    "eagle": DrafterInfo("token by token from the model's hidden states", "trained"),
    "block": DrafterInfo("a whole block from the model's hidden states in one pass", "trained"),
    "none": DrafterInfo("nothing: plain decoding"),
}

# Made of the target itself, if they are named when the model is loaded.
TARGET_DRAFTERS: Final = tuple(name for name, info in DRAFTERS.items() if info.needs == "named")


def model_free() -> dict[str, Drafter]:
    """Every drafter that needs no model, by name."""
    drafters: list[Drafter] = [NoDrafter(), Ngram(), Suffix(), Prediction(), Mailbox(), Grammar(), Recycle()]
    return {drafter.name: drafter for drafter in drafters}
