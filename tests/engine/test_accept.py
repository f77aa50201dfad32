"""The joint distribution of every acceptance rule, by enumeration over a tiny vocabulary."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.accept import Coins, KeyedCoins, ProbsAt, block, match, residual, typical
from paceline.sampling import Doubles
from paceline.testing import BranchCoins, every_outcome
from paceline.types import ROOT, Draft, Verdict
from support import examples
from support.enumeration import (
    Prefix,
    Rule,
    Table,
    distribution_of_table,
    joint_distribution,
    largest_difference,
    match_rule,
)

VOCAB = 3
LENGTH = 3
Sampler = Callable[[Table, Prefix, BranchCoins], Draft]


def table(seed: int, zeros: bool = False) -> Table:
    """A different random distribution after every prefix, some with impossible tokens."""

    @cache
    def at(prefix: Prefix) -> Doubles:
        rng = np.random.default_rng([seed, *prefix])
        p = rng.random(VOCAB) ** 2
        if zeros and rng.random() < 0.5:
            p[rng.integers(VOCAB)] = 0
        return np.asarray(p / p.sum())

    return at


def chain(q: Table, prefix: Prefix, coins: BranchCoins, k: int = 2) -> Draft:
    tokens: Prefix = ()
    rows = []
    for _ in range(k):
        rows.append(q(prefix + tokens))
        tokens += (coins.pick(rows[-1]),)
    return Draft(tokens, None, ("toy",) * k, (), torch.from_numpy(np.stack(rows)))


def tree(q: Table, prefix: Prefix, coins: BranchCoins, replace: bool = False) -> Draft:
    """Two drafted next tokens, one more after each of them."""
    tokens: list[int] = []
    parents: list[int] = []
    rows: list[Doubles] = []
    rest = q(prefix).copy()
    for _ in range(2):
        if rest.sum() <= 0:
            break
        rows.append(rest / rest.sum())
        parents.append(ROOT)
        tokens.append(coins.pick(rows[-1]))
        if not replace:
            rest[tokens[-1]] = 0
    for node in range(len(tokens)):
        rows.append(q((*prefix, tokens[node])))
        parents.append(node)
        tokens.append(coins.pick(rows[-1]))
    return Draft(tuple(tokens), tuple(parents), ("toy",) * len(tokens), (), torch.from_numpy(np.stack(rows)))


def error(rule: Rule, sample: Sampler, seed: int, zeros: bool = False) -> float:
    """The largest error of P(first LENGTH tokens) under repeated rounds of draft and verdict."""
    p, q = table(seed, zeros), table(seed + 1000, zeros)

    def one_round(prefix: Prefix, coins: BranchCoins) -> Prefix:
        draft = sample(q, prefix, coins)
        verdict = rule(draft, lambda n: p(prefix + tuple(draft.tokens[i] for i in draft.path(n))), coins)
        return prefix + tuple(draft.tokens[i] for i in verdict.path) + (verdict.token,)

    got = joint_distribution(one_round, lambda prefix: prefix[:LENGTH] if len(prefix) >= LENGTH else None)
    return largest_difference(got, distribution_of_table(p, VOCAB, LENGTH))


def tree_with_replacement(q: Table, prefix: Prefix, coins: BranchCoins) -> Draft:
    return tree(q, prefix, coins, replace=True)


def bare(q: Table, prefix: Prefix, coins: BranchCoins) -> Draft:
    d = chain(q, prefix, coins)
    return Draft(d.tokens, None, d.sources)


def bare_tree(q: Table, prefix: Prefix, coins: BranchCoins) -> Draft:
    d = tree(q, prefix, coins)
    return Draft(d.tokens, d.parents, d.sources)


EXACT = {
    "match, chain": (match_rule, bare),
    "match, tree": (match_rule, bare_tree),
    "residual, chain": (residual, chain),
    "residual, tree without replacement": (residual, tree),
    "residual, tree with replacement": (residual, tree_with_replacement),
    "residual, bare chain": (residual, bare),
    "residual, bare tree": (residual, bare_tree),
    "block, chain": (block, chain),
    "block, bare chain": (block, bare),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", EXACT)
@pytest.mark.parametrize("zeros", [False, True])
def test_the_joint_distribution_is_the_targets(case: str, zeros: bool) -> None:
    rule, sample = EXACT[case]
    assert max(error(rule, sample, seed, zeros) for seed in range(examples(4, fewest=1))) < 1e-12


@settings(max_examples=examples(15))
@given(seed=st.integers(0, 10_000))
def test_the_joint_distribution_for_any_pair_of_tables(seed: int) -> None:
    assert error(residual, chain, seed, zeros=True) < 1e-12
    assert error(block, chain, seed, zeros=True) < 1e-12


def accept_when_likelier(draft: Draft, probs: ProbsAt, coins: Coins) -> Verdict:
    """Wrong: accepts a token whenever p >= q, and never otherwise."""

    class Hard(KeyedCoins):
        def flip(self, p: float) -> bool:
            return p >= 1

        def pick(self, p: Doubles) -> int:
            return coins.pick(p)

    return residual(draft, probs, Hard(0, 0, 0))


def resample_from_p(draft: Draft, probs: ProbsAt, coins: Coins) -> Verdict:
    """Wrong: after a rejection samples from p, not from what q left of it."""
    assert draft.q is not None
    path: list[int] = []
    for i, x in enumerate(draft.tokens):
        if not coins.flip(min(1.0, float(probs(i - 1)[x] / draft.q[i][x]))):
            break
        path.append(i)
    return Verdict(tuple(path), coins.pick(probs(len(path) - 1)))


def one_row_late(draft: Draft, probs: ProbsAt, coins: Coins) -> Verdict:
    """Wrong: reads the distribution of the row before."""
    return residual(draft, lambda node: probs(max(node - 1, ROOT)), coins)


def prune_sampled_tokens(draft: Draft, probs: ProbsAt, coins: Coins) -> Verdict:
    """Wrong: drops a token because of its value."""
    assert draft.q is not None
    unsure = [i for i, x in enumerate(draft.tokens) if float(draft.q[i][x]) < 0.4]
    return residual(draft.first(unsure[0] if unsure else len(draft)), probs, coins)


def greedy_walk(draft: Draft, probs: ProbsAt, coins: Coins) -> Verdict:
    """Wrong above temperature 0: compares with the likeliest token."""
    return match(draft, lambda node: int(probs(node).argmax()))


@pytest.mark.parametrize(
    "mutant", [accept_when_likelier, resample_from_p, one_row_late, prune_sampled_tokens, greedy_walk]
)
def test_a_wrong_rule_is_caught(mutant: Rule) -> None:
    assert max(error(mutant, chain, seed) for seed in range(4)) > 0.01


def test_typical_is_lossy() -> None:
    def rule(draft: Draft, probs: ProbsAt, coins: Coins) -> Verdict:
        return typical(draft, probs, lambda node: coins.pick(probs(node)))

    assert error(rule, chain, 0) > 0.01


def test_block_accepts_at_least_as_many_as_residual() -> None:
    def accepted(rule: Rule, seed: int) -> float:
        p, q = table(seed), table(seed + 1000)

        def one(coins: BranchCoins) -> int:
            draft = chain(q, (), coins, k=3)
            return len(rule(draft, lambda n: p(draft.tokens[: n + 1]), coins).path)

        return sum(chance * n for chance, n in every_outcome(one))

    pairs = [(accepted(block, s), accepted(residual, s)) for s in range(6)]
    assert all(b >= r - 1e-12 for b, r in pairs)
    assert any(b > r + 1e-3 for b, r in pairs)


def test_chances_of_all_outcomes_add_up_to_one() -> None:
    p, q = table(1), table(2)
    outcomes = every_outcome(lambda coins: residual(chain(q, (), coins), lambda n: p(()), coins))
    assert sum(chance for chance, _ in outcomes) == pytest.approx(1, abs=1e-12)


def test_match_follows_the_draft_while_it_agrees() -> None:
    draft = Draft((5, 6, 7, 8), (ROOT, 0, 0, 2), ("toy",) * 4)
    choices = {ROOT: 5, 0: 7, 2: 9}
    assert match(draft, choices.__getitem__) == Verdict((0, 2), 9)
    assert match(Draft(), lambda _: 3) == Verdict((), 3)
