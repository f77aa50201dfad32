"""Plain decoding, as a drafter."""

from collections.abc import Sequence

from paceline.types import NO_DRAFT, Ask, Draft, Drafter


class NoDrafter(Drafter):
    """Drafts nothing."""

    name = "none"

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [NO_DRAFT] * len(asks)
