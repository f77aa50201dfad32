"""From logits to a token: pure functions, shared by the target and the drafters.

One fixed order: bias, mask, penalties, temperature, top-k, top-p, min-p. The result is a `Distribution`; the
token is the argmax of its logits plus Gumbel noise (the Gumbel-max trick). The noise is random access: it
depends on the request's seed, the position in the output and the token id, never on how many tokens were
sampled before.

noise.py         keys, coins and the noise of a token
masks.py         bit masks of allowed tokens
distribution.py  from logits to a distribution
choose.py        from a distribution to tokens
native.py        from logits to a token in one go (csrc/choose.cpp): the same token, without the distribution
"""

from paceline.sampling.choose import choose, greedy, logprob, ranked
from paceline.sampling.distribution import NO_HISTORY, Distribution, Floats, History, distribution
from paceline.sampling.native import Among, Chooser, chooser
from paceline.sampling.noise import (
    ACCEPT,
    CHOICE,
    DRAFT,
    RESAMPLE,
    Doubles,
    Ids,
    Key,
    coin,
    gumbel,
    noise_key,
)

__all__ = [
    "ACCEPT",
    "CHOICE",
    "DRAFT",
    "NO_HISTORY",
    "RESAMPLE",
    "Among",
    "Chooser",
    "Distribution",
    "Doubles",
    "Floats",
    "History",
    "Ids",
    "Key",
    "choose",
    "chooser",
    "coin",
    "distribution",
    "greedy",
    "gumbel",
    "logprob",
    "noise_key",
    "ranked",
]
