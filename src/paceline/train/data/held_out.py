"""The held-out split: whole conversations, chosen by a hash, so that it is the same every time."""

import hashlib
from collections.abc import Sequence
from typing import Final

from paceline.train.data.conversations import Conversation

SHARE: Final = 0.1
ENOUGH: Final = 50  # distinct conversations: at least one of them is held out 99.5 % of the time


def held_out(conversations: Sequence[Conversation], share: float = SHARE) -> list[bool]:
    """For each conversation, whether it is held out.

    A group decides for all of its conversations; without a group, the opening does. A conversation that
    occurs with a group and without follows the group.
    """
    grouped: dict[str, bool] = {}  # by opening
    for conversation in conversations:
        if conversation.group and conversation.opening:
            before = grouped.get(conversation.opening, False)
            grouped[conversation.opening] = before or is_held_out(conversation.group, share)
    return [
        is_held_out(c.group, share) if c.group else grouped.get(c.opening, is_held_out(c.opening, share))
        for c in conversations
    ]


def is_held_out(key: str, share: float = SHARE) -> bool:
    """A function of the key alone."""
    digest = hashlib.sha256(b"paceline held out\0" + key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


def nothing_measured(prompts: int) -> str:
    """The message where no answer was held out."""
    return (
        "nothing was measured: a tenth of the conversations is held out for that, chosen by a hash, and with "
        f"{prompts} prompts it was none; give {ENOUGH} or more that open differently"
    )
