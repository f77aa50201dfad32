"""The acceptance rules. Pure: distributions and coins come in, a verdict goes out.

match     common random numbers (Gumbel coupling, arXiv 2408.07978): the target samples its own token at every
          position with noise that depends on the position alone, and the draft is followed while it agrees
residual  speculative sampling (arXiv 2302.01318, 2211.17192), extended to trees
block     block verification (arXiv 2403.10444)
typical   the typical acceptance of Medusa (arXiv 2401.10774); lossy

A node's distribution or choice is the target's for the position *after* that node; that of ROOT follows the
committed text.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from paceline.errors import ConstraintError
from paceline.sampling import ACCEPT, RESAMPLE, Doubles, coin
from paceline.types import ROOT, Draft, Verdict

ProbsAt = Callable[[int], Doubles]  # node -> probabilities [vocab]


class Coins(Protocol):
    """Randomness as an argument, so that a test can try every outcome."""

    def flip(self, p: float) -> bool: ...  # True with probability p
    def pick(self, p: Doubles) -> int: ...  # i with probability p[i] / sum(p)


class KeyedCoins:
    """Coins of one round, keyed by its position in the output: every round commits a token."""

    def __init__(self, seed: int, choice: int, index: int) -> None:
        self._stream = (seed, choice)
        self._index = index
        self._flips = 0

    def _next(self, stream: int) -> float:
        self._flips += 1
        return coin(*self._stream, stream, self._index, self._flips)

    def flip(self, p: float) -> bool:
        return self._next(ACCEPT) < p

    def pick(self, p: Doubles) -> int:
        edges = np.cumsum(p)
        return int(np.searchsorted(edges, self._next(RESAMPLE) * edges[-1], side="right"))


def match(draft: Draft, choice: Callable[[int], int]) -> Verdict:
    """Follows the draft while it agrees. Every committed token is the target's own choice."""
    path: list[int] = []
    node, token = ROOT, choice(ROOT)
    while (nxt := draft.child(node, token)) is not None:
        try:
            following = choice(nxt)
        except ConstraintError:  # the next round raises it, as plain decoding would
            break
        path.append(nxt)
        node, token = nxt, following
    return Verdict(tuple(path), token)


def residual(draft: Draft, probs: ProbsAt, coins: Coins) -> Verdict:
    """Rejection sampling down a chain or tree: the text has exactly the target's distribution.

    Needs q[i] to be what tokens[i] was sampled from, given that its elder siblings were sampled before it.
    """
    if draft.q is None:  # not sampled: let the target sample, then compare
        return match(draft, lambda node: coins.pick(probs(node)))
    q = _rows(draft)
    path: list[int] = []
    node = ROOT
    while True:
        try:
            p = probs(node)
        except ConstraintError:
            return _up_to(draft, path)
        for child in draft.children(node):
            x = draft.tokens[child]
            if coins.flip(_ratio(p[x], q[child][x])):
                path.append(child)
                node = child
                break
            p = _remainder(p, q[child])
        else:
            return Verdict(tuple(path), coins.pick(p))


def block(draft: Draft, probs: ProbsAt, coins: Coins) -> Verdict:
    """Block verification of a chain: exact, and never accepts fewer tokens than `residual` on average.

    reach[i]: the probability that i tokens may stay. The longest prefix whose coin falls is accepted.
    """
    if draft.q is None:
        return residual(draft, probs, coins)
    q = _rows(draft)
    k = len(draft)
    reach = [1.0]
    for i, x in enumerate(draft.tokens):
        if reach[i] == 0:  # probability 0 for this token, so no distribution after it
            break
        try:
            reach.append(min(1.0, reach[i] * float(probs(i - 1)[x]) / float(q[i][x])))
        except ConstraintError:
            return block(draft.first(i), probs, coins) if i else _up_to(draft, ())
    accepted = 0
    for i in range(1, len(reach)):
        if reach[i] == 0:
            break
        left = 0.0 if i == k else float(np.maximum(reach[i] * probs(i - 1) - q[i], 0).sum())
        chance = reach[k] if i == k else _ratio(left, left + 1 - reach[i])
        if coins.flip(chance):
            accepted = i
    try:
        p = probs(accepted - 1)
    except ConstraintError:
        return _up_to(draft, range(accepted))
    if accepted < k:
        p = _remainder(reach[accepted] * p, q[accepted], otherwise=p)
    return Verdict(tuple(range(accepted)), coins.pick(p))


def typical(draft: Draft, probs: ProbsAt, choice: Callable[[int], int]) -> Verdict:
    """LOSSY. Accepts a token whose probability exceeds a threshold that falls with the entropy (Medusa)."""
    epsilon, delta = 0.3, 0.09
    path: list[int] = []
    node = ROOT
    while True:
        try:
            p = probs(node)
        except ConstraintError:
            return _up_to(draft, path)
        entropy = -float((p[p > 0] * np.log(p[p > 0])).sum())
        threshold = min(epsilon, delta * float(np.exp(-entropy)))
        typical_nodes = [c for c in draft.children(node) if p[draft.tokens[c]] > threshold]
        if not typical_nodes:
            return Verdict(tuple(path), choice(node))
        node = max(typical_nodes, key=lambda c: float(p[draft.tokens[c]]))
        path.append(node)


def _up_to(draft: Draft, path: Sequence[int]) -> Verdict:
    """The verdict where the grammar fails after accepted nodes: the next round raises the error."""
    if not path:
        raise  # the error being handled
    return Verdict(tuple(path[:-1]), draft.tokens[path[-1]])


def _rows(draft: Draft) -> list[Doubles]:
    assert draft.q is not None
    rows: Doubles = draft.q.double().cpu().numpy()
    return list(rows)


def _ratio(p: float, q: float) -> float:
    return 1.0 if p >= q else p / q


def _remainder(p: Doubles, q: Doubles, otherwise: Doubles | None = None) -> Doubles:
    """The normalised positive part of p - q, to be sampled from after a rejection."""
    rest = np.maximum(p - q, 0)
    total = rest.sum()
    if total <= 0:  # p and q are equal up to rounding, so a rejection has no weight
        return p if otherwise is None else otherwise
    return np.asarray(rest / total)
