"""Drafters that run a model: a smaller one, with the target's tokenizer or another, or the target itself.

base.py         the model's own view of each sequence, and its cache
drafter.py      ModelDrafter: guesses token by token in the target's vocabulary
words.py        what the two models call the same: SameWords, SharedWords
transcript.py   the target's text in the small model's tokens, kept up to date
spelling.py     bytes to tokens, exactly
text.py         TextDrafter: the small model writes text, which is cut into the target's tokens
other.py        which of the two is for a model with another tokenizer
own_layers.py   SelfDrafter: some layers of the target guess for it
search.py       which layers it can do without, found on text
chosen.py       the layers found for each model
sample.py       the text they are looked for on, if there is no other
"""

from paceline.drafters.draft_model.layer_skip import SelfDrafter
from paceline.drafters.draft_model.select import DRAFT_VOCABS, DraftVocab, drafter_for
from paceline.drafters.draft_model.text_drafter import TextDrafter
from paceline.drafters.draft_model.token_drafter import ModelDrafter

__all__ = ["DRAFT_VOCABS", "DraftVocab", "ModelDrafter", "SelfDrafter", "TextDrafter", "drafter_for"]
