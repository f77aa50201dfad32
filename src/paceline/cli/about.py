"""The drafters there are, in words: what each guesses and what it must be given."""

from dataclasses import dataclass
from typing import Final, Literal

Need = Literal["nothing", "prediction", "grammar", "draft model", "named", "trained"]
NEEDS: Final[dict[Need, str]] = {
    "nothing": "nothing",
    "prediction": "a prediction with the request",
    "grammar": "tools, a schema or a grammar with the request",
    "draft model": "--draft-model: another model",
    "named": "--drafters with its name when the model is loaded",
    "trained": "--trained: made for this model by paceline train, or in the package",
}


@dataclass(frozen=True, slots=True)
class About:
    guesses: str
    needs: Need = "nothing"


DRAFTERS: Final = {
    "grammar": About("what the grammar leaves no choice about", "grammar"),
    "suffix": About("what followed the same stretch of text, here or in past requests"),
    "ngram": About("what followed the latest few tokens, the last time they were said"),
    "recycle": About("what the model thought could follow each token"),
    "prediction": About("the text you expect", "prediction"),
    "model": About("what a smaller model says", "draft model"),
    "self": About("what the model says with some of its layers left out", "named"),
    "quantized": About("what a copy of the model in 4 bits says", "named"),
    "medusa": About("each place to come by a head of its own", "trained"),
    "eagle": About("token by token from the model's hidden states", "trained"),
    "block": About("a whole block from the model's hidden states in one pass", "trained"),
    "none": About("nothing: plain decoding"),
}
