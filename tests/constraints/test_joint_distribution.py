"""Under a grammar the output has exactly the target's distribution, each row restricted to the valid tokens.

By enumeration over small languages, with the real grammar engine. Nothing is sampled. Wrong ways to combine
drafts and masks, those that other engines have shipped among them, are shown to be caught.
"""

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest
import torch

from paceline.constraints import Compiler, Regex
from paceline.constraints.draft_masks import Masks, masks
from paceline.drafters.drafter_list import DrafterList, joined
from paceline.drafters.grammar import Grammar
from paceline.drafters.support.grammar_filter import grammar_valid
from paceline.engine.accept import ProbsAt, block, residual
from paceline.sampling import Doubles
from paceline.testing import BranchCoins
from paceline.types import Ask, Cursor, Draft, Seq
from support.enumeration import Prefix, Rule, Table, joint_distribution, largest_difference, match_rule
from support.grammars import small_tokenizer

pytestmark = pytest.mark.slow

TOKENIZER = small_tokenizer("abcd")
VOCAB = TOKENIZER.vocab_size
WORDS = (VOCAB + 31) // 32
COMPILER = Compiler(TOKENIZER, VOCAB)
LANGUAGES = ["a(bc|b)a?", "(abc|ab|b)c[ab]", "ab(ca){1,2}", "aab?c|aabbc"]

Sampler = Callable[[Table, Prefix, Cursor, BranchCoins], Draft]


def table(seed: int) -> Table:
    """A distribution after every prefix, over all tokens: most of them are not valid."""

    @cache
    def at(prefix: Prefix) -> Doubles:
        p = np.random.default_rng([seed, *prefix]).random(VOCAB) ** 2
        return np.asarray(p / p.sum())

    return at


def cursor_after(language: str, prefix: Prefix) -> Cursor:
    cursor = COMPILER.cursor(Regex(language))
    assert all(cursor.advance(token) for token in prefix)
    return cursor


def allowed(cursor: Cursor) -> list[int]:
    row = np.zeros(WORDS, np.uint32)
    assert cursor.fill(row)
    return [t for t in range(VOCAB) if row[t // 32] >> np.uint32(t % 32) & np.uint32(1)]


def masked(p: Doubles, row: np.ndarray) -> Doubles:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCAB]
    return np.asarray(p * bits / (p * bits).sum())


def row_of(cursor: Cursor) -> np.ndarray:
    row = np.zeros(WORDS, np.uint32)
    cursor.fill(row)
    return row


def masked_probs(p: Table, prefix: Prefix, draft: Draft, of: Masks) -> ProbsAt:
    def probs(node: int) -> Doubles:
        plain = p(prefix + tuple(draft.tokens[i] for i in draft.path(node)))
        row = of.after(node)
        return plain if row is None else masked(plain, row)

    return probs


def engine_distribution(
    rule: Rule, p: Table, q: Table, sample: Sampler, language: str
) -> dict[Prefix, float]:
    """P(output) under repeated rounds of draft, masks and verdict, as the engine plays them."""
    at = cache(partial(cursor_after, language))  # never moved

    def one_round(prefix: Prefix, coins: BranchCoins) -> Prefix:
        here = at(prefix)
        draft = sample(q, prefix, here.fork(), coins)
        verdict = rule(draft, masked_probs(p, prefix, draft, masks(here, draft, WORDS)), coins)
        return committed(prefix, here, (*(draft.tokens[i] for i in verdict.path), verdict.token))

    return joint_distribution(one_round, lambda prefix: prefix if at(prefix).finished else None)


def committed(prefix: Prefix, here: Cursor, new: Prefix) -> Prefix:
    """Up to the first token that ends the output; one that is not valid ends it too, and shows."""
    at = here.fork()
    for token in new:
        prefix = (*prefix, token)
        if not at.advance(token) or at.finished:
            break
    return prefix


def true_distribution(p: Table, language: str) -> dict[Prefix, float]:
    chances: dict[Prefix, float] = {}
    open_ends: list[tuple[Prefix, float]] = [((), 1.0)]
    while open_ends:
        prefix, chance = open_ends.pop()
        here = cursor_after(language, prefix)
        if here.finished:
            chances[prefix] = chances.get(prefix, 0) + chance
            continue
        at = masked(p(prefix), row_of(here))
        open_ends += [((*prefix, t), chance * float(at[t])) for t in allowed(here)]
    return chances


def few(q: Doubles, cursor: Cursor, valid_only: bool) -> Doubles:
    """q over a few tokens, so that they can be enumerated: the valid ones, and two that are not."""
    if cursor.finished:
        return q
    keep = allowed(cursor)
    if not valid_only:
        keep = [*keep, *[t for t in range(4) if t not in keep][:2]]
    thin = np.zeros(VOCAB)
    thin[keep] = q[keep]
    return np.asarray(thin / thin.sum())


def sampled(
    q: Table, prefix: Prefix, cursor: Cursor, coins: BranchCoins, valid_only: bool, k: int = 2
) -> Draft:
    tokens: Prefix = ()
    rows: list[Doubles] = []
    for _ in range(k):
        if cursor.finished:
            break
        rows.append(few(q(prefix + tokens), cursor, valid_only))
        tokens += (coins.pick(rows[-1]),)
        if not cursor.advance(tokens[-1]):
            break
    return Draft(tokens, None, ("toy",) * len(tokens), (), torch.from_numpy(np.stack(rows)))


def from_masked_q(q: Table, prefix: Prefix, cursor: Cursor, coins: BranchCoins) -> Draft:
    return sampled(q, prefix, cursor, coins, valid_only=True)


def from_unmasked_q(q: Table, prefix: Prefix, cursor: Cursor, coins: BranchCoins) -> Draft:
    return sampled(q, prefix, cursor, coins, valid_only=False)


def bare(q: Table, prefix: Prefix, cursor: Cursor, coins: BranchCoins) -> Draft:
    d = sampled(q, prefix, cursor.fork(), coins, valid_only=False)
    return grammar_valid(cursor, Draft(d.tokens, None, d.sources))


def forced(q: Table, prefix: Prefix, cursor: Cursor, coins: BranchCoins) -> Draft:
    seq = Seq("s", list(prefix), 0)
    return DrafterList([Grammar()]).draft([Ask(seq, 2, (), cursor, 4)])[0]


def forced_then_sampled(q: Table, prefix: Prefix, cursor: Cursor, coins: BranchCoins) -> Draft:
    first = forced(q, prefix, cursor, coins)
    at = cursor.fork()
    assert all(at.advance(token) for token in first.tokens)
    if at.finished:
        return first
    second = sampled(q, prefix + first.tokens, at, coins, valid_only=True, k=1)
    return joined([segment for segment in (first, second) if segment])


EXACT: dict[str, tuple[Rule, Sampler]] = {
    "match, bare": (match_rule, bare),
    "match, forced": (match_rule, forced),
    "residual, bare": (residual, bare),
    "residual, masked q": (residual, from_masked_q),
    "residual, unmasked q": (residual, from_unmasked_q),
    "residual, forced then masked q": (residual, forced_then_sampled),
    "block, masked q": (block, from_masked_q),
    "block, unmasked q": (block, from_unmasked_q),
    "block, forced then masked q": (block, forced_then_sampled),
}


def error(rule: Rule, sample: Sampler, language: str, seed: int = 1) -> float:
    p, q = table(seed), table(seed + 1000)
    got, want = engine_distribution(rule, p, q, sample, language), true_distribution(p, language)
    assert abs(sum(want.values()) - 1) < 1e-9
    return largest_difference(got, want)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("case", EXACT)
def test_the_joint_distribution_is_the_targets_under_the_grammar(case: str, language: str) -> None:
    assert error(*EXACT[case], language) < 1e-12


def drop_invalid_keep_q(q: Table, prefix: Prefix, cursor: Cursor, coins: BranchCoins) -> Draft:
    """Wrong: tokens that are not valid are cut off, and the rest is verified with its old q."""
    d = sampled(q, prefix, cursor.fork(), coins, valid_only=False)
    valid = grammar_valid(cursor, Draft(d.tokens, None, d.sources))
    return d.first(len(valid))


def another_q(q: Table, prefix: Prefix, cursor: Cursor, coins: BranchCoins) -> Draft:
    """Wrong: sampled from the masked distribution, verified with the unmasked one."""
    d = sampled(q, prefix, cursor.fork(), coins, valid_only=True)
    at = cursor.fork()
    rows = []
    for i, token in enumerate(d.tokens):
        rows.append(few(q(prefix + d.tokens[:i]), at, valid_only=False))
        at.advance(token)
    return Draft(d.tokens, None, d.sources, (), torch.from_numpy(np.stack(rows)))


WRONG: dict[str, tuple[Rule, Sampler]] = {
    "invalid tokens dropped, q unchanged": (residual, drop_invalid_keep_q),
    "sampled from one q, verified with another": (residual, another_q),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_draft_is_caught(case: str) -> None:
    assert max(error(*WRONG[case], language) for language in LANGUAGES) > 1e-3


def stale(of: Masks) -> Masks:
    return Masks([of.rows[max(0, i - 1)] for i in range(len(of.rows))])


def unmasked_bonus(of: Masks) -> Masks:
    return Masks([*of.rows[:-1], None])


@pytest.mark.parametrize("spoil", [stale, unmasked_bonus])
def test_a_wrong_mask_is_caught(spoil: Callable[[Masks], Masks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "masks", lambda *args: spoil(masks_of(*args)))
    try:
        wrong = max(error(match_rule, forced, language) for language in LANGUAGES)
    except (AssertionError, ValueError, FloatingPointError):
        return
    assert wrong > 1e-3 or np.isnan(wrong)


masks_of = masks
