"""A small agent at work, written down: calls that repeat with other ids, ids copied from results, edits."""

import json
import random
import re
from dataclasses import dataclass

PIECE = re.compile(r" ?[A-Za-z]+|\d|\s|[^\sA-Za-z\d]")
PROSE = """
the order was found and it will be sent to you by next week unless a refund or an exchange has been asked for
please tell me which item of this account should change so that nothing is lost while we look into delivery
"""
WORDS = PROSE.split()
CODE = """
def total(items, rate):
    result = 0
    for item in items:
        if item.price is None:
            raise ValueError(item.name)
        result += item.price * item.count
    return round(result * rate, 2)


def report(items, rate):
    lines = [f"{item.name}: {item.price}" for item in items]
    lines.append(f"total: {total(items, rate)}")
    return lines
"""

_ids: dict[str, int] = {}


def encode(text: str) -> list[int]:
    return [_ids.setdefault(piece, len(_ids)) for piece in PIECE.findall(text)]


def shuffled(tokens: list[int]) -> list[int]:
    return random.Random(0).sample(tokens, len(tokens))


@dataclass(frozen=True)
class Turn:
    prompt: list[int]  # everything before
    output: list[int]


def conversation(seed: int, turns: int = 6) -> list[Turn]:
    """Each turn looks an order up and acts on the ids that came back."""
    rng = random.Random(seed)
    history = encode("You help customers. " + " ".join(rng.sample(WORDS, len(WORDS))))
    made = []
    for _ in range(turns):
        order, user, item = (f"{letter}{rng.randrange(10**7):07d}" for letter in "WUI")
        result = {"order_id": order, "user_id": user, "items": [{"item_id": item, "state": "sent"}]}
        history += encode(
            "\nuser: " + " ".join(rng.choices(WORDS, k=8)) + f"\nresult: {json.dumps(result)}\n"
        )
        call = {
            "name": "exchange_order_item",
            "arguments": {"order_id": order, "item_id": item, "paid_by": user},
        }
        output = encode(f"assistant: {' '.join(rng.choices(WORDS, k=4))}\n<call>{json.dumps(call)}</call>\n")
        made.append(Turn(list(history), output))
        history += output
    return made


def edited_code() -> tuple[list[int], list[int]]:
    """A file, and the same file after a change."""
    after = CODE.replace("rate", "tax_rate").replace(
        "        if item.price is None:\n", "        if not item.price:\n"
    )
    after = after.replace("    return lines\n", "    lines.sort()\n    return lines\n")
    return encode(CODE), encode(after)
