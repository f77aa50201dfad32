"""Under the residual rules, segments of every kind leave the text its exact distribution."""

import random
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
import torch

from paceline.drafters.drafter_list import DrafterList
from paceline.drafters.grammar import Grammar
from paceline.engine.accept import block, residual
from paceline.sampling import Doubles
from paceline.testing import BranchCoins, ToyCursor
from paceline.types import Ask, Draft, Drafter, Seq
from support.enumeration import Prefix, Rule, Table, distribution_of_table, joint_distribution

VOCAB, LENGTH = 3, 4


def rules(seed: int) -> Callable[[Prefix], set[int]]:
    def allowed(tokens: Prefix) -> set[int]:
        rng = random.Random(f"{seed} {tokens}")
        return set(rng.sample(range(VOCAB), rng.choice([1, 2, 3]))) if len(tokens) < LENGTH else set()

    return allowed


def table(seed: int, allowed: Callable[[Prefix], set[int]] | None) -> Table:
    """A different random distribution after every prefix, of what is allowed there."""

    @cache
    def distribution(prefix: Prefix) -> Doubles:
        rng = random.Random(f"law {seed} {prefix}")
        ids = (allowed(prefix) if allowed else None) or range(VOCAB)
        p = np.array([rng.random() if i in ids else 0.0 for i in range(VOCAB)])
        return np.asarray(p / p.sum())

    return distribution


class Sampled(Drafter):
    """Samples up to two tokens, and gives its q."""

    name = "sampled"

    def __init__(self, q: Table, coins: BranchCoins) -> None:
        self._q, self._coins = q, coins

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._one(ask) for ask in asks]

    def _one(self, ask: Ask) -> Draft:
        text = (*ask.seq.tokens, *ask.after)
        rows: list[Doubles] = []
        for _ in range(min(2, ask.budget, LENGTH - len(text))):
            rows.append(self._q(text))
            text = (*text, self._coins.pick(rows[-1]))
        if not rows:
            return Draft()
        return Draft(text[-len(rows) :], q=torch.from_numpy(np.stack(rows)))


class Bare(Drafter):
    """Always drafts the same."""

    name = "bare"

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft((0, 1)[: ask.budget]) for ask in asks]


def decoded(
    seed: int, rule: Rule, lists: Callable[[Sampled], list[Drafter]], masked: bool
) -> dict[Prefix, float]:
    allowed = rules(seed)
    p, q = table(seed, allowed), table(seed + 1000, allowed if masked else None)

    def one_round(prefix: Prefix, coins: BranchCoins) -> Prefix:
        cursor = ToyCursor(allowed)
        assert all(cursor.advance(token) for token in prefix)
        ask = Ask(Seq("a", list(prefix), 0), 3, (), cursor, 2)
        (draft,) = DrafterList(lists(Sampled(q, coins))).draft([ask])
        verdict = rule(draft, lambda n: p(prefix + tuple(draft.tokens[i] for i in draft.path(n))), coins)
        return prefix + tuple(draft.tokens[i] for i in verdict.path) + (verdict.token,)

    return joint_distribution(one_round, lambda prefix: prefix[:LENGTH] if len(prefix) >= LENGTH else None)


LISTS: dict[str, Callable[[Sampled], list[Drafter]]] = {
    "grammar, sampled": lambda sampled: [Grammar(), sampled],
    "sampled, grammar": lambda sampled: [sampled, Grammar()],
    "grammar, bare, sampled": lambda sampled: [Grammar(), Bare(), sampled],
    "sampled": lambda sampled: [sampled],
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rule", [residual, block])
@pytest.mark.parametrize("names", LISTS)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_text_has_its_exact_distribution(rule: Rule, names: str, masked: bool, seed: int) -> None:
    got = decoded(seed, rule, LISTS[names], masked)
    want = distribution_of_table(table(seed, rules(seed)), VOCAB, LENGTH)
    assert {s for s, chance in got.items() if chance > 1e-12} <= want.keys()
    assert max(abs(got.get(s, 0) - want[s]) for s in want) < 1e-12
