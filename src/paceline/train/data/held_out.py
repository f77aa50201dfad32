"""Which conversations are kept from training, to measure on: whole ones, and the same ones every time."""

import hashlib
from collections.abc import Sequence
from typing import Final

from paceline.train.data.conversations import Conversation

SHARE: Final = 0.1
ENOUGH: Final = 50  # conversations that differ: of so many, one at least is held out in 199 of 200 cases


def held_out(conversations: Sequence[Conversation], share: float = SHARE) -> list[bool]:
    """Of each conversation, whether it is held out.

    A group decides for all of its conversations; where there is none, the opening does. A conversation that
    is here twice, with its group and without, follows the one with a group.
    """
    grouped: dict[str, bool] = {}  # by opening
    for conversation in conversations:
        if conversation.group and conversation.opening:
            kept = grouped.get(conversation.opening, False)
            grouped[conversation.opening] = kept or is_held_out(conversation.group, share)
    return [
        is_held_out(c.group, share) if c.group else grouped.get(c.opening, is_held_out(c.opening, share))
        for c in conversations
    ]


def is_held_out(key: str, share: float = SHARE) -> bool:
    """Depends on nothing but the key."""
    digest = hashlib.sha256(b"paceline held out\0" + key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


def nothing_measured(prompts: int) -> str:
    """What to say where no answer was there to measure on."""
    return (
        "nothing was measured: of the conversations a tenth is held out for that, chosen by a hash, and with "
        f"{prompts} prompts it was none; give {ENOUGH} or more that open differently"
    )
