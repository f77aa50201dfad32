"""Which tokens a mask of bits allows."""

import numpy as np

from paceline.sampling.noise import Ids
from paceline.types import Bits

WORD = 32  # bits


def check_length(mask: Bits, vocab: int) -> None:
    words = (vocab + WORD - 1) // WORD
    if len(mask) != words:
        raise ValueError(f"the mask has {len(mask)} words, a row of {vocab} tokens needs {words}")


def nothing_allowed() -> ValueError:
    return ValueError("no token is allowed")


def allowed_ids(mask: Bits, vocab: int) -> Ids:
    """Ascending, at least one. Bits beyond the vocabulary count for nothing."""
    check_length(mask, vocab)
    words = np.flatnonzero(mask)
    bits = np.unpackbits(mask[words].astype("<u4").view(np.uint8), bitorder="little")
    at = np.flatnonzero(bits)
    ids: Ids = words[at // WORD] * WORD + at % WORD
    ids = ids[: np.searchsorted(ids, vocab)]
    if len(ids) == 0:
        raise nothing_allowed()
    return ids
