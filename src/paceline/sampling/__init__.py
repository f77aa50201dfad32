"""How a token is chosen: pure functions, shared by the target and the drafters.

One fixed order: bias, mask, penalties, temperature, top-k, top-p, min-p. What is left is a `Law`; the token
is the argmax of the law's logits plus Gumbel noise. The noise is random access: it depends on the request's
seed, the place in the output and the token id, never on how many tokens were drawn before.

noise.py     keys, coins and the noise of a token
allowed.py   masks: which tokens may come
distribution.py       from logits to a law
choose.py    from a law to tokens
native.py    from logits to a token in one go (choose.cpp), the same token; law and choice where it cannot be
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
