import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline import sampling
from paceline.config import SamplingParams
from paceline.sampling import CHOICE, DRAFT, History, Key, choose, distribution, gumbel, noise_key, ranked
from support import examples

VOCAB = 1000
Logits = NDArray[np.float32]


def some_logits(seed: int, vocab: int = VOCAB, scale: float = 3.0) -> Logits:
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


def reference(logits: Logits, p: SamplingParams, history: History) -> NDArray[np.float64]:
    """The processors written as their definitions read, with full sorts, in double precision."""
    x = logits.astype(np.float64)
    for token, bias in p.logit_bias:
        x[token] += bias
    for t in {*history.tokens, *history.drafted}:
        x[t] = x[t] / p.repetition_penalty if x[t] > 0 else x[t] * p.repetition_penalty
    said = [*history.tokens[history.prompt_len :], *history.drafted]
    for t in set(said):
        x[t] -= p.presence_penalty + p.frequency_penalty * said.count(t)
    x /= p.temperature
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if p.top_k:
        order = order[: p.top_k]
    w = np.exp(x[order] - x[order[0]])
    if p.top_p < 1:
        w /= w.sum()
        n = next((i + 1 for i, c in enumerate(np.cumsum(w)) if c >= p.top_p), len(w))
        order, w = order[:n], w[:n]
    kept = w >= p.min_p * w[0]
    dense = np.zeros(len(x))
    dense[np.array(order)[kept]] = w[kept] / w[kept].sum()
    return dense


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 40, 2000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.sampled_from([(), ((3, 5.0), (7, -100.0))]),
)


@settings(max_examples=examples(150))
@given(seed=st.integers(0, 10_000), p=params, scale=st.sampled_from([0.1, 1.0, 3.0, 10.0]))
def test_the_distribution_equals_the_definition(seed: int, p: SamplingParams, scale: float) -> None:
    logits = some_logits(seed, scale=scale)
    history = History([1, 2, 3, 3, 7], 2, [3, 9])
    want = reference(logits, p, history)
    got = distribution(logits, p, history).probabilities()
    assert np.abs(got - want).max() < 2e-5
    assert abs(got.sum() - 1) < 1e-12


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = np.zeros(10, np.float32)
    logits[[4, 8]] = 2
    assert choose(distribution(logits, SamplingParams()), noise_key(0, 0, CHOICE, 0)) == 4


def test_mask_forbids() -> None:
    mask = np.zeros(32, np.uint32)
    mask[0] = 1 << 10 | 1 << 20
    for t in (0.0, 1.0):
        of = distribution(some_logits(1), SamplingParams(temperature=t), mask=mask)
        assert all(choose(of, noise_key(0, 0, CHOICE, i)) in (10, 20) for i in range(50))


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([0.01, 1.0, 4.0, 30.0]), index=st.integers(0, 5000))
def test_the_short_cut_changes_nothing(seed: int, scale: float, index: int) -> None:
    """Over the whole vocabulary, noise is only worked out where it can matter; the choice is the same."""
    of = distribution(some_logits(seed, 20_000, scale), SamplingParams(temperature=1.0))
    key = noise_key(seed, 0, CHOICE, index)
    full = np.argsort(-(of.logits + gumbel(key, np.arange(20_000))), kind="stable").tolist()
    assert choose(of, key) == full[0]
    assert ranked(of, key, 3) == full[:3]


@given(
    st.lists(st.sampled_from([-np.inf, -1.5, 0.0, 0.25, 7.0]), min_size=1, max_size=40),
    st.integers(1, 12),
)
def test_greedy_tokens_are_the_largest_of_equals_the_first(values: list[float], width: int) -> None:
    x = np.array(values, np.float32)
    possible = [int(i) for i in np.argsort(-x, kind="stable") if x[i] > -np.inf]
    assert sampling.greedy(x, SamplingParams(), History(), width) == (possible[:width] or [0])


@given(st.lists(st.floats(-20, 0), min_size=1, max_size=30), st.booleans())
def test_chances_are_those_of_the_whole_distribution(values: list[float], masked: bool) -> None:
    mask = np.array([0x5555_5555], np.uint32) if masked else None
    of = distribution(np.array(values, np.float32), SamplingParams(temperature=0.8, top_k=7), mask=mask)
    every = list(range(len(values)))
    assert of.chances(every) == pytest.approx(of.probabilities().tolist())
    assert [of.chances([token])[0] for token in every] == of.chances(every)


def test_choices_follow_the_distribution() -> None:
    logits = some_logits(5, 6, 1.0)
    for p in (SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, top_p=0.9)):
        of = distribution(logits, p)
        want = of.probabilities()
        n = 20_000
        got = np.bincount([choose(of, noise_key(11, 0, CHOICE, i)) for i in range(n)], minlength=6)
        expected = want[want > 0] * n
        chi2 = float(((got[want > 0] - expected) ** 2 / expected).sum())
        assert got[want == 0].sum() == 0
        assert chi2 < 25  # 5 degrees of freedom: p of about 1e-4, with fixed seeds


def a_key(along: str, i: int) -> Key:
    if along == "stream":
        return noise_key(3, 0, (CHOICE, DRAFT)[i % 2], i // 2)
    return noise_key(
        i if along == "seed" else 3, i if along == "choice" else 0, CHOICE, i if along == "index" else 5
    )


@pytest.mark.parametrize("along", ["ids", "index", "seed", "choice", "stream"])
def test_noise_is_uniform_and_uncorrelated(along: str) -> None:
    """Along whatever the noise is keyed by, values are uniform and neighbours are independent."""
    n = 16_384
    if along == "ids":
        g = gumbel(noise_key(3, 0, CHOICE, 17), np.arange(n))
    else:
        g = np.array([gumbel(a_key(along, i), np.array([12]))[0] for i in range(n)])
    u = np.exp(-np.exp(-g))
    counts = np.bincount((u * 64).astype(int), minlength=64)
    assert float(((counts - n / 64) ** 2 / (n / 64)).sum()) < 120  # 63 degrees of freedom
    for lag in (1, 2, 64):
        assert abs(float(np.corrcoef(u[:-lag], u[lag:])[0, 1])) < 4 / np.sqrt(n)


def test_noise_of_a_token_does_not_depend_on_its_company() -> None:
    key = noise_key(9, 1, CHOICE, 4)
    alone = gumbel(key, np.array([777]))
    assert alone[0] == gumbel(key, np.arange(49_152))[777]


def test_logprob_is_raw() -> None:
    logits = some_logits(2)
    got = sampling.logprob(logits, 5, 3)
    x = logits.astype(np.float64)
    want = x - np.log(np.exp(x).sum())
    assert got.logprob == pytest.approx(want[5])
    assert [t for t, _ in got.top] == list(np.argsort(-want)[:3])


def test_ranked_is_sampling_without_replacement() -> None:
    """The second of two ranked tokens has the law of what is left when the first is taken."""
    of = distribution(some_logits(8, 5, 0.7), SamplingParams(temperature=1.0))
    p = of.probabilities()
    n = 20_000
    pairs = [tuple(ranked(of, noise_key(1, 0, DRAFT, i), 2)) for i in range(n)]
    for a in range(5):
        for b in set(range(5)) - {a}:
            want = p[a] * p[b] / (1 - p[a])
            got = pairs.count((a, b)) / n
            assert abs(got - want) < 5 * np.sqrt(want / n)
