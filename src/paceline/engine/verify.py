"""Verification: from the logits of a pass to a verdict, by the acceptance rule of the request."""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache

import numpy as np

from paceline.constraints.draft_masks import FREE, Masks
from paceline.engine.accept import KeyedCoins, block, match, residual, typical
from paceline.sampling import (
    CHOICE,
    NO_HISTORY,
    Doubles,
    Floats,
    History,
    chooser,
    distribution,
    logprob,
    noise_key,
)
from paceline.sampling.distribution import penalises
from paceline.types import ROOT, Draft, Sampler, Seq, TokenLogprob, Verdict


def sampler_of(seq: Seq, masks: Callable[[], Masks] | None = None) -> Sampler | None:
    """For a target that chooses tokens itself; None: the request needs logits.

    masks: of the rows of a sequence with a grammar.
    """
    params = seq.params
    if seq.spec.accept != "match" or params.logprobs is not None:
        return None
    index, seed = len(seq.tokens) - seq.prompt_len, params.noise_seed & (2**64 - 1)
    if masks is None and (seq.cursor is not None or (index < params.min_tokens and seq.end_tokens)):
        return None
    cut: tuple[float, int, float, float] = (0.0, 0, 1.0, 0.0)  # greedy: a cut keeps the largest
    if params.temperature:
        cut = (_float32(1 / params.temperature), params.top_k, params.top_p, params.min_p)
    if masks is None and not params.logit_bias and not penalises(params):
        return Sampler(cut[0], seed, params.choice, index, *cut[1:])
    if len(dict(params.logit_bias)) < len(params.logit_bias):  # a token twice: its biases are added in turn
        return None
    return Sampler(
        cut[0],
        seed,
        params.choice,
        index,
        *cut[1:],
        bias=params.logit_bias,
        repetition=_float32(params.repetition_penalty),
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        text=seq.tokens,
        prompt_len=seq.prompt_len,
        masks=None if masks is None else lambda: masks().rows,
    )


@lru_cache(maxsize=64)
def _float32(value: float) -> float:
    return float(np.float32(value))


def verify_choices(draft: Draft, tokens: Sequence[int], masks: Masks = FREE) -> Verdict:
    """The rule `match` where the target has chosen: tokens[0] follows the text, tokens[i + 1] node i."""
    if not draft.tokens and not masks.rows:
        return Verdict((), tokens[0])
    if draft.parents is not None or masks.rows:

        def choice(node: int) -> int:
            masks.after(node)  # raises where the grammar cannot go on
            return tokens[node + 1]

        return match(draft, choice)
    accepted = 0
    for drafted, chosen in zip(draft.tokens, tokens, strict=False):
        if drafted != chosen:
            break
        accepted += 1
    return Verdict(tuple(range(accepted)), tokens[accepted])


def verify(seq: Seq, draft: Draft, rows: Floats, masks: Masks = FREE) -> Verdict:
    """rows[0] follows the committed text, rows[i + 1] follows node i: [1 + len(draft), vocab].

    A row is read only if the walk through the draft reaches its node.
    """
    index = len(seq.tokens) - seq.prompt_len
    params = seq.params
    pick = chooser(params)
    text = np.array(seq.tokens, np.int64) if pick.needs_history else None

    def history_at(node: int) -> History:
        if text is None:
            return NO_HISTORY
        return History(text, seq.prompt_len, [draft.tokens[i] for i in draft.path(node)])

    def probs_at(node: int) -> Doubles:
        return distribution(rows[node + 1], params, history_at(node), masks.after(node)).probabilities()

    def choice_at(node: int) -> int:
        key = noise_key(params.noise_seed, params.choice, CHOICE, index + draft.depth(node))
        return pick(rows[node + 1], key, history_at(node), masks.after(node))

    rules: dict[str, Callable[[], Verdict]] = {
        "match": lambda: match(draft, choice_at),
        "residual": lambda: residual(
            draft, cache(probs_at), KeyedCoins(params.noise_seed, params.choice, index)
        ),
        "block": lambda: block(draft, cache(probs_at), KeyedCoins(params.noise_seed, params.choice, index)),
        "typical": lambda: typical(draft, probs_at, choice_at),
    }
    return rules[seq.spec.accept]()


def logprobs(seq: Seq, verdict: Verdict, draft: Draft, rows: Floats) -> tuple[TokenLogprob, ...]:
    """One for each token of the verdict, if the request wants them."""
    if seq.params.logprobs is None:
        return ()
    tokens = (*(draft.tokens[i] for i in verdict.path), verdict.token)
    before = (ROOT, *verdict.path)
    return tuple(logprob(rows[b + 1], t, seq.params.logprobs) for b, t in zip(before, tokens, strict=True))
