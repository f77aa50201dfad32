"""How a token is chosen: pure functions, shared by the target and the drafters.

One fixed order: bias, mask, penalties, temperature, top-k, top-p, min-p. What is left is a `Law`; the token
is the argmax of the law's logits plus Gumbel noise. The noise is random access: it depends on the request's
seed, the place in the output and the token id, never on how many tokens were drawn before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.config import SamplingParams
from paceline.types import TokenLogprob

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]
Words = NDArray[np.uint32]
Key = tuple[int, int]  # two 32-bit words

# What a noise is for. Streams never meet, so a draft's coins say nothing about the target's.
CHOICE: Final = 0
DRAFT: Final = 1
ACCEPT: Final = 2
RESAMPLE: Final = 3

_MASK64: Final = (1 << 64) - 1


def _mix64(x: int) -> int:
    """The splitmix64 finaliser."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _mix(seed: int, choice: int, stream: int, index: int, slot: int) -> int:
    x = _mix64((seed + 0x9E3779B97F4A7C15) & _MASK64)
    x = _mix64(x ^ (choice << 3 | stream))
    return _mix64(x ^ (index << 20 | slot))


def noise_key(seed: int, choice: int, stream: int, index: int, slot: int = 0) -> Key:
    """Index: the place in the output. Slot tells apart several draws at one place."""
    x = _mix(seed, choice, stream, index, slot)
    return x >> 32, x & 0xFFFFFFFF


def coin(seed: int, choice: int, stream: int, index: int, slot: int) -> float:
    """Uniform in [0, 1), 53 bits."""
    return (_mix(seed, choice, stream, index, slot) >> 11) * 2.0**-53


@lru_cache(maxsize=4)
def _spread_ids(vocab: int) -> Words:
    """Token ids scattered over 32 bits, so that neighbouring ids share no pattern."""
    x = np.arange(vocab, dtype=np.uint32) * np.uint32(0x9E3779B1)
    x ^= x >> np.uint32(15)
    return x


def _scramble(spread: Words, key: Key) -> Words:
    """The lowbias32 mixer with the key woven in: 32 random bits for each id."""
    x = spread ^ np.uint32(key[0])
    x *= np.uint32(key[1] | 1)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


def _gumbel_of(bits: Words) -> Doubles:
    return -np.log(-np.log((bits.astype(np.float64) + 0.5) * 2.0**-32))


def gumbel(key: Key, ids: Ids) -> Doubles:
    """Standard Gumbel noise of these token ids."""
    x = ids.astype(np.uint32) * np.uint32(0x9E3779B1)
    x ^= x >> np.uint32(15)
    return _gumbel_of(_scramble(x, key))


@dataclass(frozen=True, slots=True)
class History:
    """What stands before a row; read only where penalties need it."""

    tokens: Sequence[int] = ()
    prompt_len: int = 0
    guessed: Sequence[int] = ()  # the draft's tokens on the way to the row

    def output(self) -> list[int]:
        return [*self.tokens[self.prompt_len :], *self.guessed]


NO_HISTORY: Final = History()


@dataclass(frozen=True, slots=True)
class Law:
    """A processed distribution: the probability of ids[i] is proportional to exp(logits[i])."""

    ids: Ids | None  # ascending, all others are impossible; None: every id
    logits: Floats  # relative to the largest, which is 0
    vocab: int

    def probability(self, token: int) -> float:
        at = token if self.ids is None else int(np.searchsorted(self.ids, token))
        if self.ids is not None and (at == len(self.ids) or self.ids[at] != token):
            return 0.0
        return float(np.exp(self.logits[at]) / np.exp(self.logits).sum(dtype=np.float64))

    def probabilities(self) -> Doubles:
        p = np.exp(self.logits.astype(np.float64))
        p /= p.sum()
        if self.ids is None:
            return p
        dense = np.zeros(self.vocab)
        dense[self.ids] = p
        return dense


def law(
    logits: Floats,
    params: SamplingParams,
    history: History = NO_HISTORY,
    mask: NDArray[np.bool_] | None = None,
) -> Law:
    """What the row's token is drawn from. mask: True where a token is allowed."""
    x = _penalised(_biased(logits, params, mask), params, history)
    top = int(x.argmax())  # ties: the lowest id
    if params.temperature == 0:
        return Law(np.array([top]), np.zeros(1, np.float32), len(x))
    x = (x - x[top]) * np.float32(1 / params.temperature)
    ids: Ids | None = None
    if 0 < params.top_k < len(x):
        ids, x = _top_k(x, params.top_k)
    if params.top_p < 1:
        ids, x = _top_p(ids, x, params.top_p)
    if params.min_p > 0:
        ids, x = _select(ids, x, np.flatnonzero(x >= np.float32(np.log(params.min_p))))
    return Law(ids, x, len(logits))


def choose(of: Law, key: Key) -> int:
    """The one token this law and this noise give."""
    if len(of.logits) == 1:
        return 0 if of.ids is None else int(of.ids[0])
    if of.ids is not None:
        return int(of.ids[(of.logits + gumbel(key, of.ids)).argmax()])
    return _choose_of_all(of.logits, key)


def ranked(of: Law, key: Key, width: int) -> list[int]:
    """The likeliest `width` outcomes of `choose`, best first: a draw without replacement."""
    ids = np.arange(of.vocab) if of.ids is None else of.ids
    score = of.logits + gumbel(key, ids)
    order = np.argsort(-score, kind="stable")[:width]
    return [int(i) for i in ids[order]]


def greedy(logits: Floats, params: SamplingParams, history: History, width: int) -> list[int]:
    """The tokens greedy decoding would take, best first, if those before were not there."""
    x = _penalised(_biased(logits, params, None), params, history)
    if width == 1:
        return [int(x.argmax())]
    best = np.flatnonzero(x >= np.partition(x, -width)[-width])
    return [int(i) for i in best[np.argsort(-x[best], kind="stable")][:width]]


def logprob(logits: Floats, token: int, alternatives: int) -> TokenLogprob:
    """The raw log-probability of a token and of the likeliest ones."""
    x = logits.astype(np.float64)
    x -= x.max()
    x -= np.log(np.exp(x).sum())
    best = np.argsort(-x, kind="stable")[:alternatives] if alternatives else ()
    return TokenLogprob(token, float(x[token]), tuple((int(i), float(x[i])) for i in best))


_REACH: Final = np.float32(12.0)  # nats below the best logit
_RARE: Final = np.uint32(int(2**32 * np.exp(-np.exp(-8.0))))  # bits below this give noise below 8


def _choose_of_all(logits: Floats, key: Key) -> int:
    """As choose, over the whole vocabulary, with logarithms taken only where they can matter.

    What is left out scores below 8 - 12 = -4; the best token alone scores less only once in 10^23 draws.
    """
    bits = _scramble(_spread_ids(len(logits)), key)
    some = np.flatnonzero((logits >= -_REACH) | (bits >= _RARE))
    score = logits[some] + _gumbel_of(bits[some])
    best = int(score.argmax())
    if score[best] > -4:
        return int(some[best])
    return int((logits + _gumbel_of(bits)).argmax())


def _biased(logits: Floats, params: SamplingParams, mask: NDArray[np.bool_] | None) -> Floats:
    if not params.logit_bias and mask is None:
        return logits
    x = logits.copy()
    for token, bias in params.logit_bias:
        if 0 <= token < len(x):
            x[token] += np.float32(bias)
    if mask is not None:
        x[~mask] = -np.inf
    return x


def _penalised(x: Floats, params: SamplingParams, history: History) -> Floats:
    repetition, presence, frequency = (
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )
    if repetition == 1 and presence == 0 and frequency == 0:
        return x
    x = x.copy()
    if repetition != 1:
        seen = np.unique(np.array([*history.tokens, *history.guessed], np.int64))
        scale = np.float32(repetition)
        x[seen] = np.where(x[seen] > 0, x[seen] / scale, x[seen] * scale)
    if presence or frequency:
        said, counts = np.unique(np.array(history.output(), np.int64), return_counts=True)
        x[said] -= (presence + frequency * counts).astype(np.float32)
    return x


def _select(ids: Ids | None, x: Floats, keep: Ids) -> tuple[Ids, Floats]:
    return (keep if ids is None else ids[keep]), x[keep]


# Nats below the best, tried in turn: sorting the few tokens near the top is mostly enough.
_DEPTHS: Final = tuple(np.float32(d) for d in (-3, -6, -10, -np.inf))


def _top_k(x: Floats, k: int) -> tuple[Ids, Floats]:
    """The k largest; of equals at the edge, the lowest ids."""
    near = np.flatnonzero(x >= _DEPTHS[1])
    if len(near) < k:
        near = np.flatnonzero(x >= np.partition(x, -k)[-k])
    keep = np.sort(near[np.argsort(-x[near], kind="stable")[:k]])
    return keep, x[keep]


def _top_p(ids: Ids | None, x: Floats, top_p: float) -> tuple[Ids, Floats]:
    """The fewest likeliest tokens that together have top_p; of equals at the edge, the lowest ids."""
    weight = np.exp(x)
    wanted = top_p * float(weight.sum(dtype=np.float64))
    for depth in _DEPTHS:
        near = np.flatnonzero(x >= depth)
        near = near[np.argsort(-x[near], kind="stable")]
        reached = np.cumsum(weight[near], dtype=np.float64)
        if reached[-1] >= wanted:
            break
    keep = np.sort(near[: int((reached < wanted).sum()) + 1])
    return _select(ids, x, keep)
