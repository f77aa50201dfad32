"""Which drafter a draft model gets: by what its tokenizer shares with the target's."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal, get_args

from paceline.drafters.draft_model.text_drafter import TextDrafter
from paceline.drafters.draft_model.token_drafter import ModelDrafter
from paceline.drafters.draft_model.vocab_mapping import Dictionary, SharedWords
from paceline.errors import DrafterMismatch
from paceline.types import NO_DRAFT, Ask, Draft, Drafter, Seq, Target

if TYPE_CHECKING:
    from paceline.text import Tokenizer

# intersection: it guesses the tokens both have. text: it writes text, which is cut into the target's tokens.
DraftVocab = Literal["auto", "intersection", "text"]
DRAFT_VOCABS: Final[tuple[DraftVocab, ...]] = get_args(DraftVocab)
ENOUGH: Final = 0.95  # share of the target's tokens in a text that must be shared to guess by tokens

SAMPLE: Final = """\
def area(width: float, height: float = 1.0) -> float:
    \"\"\"The area of a rectangle, in square metres.\"\"\"
    if width < 0 or height < 0:
        raise ValueError(f"negative size: {width} x {height}")

    return round(width * height, 2)


{"name": "get_weather", "arguments": {"city": "Paris", "days": [1, 2, 15], "units": null}}

The committee met on 14 March 2024 and agreed, after some discussion, that the new rules shouldn't apply yet.
It's a small step; nevertheless, several members (not all of them) called it "long overdue".

- **Install** the package with `pip install example`.
- See https://example.org/docs for more.
"""

log = logging.getLogger("paceline")


def drafter_for(
    model: Target, draft: "Tokenizer", target: "Tokenizer", target_size: int, vocab: DraftVocab = "auto"
) -> Drafter:
    """The drafter `model`. target_size: rows of the target's output, padding included."""
    if draft.fingerprint == target.fingerprint:
        return ModelDrafter(model, target_size)
    dictionary = Dictionary(draft, target)
    share = overlap(dictionary)
    if vocab == "intersection" and not dictionary.shared:
        raise DrafterMismatch("the two tokenizers share no token: use draft_vocab='text'")
    log.info("the draft model has another tokenizer: %.0f%% of the target's tokens are shared", 100 * share)
    by_text = TextDrafter(model, dictionary)
    if vocab == "text" or (vocab == "auto" and share < ENOUGH):
        return by_text
    by_tokens = ModelDrafter(model, target_size, words=SharedWords(dictionary, target_size))
    return by_tokens if vocab == "intersection" else EitherWay(by_text, by_tokens)


class EitherWay(Drafter):
    """Greedy requests are guessed for by text; where the noise that is shared counts, by tokens."""

    name = "model"

    def __init__(self, by_text: Drafter, by_tokens: Drafter) -> None:
        self.by_text = by_text
        self.by_tokens = by_tokens

    def way(self, seq: Seq) -> Drafter:
        return self.by_text if seq.params.temperature == 0 else self.by_tokens

    def begin(self, seq: Seq) -> None:
        self.way(seq).begin(seq)

    def end(self, seq: Seq) -> None:
        self.way(seq).end(seq)

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(asks)
        for way in (self.by_text, self.by_tokens):
            mine = [i for i, ask in enumerate(asks) if self.way(ask.seq) is way]
            for i, draft in zip(mine, way.draft([asks[i] for i in mine]), strict=True):
                drafts[i] = draft
        return drafts


def overlap(dictionary: Dictionary) -> float:
    """The share of the target's tokens in a sample of code, JSON and prose that the draft model has too."""
    tokens = dictionary.target_spelling.tokens(SAMPLE.encode())
    return sum(token in dictionary.shared for token in tokens) / max(1, len(tokens))
