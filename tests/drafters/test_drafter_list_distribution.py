"""Legs of every kind, under the residual rules, leave the text with exactly its law under the grammar."""

import random
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
import torch

from paceline.drafters.drafter_list import DrafterList
from paceline.drafters.grammar import Grammar
from paceline.engine.accept import Coins, ProbsAt, block, residual
from paceline.sampling import Doubles
from paceline.testing import BranchCoins, ToyCursor, every_outcome
from paceline.types import Ask, Draft, Drafter, Seq, Verdict

VOCAB, LENGTH = 3, 4
Prefix = tuple[int, ...]
Table = Callable[[Prefix], Doubles]
Rule = Callable[[Draft, ProbsAt, Coins], Verdict]


def rules(seed: int) -> Callable[[Prefix], set[int]]:
    def allowed(tokens: Prefix) -> set[int]:
        rng = random.Random(f"{seed} {tokens}")
        return set(rng.sample(range(VOCAB), rng.choice([1, 2, 3]))) if len(tokens) < LENGTH else set()

    return allowed


def table(seed: int, allowed: Callable[[Prefix], set[int]] | None) -> Table:
    """A different random law after every prefix, of what is allowed there."""

    @cache
    def distribution(prefix: Prefix) -> Doubles:
        rng = random.Random(f"law {seed} {prefix}")
        ids = (allowed(prefix) if allowed else None) or range(VOCAB)
        p = np.array([rng.random() if i in ids else 0.0 for i in range(VOCAB)])
        return np.asarray(p / p.sum())

    return distribution


class Drawn(Drafter):
    """Draws up to two tokens and says from what."""

    name = "drawn"

    def __init__(self, q: Table, coins: BranchCoins) -> None:
        self._q, self._coins = q, coins

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._one(ask) for ask in asks]

    def _one(self, ask: Ask) -> Draft:
        text = (*ask.seq.tokens, *ask.after)
        laws: list[Doubles] = []
        for _ in range(min(2, ask.budget, LENGTH - len(text))):
            laws.append(self._q(text))
            text = (*text, self._coins.pick(laws[-1]))
        if not laws:
            return Draft()
        return Draft(text[-len(laws) :], q=torch.from_numpy(np.stack(laws)))


class Bare(Drafter):
    """Always says the same."""

    name = "bare"

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft((0, 1)[: ask.budget]) for ask in asks]


def decoded(
    seed: int, rule: Rule, lists: Callable[[Drawn], list[Drafter]], masked: bool
) -> dict[Prefix, float]:
    """The law of the text, every coin of every round falling every way."""
    allowed = rules(seed)
    p, q = table(seed, allowed), table(seed + 1000, allowed if masked else None)

    @cache
    def after(prefix: Prefix) -> tuple[tuple[Prefix, float], ...]:
        if len(prefix) >= LENGTH:
            return ((prefix[:LENGTH], 1.0),)

        def one_round(coins: BranchCoins) -> Prefix:
            cursor = ToyCursor(allowed)
            assert all(cursor.advance(token) for token in prefix)
            ask = Ask(Seq("a", list(prefix), 0), 3, (), cursor, 2)
            (draft,) = DrafterList(lists(Drawn(q, coins))).draft([ask])
            verdict = rule(draft, lambda n: p(prefix + tuple(draft.tokens[i] for i in draft.path(n))), coins)
            return prefix + tuple(draft.tokens[i] for i in verdict.path) + (verdict.token,)

        total: dict[Prefix, float] = {}
        for chance, longer in every_outcome(one_round):
            for end, p_end in after(longer):
                total[end] = total.get(end, 0) + chance * p_end
        return tuple(total.items())

    return dict(after(()))


def true_law(seed: int) -> dict[Prefix, float]:
    p = table(seed, rules(seed))
    distribution: dict[Prefix, float] = {(): 1.0}
    for _ in range(LENGTH):
        distribution = {
            (*s, v): c * float(p(s)[v]) for s, c in distribution.items() for v in range(VOCAB) if p(s)[v] > 0
        }
    return distribution


LISTS: dict[str, Callable[[Drawn], list[Drafter]]] = {
    "grammar, drawn": lambda drawn: [Grammar(), drawn],
    "drawn, grammar": lambda drawn: [drawn, Grammar()],
    "grammar, bare, drawn": lambda drawn: [Grammar(), Bare(), drawn],
    "drawn": lambda drawn: [drawn],
}


@pytest.mark.parametrize("rule", [residual, block])
@pytest.mark.parametrize("names", LISTS)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_law_of_the_text_is_kept(rule: Rule, names: str, masked: bool, seed: int) -> None:
    got, want = decoded(seed, rule, LISTS[names], masked), true_law(seed)
    assert {s for s, chance in got.items() if chance > 1e-12} <= want.keys()
    assert max(abs(got.get(s, 0) - want[s]) for s in want) < 1e-12
