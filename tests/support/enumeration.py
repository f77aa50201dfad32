"""Exact distributions of outputs, by enumeration: nothing is sampled."""

from collections.abc import Callable, Mapping
from functools import cache

from paceline.engine.accept import Coins, ProbsAt, match
from paceline.sampling import Doubles
from paceline.testing import BranchCoins, every_outcome
from paceline.types import Draft, Verdict

Prefix = tuple[int, ...]
Table = Callable[[Prefix], Doubles]  # the distribution after each prefix
Rule = Callable[[Draft, ProbsAt, Coins], Verdict]


def match_rule(draft: Draft, probs: ProbsAt, coins: Coins) -> Verdict:
    return match(draft, lambda node: coins.pick(probs(node)))


def joint_distribution(
    one_round: Callable[[Prefix, BranchCoins], Prefix], output: Callable[[Prefix], Prefix | None]
) -> dict[Prefix, float]:
    """P(output) under repeated rounds, every coin of every round falling every way.

    one_round: from a prefix to a longer one. output: of a prefix that is complete; None: it is not.
    """

    @cache
    def after(prefix: Prefix) -> tuple[tuple[Prefix, float], ...]:
        if (end := output(prefix)) is not None:
            return ((end, 1.0),)
        total: dict[Prefix, float] = {}
        for chance, longer in every_outcome(lambda coins: one_round(prefix, coins)):
            for end, p_end in after(longer):
                total[end] = total.get(end, 0) + chance * p_end
        return tuple(total.items())

    return dict(after(()))


def distribution_of_table(p: Table, vocab: int, length: int) -> dict[Prefix, float]:
    """P(first `length` tokens), by definition."""
    chances: dict[Prefix, float] = {(): 1.0}
    for _ in range(length):
        chances = {
            (*s, v): c * float(p(s)[v]) for s, c in chances.items() for v in range(vocab) if p(s)[v] > 0
        }
    return chances


def largest_difference(a: Mapping[Prefix, float], b: Mapping[Prefix, float]) -> float:
    return max(abs(a.get(s, 0) - b.get(s, 0)) for s in a.keys() | b.keys())
