"""Sampling from a drafter's own logits: with the target's noise, or with coins of its own and a q."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from paceline.config import SamplingParams
from paceline.sampling import (
    CHOICE,
    DRAFT,
    Doubles,
    Floats,
    History,
    Key,
    distribution,
    greedy,
    noise_key,
    ranked,
)
from paceline.types import Bits, Seq


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Alternatives for one position, best first."""

    tokens: list[int]
    chances: list[float]  # under the processed distribution; of greedy tokens, at temperature 1
    q: list[Doubles]  # [vocab]: what each was sampled from; empty if no q is needed


def sample_tokens(
    row: Floats,
    seq: Seq,
    written: Sequence[int],
    width: int = 1,
    mask: Bits | None = None,
    with_chances: bool = True,
) -> SampledTokens:
    """Tokens for the position after `seq.tokens` and `written`, from logits over the target's vocabulary.

    with_chances=False: greedy tokens come without chances, which saves a softmax.
    """
    history = History(seq.tokens, seq.prompt_len, written)
    if seq.params.temperature == 0 and not needs_q(seq):
        tokens = greedy(row, seq.params, history, width, mask)
        chances = _chances_at_1(row, seq, history, tokens, mask) if with_chances else []
        return SampledTokens(tokens, chances, [])
    probs = distribution(row, seq.params, history, mask)
    tokens = ranked(probs, _key(seq, len(written)), width)
    q = _without_replacement(probs.probabilities(), tokens) if needs_q(seq) else []
    tokens = tokens[: len(q)] if needs_q(seq) else tokens
    if seq.params.temperature == 0:
        return SampledTokens(tokens, _chances_at_1(row, seq, history, tokens, mask), q)
    return SampledTokens(tokens, probs.chances(tokens), q)


def _chances_at_1(
    row: Floats, seq: Seq, history: History, tokens: Sequence[int], mask: Bits | None
) -> list[float]:
    return distribution(row, _at_temperature_1(seq.params), history, mask).chances(tokens)


@lru_cache(maxsize=64)
def _at_temperature_1(params: SamplingParams) -> SamplingParams:
    return replace(params, temperature=1.0)


def needs_q(seq: Seq) -> bool:
    return seq.spec.accept in ("residual", "block")


def _key(seq: Seq, depth: int) -> Key:
    """The noise the target will use at this position; where q is needed, coins of this round instead."""
    index = len(seq.tokens) - seq.prompt_len
    stream, position, slot = (DRAFT, index, depth) if needs_q(seq) else (CHOICE, index + depth, 0)
    return noise_key(seq.params.noise_seed, seq.params.choice, stream, position, slot)


def _without_replacement(p: Doubles, tokens: Sequence[int]) -> list[Doubles]:
    """The distribution of each sibling, its elders being taken; ends where no probability is left."""
    rest, q = p.copy(), []
    for token in tokens:
        if rest[token] <= 0:
            break
        q.append(rest / rest.sum())
        rest[token] = 0
    return q
