"""Verification: from the logits of a pass to a verdict, by the acceptance rule of the request."""

from collections.abc import Callable, Sequence
from functools import cache

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


def sampler_of(seq: Seq) -> Sampler | None:
    """For a target that chooses tokens itself; None: the request needs bias, penalties, masks or more."""
    params = seq.params
    if seq.spec.accept != "match" or seq.cursor is not None or params.logprobs is not None:
        return None
    index, seed = len(seq.tokens) - seq.prompt_len, params.noise_seed & (2**64 - 1)
    if params.logit_bias or penalises(params) or index < params.min_tokens:
        return None
    if params.temperature == 0:
        return Sampler(0.0, seed, params.choice, index)  # a cut keeps the largest
    inverse = float(np.float32(1 / params.temperature))
    return Sampler(inverse, seed, params.choice, index, params.top_k, params.top_p, params.min_p)


def verify_choices(draft: Draft, tokens: Sequence[int]) -> Verdict:
    """The rule `match` where the target has chosen: tokens[0] follows the text, tokens[i + 1] node i."""
    return match(draft, lambda node: tokens[node + 1])


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
