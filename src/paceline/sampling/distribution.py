"""The distribution a token is sampled from, in numpy: the reference, and the fallback without a compiler.

One fixed order: bias, mask, penalties, temperature, top-k, top-p, min-p.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.config import SamplingParams
from paceline.sampling.masks import allowed_ids
from paceline.sampling.noise import Doubles, Ids
from paceline.types import Bits

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class History:
    """The text before a row; read only where penalties need it."""

    tokens: Sequence[int] | Ids = ()
    prompt_len: int = 0
    drafted: Sequence[int] = ()  # the draft's tokens before the row

    def text(self) -> Ids:
        return np.concatenate([np.asarray(self.tokens, np.int64), np.asarray(self.drafted, np.int64)])


NO_HISTORY: Final = History()


@dataclass(frozen=True, slots=True)
class Distribution:
    """A processed distribution: the probability of ids[i] is proportional to exp(logits[i])."""

    ids: Ids | None  # ascending, all others are impossible; None: every id
    logits: Floats  # relative to the largest, which is 0
    vocab: int

    def chances(self, tokens: Sequence[int]) -> list[float]:
        """The probability of each."""
        weights = np.exp(self.logits)
        whole = weights.sum(dtype=np.float64)
        if self.ids is None:
            return [float(weights[token] / whole) for token in tokens]
        slots = zip(tokens, np.searchsorted(self.ids, np.asarray(tokens, np.int64)), strict=True)
        inside = [(at, at < len(self.ids) and self.ids[at] == token) for token, at in slots]
        return [float(weights[at] / whole) if there else 0.0 for at, there in inside]

    def probabilities(self) -> Doubles:
        p = np.exp(self.logits.astype(np.float64))
        p /= p.sum()
        if self.ids is None:
            return p
        dense = np.zeros(self.vocab)
        dense[self.ids] = p
        return dense


def distribution(
    logits: Floats, params: SamplingParams, history: History = NO_HISTORY, mask: Bits | None = None
) -> Distribution:
    """The processed distribution of a row's token.

    A mask makes the allowed tokens the whole vocabulary: with their logits all broken or all -inf, the token
    is still one of them.
    """
    ids, x = processed(logits, params, history, mask)
    top = int(x.argmax())  # ties: the lowest id; a NaN is taken for the largest
    if params.temperature == 0 or not np.isfinite(x[top]):  # an infinite or broken logit leaves no choice
        return Distribution(
            np.array([top if ids is None else ids[top]]), np.zeros(1, np.float32), len(logits)
        )
    x = (x - x[top]) * np.float32(1 / params.temperature)
    if 0 < params.top_k < len(x):
        ids, x = _select(ids, x, _top_k(x, params.top_k))
    if params.top_p < 1:
        ids, x = _top_p(ids, x, params.top_p)
    if params.min_p > 0:
        ids, x = _select(ids, x, np.flatnonzero(x >= lowest(params.min_p)))
    return Distribution(ids, x, len(logits))


def processed(
    logits: Floats, params: SamplingParams, history: History, mask: Bits | None = None
) -> tuple[Ids | None, Floats]:
    """Bias, mask, penalties: the logits that greedy decoding takes the largest of.

    Of the allowed tokens, whose ids stand beside them, ascending; None: of every token. (The mask is applied
    last, which is the same: the two others change each logit by itself.)
    """
    x = _penalised(_biased(logits, params), params, history)
    if mask is None:
        return None, x
    ids = allowed_ids(mask, len(x))
    return ids, x.take(ids)  # for many ids quicker than x[ids]


def penalises(params: SamplingParams) -> bool:
    """True if a choice depends on the text before it."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def lowest(min_p: float) -> np.float32:
    """The lowest logit, relative to the largest, that min-p keeps."""
    return np.float32(np.log(min_p))


def _biased(logits: Floats, params: SamplingParams) -> Floats:
    if not params.logit_bias:
        return logits
    x = logits.copy()
    for token, bias in params.logit_bias:
        if 0 <= token < len(x):
            x[token] += np.float32(bias)
    return x


def _penalised(x: Floats, params: SamplingParams, history: History) -> Floats:
    if not penalises(params):
        return x
    x = x.copy()
    text = history.text()
    if params.repetition_penalty != 1:
        seen = np.unique(text)
        scale = np.float32(params.repetition_penalty)
        x[seen] = np.where(x[seen] > 0, x[seen] / scale, x[seen] * scale)
    presence, frequency = params.presence_penalty, params.frequency_penalty
    if presence or frequency:
        seen, counts = np.unique(text[history.prompt_len :], return_counts=True)
        x[seen] -= (presence + frequency * counts).astype(np.float32)
    return x


def _select(ids: Ids | None, x: Floats, keep: Ids) -> tuple[Ids, Floats]:
    return (keep if ids is None else ids[keep]), x[keep]


# Nats below the best, tried in turn: sorting the few tokens near the top is mostly enough.
_DEPTHS: Final = tuple(np.float32(d) for d in (-3, -6, -10, -np.inf))


def _top_k(x: Floats, k: int) -> Ids:
    """Indices of the k largest; of equals at the cutoff, the lowest ids."""
    near = np.flatnonzero(x >= _DEPTHS[1])
    if len(near) < k:
        near = np.flatnonzero(x >= np.partition(x, -k)[-k])
    return np.sort(near[np.argsort(-x[near], kind="stable")[:k]])


def _top_p(ids: Ids | None, x: Floats, top_p: float) -> tuple[Ids, Floats]:
    """The fewest likeliest tokens that together have top_p; of equals at the edge, the lowest ids."""
    ids, x = _select(ids, x, np.flatnonzero(x > _WEIGHTLESS))
    weight = _weights(x)
    target = top_p * float(weight.sum())
    for depth in _DEPTHS:
        near = np.flatnonzero(x >= depth)
        near = near[np.argsort(-x[near], kind="stable")]
        reached = np.cumsum(weight[near])
        if reached[-1] >= target:
            break
    keep = np.sort(near[: int((reached < target).sum()) + 1])
    return _select(ids, x, keep)


_ROUND: Final = np.float32(1.5 * 2**23)  # adding it rounds to a whole number
_LN2: Final = (np.float32(0.693359375), np.float32(-2.12194440e-4))  # its first bits, and the rest
_EXP: Final = tuple(
    np.float32(c)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)
_WEIGHTLESS: Final = np.float32(-24.5)  # below it, _weights rounds to zero
_QUANTUM: Final = 1.5 * 2.0**18  # adding it to a double rounds to multiples of 2^-34


def _weights(x: Floats) -> Doubles:
    """exp(x) for _WEIGHTLESS <= x <= 0, rounded to multiples of 2^-34.

    Sums of these over 2^19 tokens are exact, in any order; and nothing but sums and products of float32 goes
    into one, so that choose.cpp and every processor have the same.
    """
    shifted = x * np.float32(1.44269504) + _ROUND
    n = shifted - _ROUND
    r = (x - n * _LN2[0]) - n * _LN2[1]
    p = np.full_like(r, 1.9875691500e-4)
    for c in _EXP:
        p *= r
        p += c
    p = (p * (r * r) + r) + np.float32(1)
    p.view(np.int32)[:] += (shifted.view(np.int32) - _ROUND.view(np.int32)) << 23  # times 2^n
    weight: Doubles = p.astype(np.float64) + _QUANTUM
    return weight - _QUANTUM
