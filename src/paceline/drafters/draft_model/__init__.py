"""Drafters that run a model: a smaller one, with the target's tokenizer or another, or the target itself.

base.py              ModelRunnerDrafter: the model's own copy of each sequence, and its KV cache
token_drafter.py     ModelDrafter: drafts token by token in the target's vocabulary
vocab_mapping.py     VocabMap: the target's tokens in the draft model's vocabulary, and back
retokenizer.py       IncrementalRetokenizer: the target's text in the draft model's tokens, as it grows
exact_encoder.py     ExactEncoder: bytes to tokens, losslessly
text_drafter.py      TextDrafter: the draft model writes text, which is encoded into the target's tokens
select.py            drafter_for: the one of these for two given tokenizers
layer_skip.py        SelfDrafter: some layers of the target draft for it
layer_search.py      the layers it can skip, searched once for a model and stored
calibration_text.py  the text of that search
"""

from paceline.drafters.draft_model.layer_skip import SelfDrafter
from paceline.drafters.draft_model.select import DRAFT_VOCABS, DraftVocab, drafter_for
from paceline.drafters.draft_model.text_drafter import TextDrafter
from paceline.drafters.draft_model.token_drafter import ModelDrafter

__all__ = ["DRAFT_VOCABS", "DraftVocab", "ModelDrafter", "SelfDrafter", "TextDrafter", "drafter_for"]
