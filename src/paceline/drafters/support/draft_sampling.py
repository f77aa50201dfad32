"""What drafters with a law of their own share: guesses with the target's noise, or drawn ones and their q."""

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
class Drawn:
    """Guesses for one place, best first."""

    tokens: list[int]
    chances: list[float]  # of each, under the processed law; of greedy ones as if drawn at temperature 1
    laws: list[Doubles]  # what each was drawn from; none for bare guesses


def draw(
    row: Floats,
    seq: Seq,
    written: Sequence[int],
    width: int = 1,
    mask: Bits | None = None,
    weighed: bool = True,
) -> Drawn:
    """Guesses for the place after `seq.tokens` and `written`, from a drafter's logits over the vocabulary.

    weighed: with chances, which greedy guesses have only if they are asked for.
    """
    history = History(seq.tokens, seq.prompt_len, written)
    if seq.params.temperature == 0 and not needs_q(seq):
        found = greedy(row, seq.params, history, width, mask)
        if not weighed:
            return Drawn(found, [], [])
        return Drawn(found, _warm_chances(row, seq, history, found, mask), [])
    of = distribution(row, seq.params, history, mask)
    found = ranked(of, _key(seq, len(written)), width)
    laws = _without_replacement(of.probabilities(), found) if needs_q(seq) else []
    found = found[: len(laws)] if needs_q(seq) else found
    if seq.params.temperature == 0:
        return Drawn(found, _warm_chances(row, seq, history, found, mask), laws)
    return Drawn(found, of.chances(found), laws)


def _warm_chances(
    row: Floats, seq: Seq, history: History, tokens: Sequence[int], mask: Bits | None
) -> list[float]:
    return distribution(row, _warm(seq.params), history, mask).chances(tokens)


@lru_cache(maxsize=64)
def _warm(params: SamplingParams) -> SamplingParams:
    return replace(params, temperature=1.0)


def needs_q(seq: Seq) -> bool:
    return seq.spec.accept in ("residual", "block")


def _key(seq: Seq, depth: int) -> Key:
    """The noise the target will use at this place; where q counts, coins of this round instead."""
    index = len(seq.tokens) - seq.prompt_len
    stream, where, slot = (DRAFT, index, depth) if needs_q(seq) else (CHOICE, index + depth, 0)
    return noise_key(seq.params.noise_seed, seq.params.choice, stream, where, slot)


def _without_replacement(p: Doubles, drawn: Sequence[int]) -> list[Doubles]:
    """What each of the siblings was drawn from, its elders being taken; ends where nothing is left."""
    rest, laws = p.copy(), []
    for token in drawn:
        if rest[token] <= 0:
            break
        laws.append(rest / rest.sum())
        rest[token] = 0
    return laws
