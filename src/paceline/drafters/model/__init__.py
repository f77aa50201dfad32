"""A smaller model guesses, whether its tokenizer is the target's or another.

base.py         the small model's own view of each sequence, and its cache
drafter.py      ModelDrafter: guesses token by token in the target's vocabulary
words.py        what the two models call the same: SameWords, SharedWords
transcript.py   the target's text in the small model's tokens, kept up to date
spelling.py     bytes to tokens, exactly
text.py         TextDrafter: the small model writes text, which is cut into the target's tokens
other.py        which of the two is for a model with another tokenizer
"""

from paceline.drafters.model.drafter import ModelDrafter
from paceline.drafters.model.other import DRAFT_VOCABS, DraftVocab, drafter_for
from paceline.drafters.model.text import TextDrafter

__all__ = ["DRAFT_VOCABS", "DraftVocab", "ModelDrafter", "TextDrafter", "drafter_for"]
