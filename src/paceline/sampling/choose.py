"""From a distribution and its noise to tokens, in numpy."""

from typing import Final

import numpy as np

from paceline.config import SamplingParams
from paceline.sampling.distribution import Distribution, Floats, History, processed
from paceline.sampling.noise import Doubles, Ids, Key, Words, gumbel_of, scramble, spread, spread_ids
from paceline.types import Bits, TokenLogprob


def choose(of: Distribution, key: Key) -> int:
    """The one token that this distribution and this noise give."""
    if len(of.logits) == 1:
        return 0 if of.ids is None else int(of.ids[0])
    return ranked(of, key, 1)[0]


def ranked(of: Distribution, key: Key, width: int) -> list[int]:
    """The likeliest `width` outcomes of `choose`, best first: a draw without replacement."""
    bits = scramble(spread_ids(of.vocab) if of.ids is None else spread(of.ids), key)
    best = _winners(of.logits, bits, min(width, len(bits)))
    return [int(i) for i in (best if of.ids is None else of.ids[best])]


def greedy(
    logits: Floats, params: SamplingParams, history: History, width: int, mask: Bits | None = None
) -> list[int]:
    """The tokens greedy decoding would take, best first, if those before were not there.

    Fewer than `width` where the mask allows no more.
    """
    ids, x = processed(logits, params, history, mask)
    best = _largest(x, min(width, len(x)))
    return [int(i) for i in (best if ids is None else ids[best])]


def _largest(x: Floats | Doubles, width: int) -> Ids:
    """Indices of the largest, largest first, of equals the first; beyond one, none that is impossible."""
    best, rest = [int(x.argmax())], x
    while len(best) < width:  # for a few, one by one is quicker than any partition
        rest = x.copy() if rest is x else rest
        rest[best[-1]] = -np.inf
        if rest[at := int(rest.argmax())] == -np.inf:
            break
        best.append(at)
    return np.array(best)


def logprob(logits: Floats, token: int, alternatives: int) -> TokenLogprob:
    """The raw log-probability of a token and of the likeliest ones."""
    x = logits.astype(np.float64)
    x -= x.max()
    x -= np.log(np.exp(x).sum())
    best = np.argsort(-x, kind="stable")[:alternatives] if alternatives else ()
    return TokenLogprob(token, float(x[token]), tuple((int(i), float(x[i])) for i in best))


_REACH: Final = np.float32(12.0)  # nats below the best logit
_RARE: Final = np.uint32(int(2**32 * np.exp(-np.exp(-8.0))))  # bits below this give noise below 8


def _winners(logits: Floats, bits: Words, width: int) -> Ids:
    """The index where logit and noise together are largest, with logarithms taken only where they can matter.

    What is left out scores below 8 - 12 = -4; the best token alone scores less only once in 10^23 draws.
    """
    some = np.flatnonzero((logits >= -_REACH) | (bits >= _RARE))
    score = logits[some] + gumbel_of(bits[some])
    best = _largest(score, width)
    if len(best) == width and score[best[-1]] > -4:
        return some[best]
    return _largest(logits + gumbel_of(bits), width)
