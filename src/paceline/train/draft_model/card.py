"""The card of a draft model that was trained here (draft_model.json)."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from paceline.atomic import write_json
from paceline.errors import CorruptModel
from paceline.heads.local_heads import DRAFT_CARD
from paceline.train.evaluate import Acceptance

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class DraftCard:
    draft: str  # the model it was trained from
    target: str  # the model it drafts for
    fingerprint: str  # the target's
    lora: int  # rank of the trained adapters; 0: all weights
    before: Acceptance  # of the model it was trained from, on held-out answers
    after: Acceptance
    data: Mapping[str, Any] = field(default_factory=dict)  # what it was trained and measured on


def save_card(folder: Path, card: DraftCard) -> None:
    write_json(folder / DRAFT_CARD, {"format": FORMAT, **asdict(card)}, indent=1)


def read_draft_card(folder: Path) -> DraftCard:
    try:
        table = json.loads((folder / DRAFT_CARD).read_bytes())
        if table.pop("format", None) != FORMAT:
            raise CorruptModel(
                f"{DRAFT_CARD} is not of format {FORMAT}, the one this version reads: train it again"
            )
        before, after = (Acceptance.of_table(table.pop(name)) for name in ("before", "after"))
        card = DraftCard(before=before, after=after, **table)
        if not all(isinstance(text, str) for text in (card.draft, card.target, card.fingerprint)):
            raise ValueError("a value is of the wrong type")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptModel(f"{DRAFT_CARD} is damaged: {str(error)[:120]}; train it again") from None
    return card
