"""The drafter for a draft model, by the overlap of its vocabulary with the target's."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal, get_args

from paceline.drafters.draft_model.text_drafter import TextDrafter
from paceline.drafters.draft_model.token_drafter import ModelDrafter
from paceline.drafters.draft_model.vocab_mapping import SharedVocab, TokenizerPair
from paceline.errors import DrafterMismatch
from paceline.types import NO_DRAFT, Ask, Draft, Drafter, Seq, Target

if TYPE_CHECKING:
    from paceline.text import Tokenizer

# intersection: it proposes tokens both have. text: it writes text, which is encoded into the target's tokens.
DraftVocab = Literal["auto", "intersection", "text"]
DRAFT_VOCABS: Final[tuple[DraftVocab, ...]] = get_args(DraftVocab)
MIN_OVERLAP: Final = 0.95  # share of the target's tokens in a text that both must have to draft by tokens

OVERLAP_TEXT: Final = """\
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
    pair = TokenizerPair(draft, target)
    share = overlap(pair)
    if vocab == "intersection" and not pair.shared:
        raise DrafterMismatch("the two tokenizers share no token: use draft_vocab='text'")
    log.info("the draft model has another tokenizer: %.0f%% of the target's tokens are shared", 100 * share)
    text_drafter = TextDrafter(model, pair)
    if vocab == "text" or (vocab == "auto" and share < MIN_OVERLAP):
        return text_drafter
    token_drafter = ModelDrafter(model, target_size, vocab=SharedVocab(pair, target_size))
    return token_drafter if vocab == "intersection" else TextOrTokenDrafter(text_drafter, token_drafter)


class TextOrTokenDrafter(Drafter):
    """Greedy requests get text drafts; sampled ones token drafts, which share the target's noise."""

    name = "model"

    def __init__(self, text_drafter: Drafter, token_drafter: Drafter) -> None:
        self.text_drafter = text_drafter
        self.token_drafter = token_drafter

    def drafter(self, seq: Seq) -> Drafter:
        return self.text_drafter if seq.params.temperature == 0 else self.token_drafter

    def begin(self, seq: Seq) -> None:
        self.drafter(seq).begin(seq)

    def end(self, seq: Seq) -> None:
        self.drafter(seq).end(seq)

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(asks)
        for drafter in (self.text_drafter, self.token_drafter):
            mine = [i for i, ask in enumerate(asks) if self.drafter(ask.seq) is drafter]
            for i, draft in zip(mine, drafter.draft([asks[i] for i in mine]), strict=True):
                drafts[i] = draft
        return drafts


def overlap(pair: TokenizerPair) -> float:
    """The share of the target's tokens in a sample of code, JSON and prose that the draft model has too."""
    tokens = pair.target_encoder.encode(OVERLAP_TEXT.encode())
    return sum(token in pair.shared for token in tokens) / max(1, len(tokens))
