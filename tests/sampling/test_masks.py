"""A mask of bits leaves the choice to the tokens it allows, natively and in numpy alike."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.config import SamplingParams
from paceline.sampling import (
    CHOICE,
    NO_HISTORY,
    Chooser,
    Floats,
    History,
    chooser,
    distribution,
    greedy,
    noise_key,
)
from paceline.types import Bits
from support import examples

VOCABS = (1, 31, 32, 33, 64, 65, 1000, 9000, 49_152, 151_936)
PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=1.0, top_k=7),
    SamplingParams(temperature=1.5, min_p=0.05, top_k=300, top_p=0.9),
    SamplingParams(logit_bias=((0, 9.0), (32, 9.0), (40, -9.0), (10**6, 1.0))),
    SamplingParams(temperature=1.0, repetition_penalty=1.4, logit_bias=((5, 3.0),)),
    SamplingParams(temperature=0.7, presence_penalty=1.5, frequency_penalty=0.5, top_p=0.9),
    SamplingParams(repetition_penalty=2.0, frequency_penalty=-0.5),
)
MAKERS = (Chooser, chooser)
KEY = noise_key(1, 0, CHOICE, 1)
Ids = NDArray[np.int64]


def bits(vocab: int, ids: Ids | list[int], beyond: bool = False) -> Bits:
    mask = np.zeros((vocab + 31) // 32, np.uint32)
    for t in ids:
        mask[t // 32] |= np.uint32(1 << (t % 32))
    for t in range(vocab, 32 * len(mask)) if beyond else ():
        mask[t // 32] |= np.uint32(1 << (t % 32))
    return mask


def a_row(vocab: int, seed: int) -> Floats:
    return (np.random.default_rng(seed).standard_normal(vocab) * 3).astype(np.float32)


def a_history(vocab: int) -> History:
    return History([t % vocab for t in (0, 1, 2, 32, 32, 40, 5, vocab - 1)], 3, [5 % vocab])


def some_ids(vocab: int, how_many: int, seed: int) -> Ids:
    return np.sort(np.random.default_rng(seed).permutation(vocab)[:how_many])


@settings(max_examples=examples(200))
@given(
    vocab=st.sampled_from(VOCABS),
    how_many=st.sampled_from([1, 2, 10, 120, 2047, 2048, 2049, 8000]),
    p=st.sampled_from(PARAMS),
    seed=st.integers(0, 2**32),
)
def test_forbidden_tokens_are_as_if_impossible(
    vocab: int, how_many: int, p: SamplingParams, seed: int
) -> None:
    x, ids, history = a_row(vocab, seed), some_ids(vocab, how_many, seed), a_history(vocab)
    only = np.full(vocab, -np.inf, np.float32)
    only[ids] = x[ids]
    key = noise_key(seed, 0, CHOICE, 1)
    for make in MAKERS:
        assert make(p)(x, key, history, bits(vocab, ids, beyond=True)) == make(p)(only, key, history)


@pytest.mark.parametrize("vocab", [33, 64, 65, 1000, 9000, 9024, 9025, 9055])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_the_last_tokens_are_allowed_or_not_like_any_other(vocab: int, temperature: float) -> None:
    """Those of the last word, which may be a part of one; the three highest stand out by far."""
    x = np.zeros(vocab, np.float32)
    for last in range(vocab - 1, (vocab - 1) // 32 * 32 - 1, -1):
        x[[3, last, 20]] = 300, 200, 100
        for forbidden, want in (([3], last), ([3, last], 20), ([3, 20], last)):
            mask = ~bits(vocab, forbidden)
            for make in MAKERS:
                assert make(SamplingParams(temperature=temperature))(x, KEY, mask=mask) == want
        x[last] = 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("p", PARAMS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_a_mask_of_everything_changes_nothing(vocab: int, p: SamplingParams) -> None:
    everything = np.full((vocab + 31) // 32, 2**32 - 1, np.uint32)
    for make in MAKERS:
        for seed in range(3):
            row = a_row(vocab, seed), noise_key(seed, 0, CHOICE, 1), a_history(vocab)
            assert make(p)(*row, everything) == make(p)(*row)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("p", PARAMS)
@pytest.mark.parametrize("logit", [0.0, -99.0, -np.inf, np.inf, np.nan])
@pytest.mark.parametrize("vocab", [33, 65, 1000])
def test_the_only_token_allowed_is_chosen_whatever_its_logit(
    vocab: int, logit: float, p: SamplingParams
) -> None:
    for token in {0, 31, 32, vocab // 2, vocab - 1}:
        x = a_row(vocab, token)
        x[token] = logit
        for make in MAKERS:
            assert make(p)(x, KEY, a_history(vocab), bits(vocab, [token], beyond=True)) == token


@pytest.mark.sampled(5)
@pytest.mark.parametrize("p", PARAMS)
@pytest.mark.parametrize("how_many", [3, 4000])
@pytest.mark.parametrize("broken", [-np.inf, np.nan])
@pytest.mark.parametrize("forbidden", [1.0, np.inf, np.nan, -np.inf])
def test_no_forbidden_token_is_chosen_where_all_that_are_allowed_are_broken(
    p: SamplingParams, how_many: int, broken: float, forbidden: float
) -> None:
    ids = 7 + some_ids(8000, how_many, 1)
    x = np.full(8010, forbidden, np.float32)
    x[ids] = broken
    for make in MAKERS:
        assert make(p)(x, KEY, a_history(8010), bits(8010, ids)) == ids[0]  # as of every row: the lowest


@pytest.mark.parametrize("how_many", [3, 4000])
def test_a_broken_logit_is_the_largest_only_where_it_is_allowed(how_many: int) -> None:
    ids = 7 + some_ids(8000, how_many, 1)
    for broken in (np.inf, np.nan):
        x = a_row(8010, 2)
        x[ids[1]] = x[3] = broken
        for make in MAKERS:
            for p in PARAMS:
                assert make(p)(x, KEY, a_history(8010), bits(8010, ids)) == ids[1]


@pytest.mark.parametrize("vocab", [1, 33, 64, 65, 49_152])
def test_a_mask_must_allow_something(vocab: int) -> None:
    mask = bits(vocab, [], beyond=True)
    for p in PARAMS:
        for make in MAKERS:
            with pytest.raises(ValueError, match="no token is allowed"):
                make(p)(a_row(vocab, 1), KEY, a_history(vocab), mask)
    with pytest.raises(ValueError, match="no token is allowed"):
        greedy(a_row(vocab, 1), SamplingParams(), NO_HISTORY, 1, mask)


@pytest.mark.parametrize("words", [1, 2, 4])
def test_a_mask_of_another_length_is_refused(words: int) -> None:
    for make in MAKERS:
        with pytest.raises(ValueError, match=f"the mask has {words} words, a row of 65 tokens needs 3"):
            make(SamplingParams())(a_row(65, 1), KEY, mask=np.ones(words, np.uint32))


def test_a_mask_may_be_a_piece_of_a_larger_array() -> None:
    x, ids = a_row(1000, 1), some_ids(1000, 20, 1)
    matrix = np.zeros((32, 5), np.uint32)
    matrix[:, 2] = bits(1000, ids)
    for make in MAKERS:
        assert make(SamplingParams())(x, KEY, mask=matrix[:, 2]) == ids[x[ids].argmax()]


def test_forbidden_tokens_have_no_probability() -> None:
    x, ids = a_row(1000, 1), some_ids(1000, 20, 1)
    p = distribution(x, SamplingParams(temperature=1.0), mask=bits(1000, ids)).probabilities()
    weight = np.exp(x[ids].astype(np.float64))
    assert p[ids] == pytest.approx(weight / weight.sum(), rel=1e-5)
    assert np.count_nonzero(p) == 20


@pytest.mark.parametrize("p", [p for p in PARAMS if p.temperature == 0])
@pytest.mark.parametrize("width", [1, 3, 16])
def test_greedy_drafts_are_allowed_and_in_order(width: int, p: SamplingParams) -> None:
    for how_many in (1, 2, 10, 900):
        x, ids, history = a_row(1000, how_many), some_ids(1000, how_many, 1), a_history(1000)
        everything = greedy(x, p, history, 1000)
        want = [t for t in everything if t in set(ids.tolist())][:width]
        assert greedy(x, p, history, width, bits(1000, ids)) == want
