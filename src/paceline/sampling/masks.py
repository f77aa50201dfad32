"""Which tokens a mask of bits allows."""

import numpy as np

from paceline.sampling.noise import Ids
from paceline.types import Bits


def allowed_ids(mask: Bits, vocab: int) -> Ids:
    """Ascending, at least one. Bits beyond the vocabulary count for nothing."""
    check_length(mask, vocab)
    octets = np.ascontiguousarray(mask, "<u4").view(np.uint8)
    ids = np.flatnonzero(np.unpackbits(octets, count=vocab, bitorder="little").view(np.bool_))
    if len(ids) == 0:
        raise nothing_allowed()
    return ids


def check_length(mask: Bits, vocab: int) -> None:
    words = (vocab + 31) // 32
    if len(mask) != words:
        raise ValueError(f"the mask has {len(mask)} words, a row of {vocab} tokens needs {words}")


def nothing_allowed() -> ValueError:
    return ValueError("no token is allowed")
