"""Small grammars that are easy to think about, and random ones that are not."""

import random
from collections.abc import Callable

from paceline.testing import ToyCursor

VOCAB = 6


def sentence(*places: set[int], eos: int | None = None) -> ToyCursor:
    """One set of tokens for each place of the output, then the end."""
    return ToyCursor(lambda tokens: places[len(tokens)] if len(tokens) < len(places) else set(), eos)


def random_rules(seed: int, longest: int = 6) -> Callable[[tuple[int, ...]], set[int]]:
    """Any tokens may follow any others, mostly few, often one; an output has at most `longest` tokens."""

    def allowed(tokens: tuple[int, ...]) -> set[int]:
        rng = random.Random(f"{seed} {tokens}")
        if len(tokens) == longest or (tokens and rng.random() < 0.1):
            return set()
        return set(rng.sample(range(VOCAB), rng.choice([1, 1, 2, 3, VOCAB])))

    return allowed


def permits(rules: Callable[[tuple[int, ...]], set[int]], tokens: tuple[int, ...]) -> bool:
    """By definition: each token is allowed after those before it."""
    return all(token in rules(tokens[:i]) for i, token in enumerate(tokens))
