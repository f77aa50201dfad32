"""Time of the masks of one round: nine positions, taken from real outputs."""

import random
import time
from collections.abc import Sequence
from statistics import fmean, quantiles
from typing import Any, Final

from paceline.constraints.draft_masks import masks
from paceline.types import Cursor, Draft

GUESSES: Final = 8  # with what follows the text itself: nine positions
PLACES: Final = 20  # of one output


def time_masks(cursor: Cursor, output: Sequence[int], words: int, rng: random.Random) -> list[float]:
    """Milliseconds for the masks at some places, the output's own next tokens being the draft.

    The walk comes by all places in order, as decoding does, and goes back after each draft.
    """
    last = len(output) - GUESSES - 1
    places = set(rng.sample(range(last + 1), min(PLACES, last + 1))) if last >= 0 else set()
    times = []
    for at, token in enumerate(output):
        if at in places:
            draft = Draft(tuple(output[at : at + GUESSES]))
            started = time.perf_counter()
            masks(cursor, draft, words)
            times.append(1000 * (time.perf_counter() - started))
        if not cursor.advance(token):
            break
    return times


def summary(times: Sequence[float], vocab: int) -> dict[str, Any]:
    cuts = quantiles(times, n=100)
    return {
        "positions": GUESSES + 1,
        "vocab": vocab,
        "rounds": len(times),
        "mean_ms": round(fmean(times), 3),
        "p50_ms": round(cuts[49], 3),
        "p99_ms": round(cuts[98], 3),
    }
