"""A draft model with another tokenizer under the residual rules: the text has exactly the target's law.

By enumeration, the drafter itself in the loop: each of its draws falls every way. Nothing is sampled.
"""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
import torch

from paceline.config import Accept, SamplingParams, SpecConfig
from paceline.drafters.draft_model import ModelDrafter, TextDrafter
from paceline.drafters.draft_model.vocab_mapping import SharedVocab, TokenizerPair
from paceline.drafters.support import draft_sampling as drawing
from paceline.engine.accept import Coins, ProbsAt, block, residual
from paceline.sampling import Distribution, Doubles, Floats
from paceline.testing import BranchCoins, ToyTarget, every_outcome
from paceline.types import Ask, Draft, Drafter, Seq, Verdict
from support.tokenizers import tokenizer

# Shared are a, b and the end; only the target has ab, only the draft model aa and ba, and their ids differ.
TWO = TokenizerPair(
    tokenizer(("aa", "ba"), ("<eos>",), b"ba", cuts_words=False),
    tokenizer(("ab",), ("<|endoftext|>",), b"ab", cuts_words=False),
)
VOCAB, OWN = TWO.target.vocab_size, TWO.draft.vocab_size
PROMPT, LENGTH = (2, 0), 3
Prefix = tuple[int, ...]
Table = Callable[[Prefix], Doubles]
Rule = Callable[[Draft, ProbsAt, Coins], Verdict]


def table(seed: int) -> Table:
    """A different random law after every prefix, some with impossible tokens."""

    @cache
    def at(prefix: Prefix) -> Doubles:
        rng = np.random.default_rng([seed, *prefix])
        p = rng.random(VOCAB) ** 2
        if rng.random() < 0.4:
            p[rng.integers(VOCAB)] = 0
        return np.asarray(p / p.sum())

    return at


def joint_law(
    seed: int, rule: Rule, accept: Accept, made: Callable[[], Drafter], patch: pytest.MonkeyPatch
) -> dict[Prefix, float]:
    """P(first LENGTH tokens) under repeated rounds of the drafter and a verdict."""
    p = table(seed)

    def one_round(prefix: Prefix, coins: BranchCoins) -> Prefix:
        def drawn(of: Distribution, key: object, width: int) -> list[int]:
            return [coins.pick(of.probabilities())]

        patch.setattr(drawing, "ranked", drawn)
        params = SamplingParams(temperature=0.9, seed=seed)
        seq = Seq("a", [*PROMPT, *prefix], len(PROMPT), params, SpecConfig(("model",), accept=accept))
        guesser = made()
        guesser.begin(seq)
        (draft,) = guesser.draft([Ask(seq, 2)])
        verdict = rule(draft, lambda n: p(prefix + tuple(draft.tokens[i] for i in draft.path(n))), coins)
        return prefix + tuple(draft.tokens[i] for i in verdict.path) + (verdict.token,)

    @cache
    def after(prefix: Prefix) -> tuple[tuple[Prefix, float], ...]:
        if len(prefix) >= LENGTH:
            return ((prefix[:LENGTH], 1.0),)
        total: dict[Prefix, float] = {}
        for chance, longer in every_outcome(lambda coins: one_round(prefix, coins)):
            for end, p_end in after(longer):
                total[end] = total.get(end, 0) + chance * p_end
        return tuple(total.items())

    return dict(after(()))


def true_law(p: Table) -> dict[Prefix, float]:
    distribution: dict[Prefix, float] = {(): 1.0}
    for _ in range(LENGTH):
        distribution = {
            (*s, v): c * float(p(s)[v]) for s, c in distribution.items() for v in range(VOCAB) if p(s)[v] > 0
        }
    return distribution


def error(rule: Rule, accept: Accept, made: Callable[[], Drafter], patch: pytest.MonkeyPatch) -> float:
    worst = 0.0
    for seed in range(2):
        got, want = joint_law(seed, rule, accept, made, patch), true_law(table(seed))
        worst = max(worst, *(abs(got.get(s, 0) - want.get(s, 0)) for s in got.keys() | want.keys()))
    return worst


def by_tokens(vocab: type[SharedVocab] = SharedVocab) -> Drafter:
    return ModelDrafter(ToyTarget(OWN), VOCAB, vocab=vocab(TWO, VOCAB))


def by_text() -> Drafter:
    return TextDrafter(ToyTarget(OWN), TWO)


RULES: dict[Accept, Rule] = {"residual": residual, "block": block}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("accept", RULES)
@pytest.mark.parametrize("made", [by_tokens, by_text])
def test_the_text_has_the_targets_distribution(
    accept: Accept, made: Callable[[], Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {*TWO.shared} == {0, 1, 3}
    assert error(RULES[accept], accept, made, monkeypatch) < 1e-12


class InOwnIds(ModelDrafter):
    """Wrong: q stands where the draft model's ids are, not the target's."""

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [_with_q(d, _moved) for d in super().draft(asks)]


class NotRestricted(ModelDrafter):
    """Wrong: draws among shared tokens, and reports a law that has others too."""

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [_with_q(d, lambda q: 0.7 * q + 0.3 / VOCAB) for d in super().draft(asks)]


class DropsWhatMergesBadly(ModelDrafter):
    """Wrong: leaves out a guess for what it says."""

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [d.first(1) if d.tokens[1:] == (1,) else d for d in super().draft(asks)]


def _moved(q: torch.Tensor) -> torch.Tensor:
    moved = torch.full_like(q, 1e-9)
    for theirs, own in TWO.shared.items():
        moved[:, own % VOCAB] += q[:, theirs]
    return moved


def _with_q(draft: Draft, change: Callable[[torch.Tensor], torch.Tensor]) -> Draft:
    assert draft.q is not None
    return Draft(draft.tokens, None, draft.sources, draft.scores, change(draft.q))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mutant", [InOwnIds, NotRestricted, DropsWhatMergesBadly])
def test_a_wrong_q_is_caught(mutant: type[ModelDrafter], monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> Drafter:
        return mutant(ToyTarget(OWN), VOCAB, vocab=SharedVocab(TWO, VOCAB))

    assert error(residual, "residual", made, monkeypatch) > 0.01


def test_a_wrong_id_costs_drafts_and_not_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which tokens are taken for the same is knowledge, not law."""

    class Swapped(SharedVocab):
        def target_logits(self, logits: Floats) -> Floats:
            return super().target_logits(logits[::-1])

    assert error(residual, "residual", lambda: by_tokens(Swapped), monkeypatch) < 1e-12
