"""What becomes of a draft. Pure: laws and coins come in, a verdict goes out.

A node's law or choice is what the target says *after* that node; after ROOT, what follows the text so far.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from paceline.errors import ConstraintError
from paceline.sampling import ACCEPT, RESAMPLE, Doubles, coin
from paceline.types import ROOT, Draft, Verdict

LawAt = Callable[[int], Doubles]  # node -> probabilities [vocab]


class Coins(Protocol):
    """Randomness as an argument, so that a test can try every outcome."""

    def flip(self, p: float) -> bool: ...  # True with probability p
    def pick(self, p: Doubles) -> int: ...  # i with probability p[i] / sum(p)


class KeyedCoins:
    """Coins of one round, which its place in the output identifies: every round commits a token."""

    def __init__(self, seed: int, choice: int, index: int) -> None:
        self._where = (seed, choice)
        self._index = index
        self._thrown = 0

    def _next(self, stream: int) -> float:
        self._thrown += 1
        return coin(*self._where, stream, self._index, self._thrown)

    def flip(self, p: float) -> bool:
        return self._next(ACCEPT) < p

    def pick(self, p: Doubles) -> int:
        edges = np.cumsum(p)
        return int(np.searchsorted(edges, self._next(RESAMPLE) * edges[-1], side="right"))


def match(draft: Draft, choice: Callable[[int], int]) -> Verdict:
    """Follow the draft while it agrees. Every token kept is the target's own choice."""
    path: list[int] = []
    node, token = ROOT, choice(ROOT)
    while (nxt := draft.child(node, token)) is not None:
        try:
            following = choice(nxt)
        except ConstraintError:  # the next round says so, as plain decoding does
            break
        path.append(nxt)
        node, token = nxt, following
    return Verdict(tuple(path), token)


def residual(draft: Draft, law: LawAt, coins: Coins) -> Verdict:
    """Rejection sampling down a chain or tree: text has exactly the target's law.

    Needs q[i] to be what tokens[i] was drawn from, given that its elder siblings were drawn before it.
    """
    if draft.q is None:  # bare guesses: let the target draw, then compare
        return match(draft, lambda node: coins.pick(law(node)))
    q = _rows(draft)
    path: list[int] = []
    node = ROOT
    while True:
        try:
            p = law(node)
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


def block(draft: Draft, law: LawAt, coins: Coins) -> Verdict:
    """Block verification of a chain: exact, and never accepts fewer tokens than `residual` on average.

    reach[i] is the chance that the first i tokens may stay; the longest stretch whose coin falls is kept.
    """
    if draft.q is None:
        return residual(draft, law, coins)
    q = _rows(draft)
    k = len(draft)
    reach = [1.0]
    for i, x in enumerate(draft.tokens):
        if reach[i] == 0:  # the target cannot say this token, and has no law for what follows it
            break
        try:
            reach.append(min(1.0, reach[i] * float(law(i - 1)[x]) / float(q[i][x])))
        except ConstraintError:
            return block(draft.first(i), law, coins) if i else _up_to(draft, ())
    kept = 0
    for i in range(1, len(reach)):
        if reach[i] == 0:
            break
        left = 0.0 if i == k else float(np.maximum(reach[i] * law(i - 1) - q[i], 0).sum())
        chance = reach[k] if i == k else _ratio(left, left + 1 - reach[i])
        if coins.flip(chance):
            kept = i
    try:
        p = law(kept - 1)
    except ConstraintError:
        return _up_to(draft, range(kept))
    if kept < k:
        p = _remainder(reach[kept] * p, q[kept], otherwise=p)
    return Verdict(tuple(range(kept)), coins.pick(p))


def typical(draft: Draft, law: LawAt, choice: Callable[[int], int]) -> Verdict:
    """LOSSY. Medusa's rule: a guess stays if the target finds it likely enough for how unsure it is."""
    epsilon, delta = 0.3, 0.09
    path: list[int] = []
    node = ROOT
    while True:
        try:
            p = law(node)
        except ConstraintError:
            return _up_to(draft, path)
        entropy = -float((p[p > 0] * np.log(p[p > 0])).sum())
        threshold = min(epsilon, delta * float(np.exp(-entropy)))
        liked = [c for c in draft.children(node) if p[draft.tokens[c]] > threshold]
        if not liked:
            return Verdict(tuple(path), choice(node))
        node = max(liked, key=lambda c: float(p[draft.tokens[c]]))
        path.append(node)


def _up_to(draft: Draft, path: Sequence[int]) -> Verdict:
    """To be called where the grammar fails after guesses that were kept: the next round says so."""
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
    """The part of p that q does not cover, to be drawn from after a rejection."""
    rest = np.maximum(p - q, 0)
    total = rest.sum()
    if total <= 0:  # p and q are equal up to rounding, so a rejection has no weight
        return p if otherwise is None else otherwise
    return np.asarray(rest / total)
