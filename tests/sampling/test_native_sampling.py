"""choose.cpp gives the token that numpy gives: whatever the row, the parameters, the instruction set."""

import ctypes
import logging
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import native_build
from paceline.config import SamplingParams
from paceline.errors import NotCompiled
from paceline.native_build import Unit, load
from paceline.sampling import (
    CHOICE,
    NO_HISTORY,
    Chooser,
    Floats,
    History,
    choose,
    chooser,
    distribution,
    native,
    noise_key,
)
from paceline.sampling.distribution import _weights
from paceline.sampling.native import HEADERS, SOURCE, NativeChooser, bind
from paceline.types import Bits
from support import examples, memory

pytestmark = pytest.mark.slow

DRIVER = Path(__file__).with_name("native_sampling.cpp")
SIZES = (1, 2, 33, 63, 64, 65, 1000, 4096, 4097, 9000, 49_152)
SHARES = (1.0, 0.5, 0.01, 0.0)  # of the tokens that a mask allows; one is always allowed
KINDS = (
    "peaked",
    "usual",
    "flat",
    "ties",
    "signed zeros",
    "huge",
    "forbidden",
    "nan",
    "inf",
    "all forbidden",
)


@pytest.fixture(autouse=True, scope="module")
def _needs_a_compiler() -> None:
    try:
        native_build.library("sampling", [Unit(SOURCE)], HEADERS)
    except NotCompiled as error:
        pytest.skip(str(error))


def a_row(kind: str, vocab: int, seed: int) -> Floats:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(vocab)
    some = rng.random(vocab) < 0.3
    match kind:
        case "peaked":
            x = 4 * x + 12 * (rng.random(vocab) < 0.01)
        case "usual" | "nan" | "inf":
            x = 3 * x
            if kind != "usual":
                x[rng.integers(vocab, size=2)] = float(kind)
        case "flat":
            x = 0.05 * x
        case "ties":
            x = np.round(x)
        case "signed zeros":
            x = np.where(some, 0.0, -0.0) - (rng.random(vocab) < 0.5)
        case "huge":
            x = 5e37 * x
        case "forbidden":
            x[some] = -np.inf
        case "all forbidden":
            x[:] = -np.inf
    return x.astype(np.float32)


rows = st.builds(a_row, st.sampled_from(KINDS), st.sampled_from(SIZES), st.integers(0, 2**32))
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0001, 0.3, 0.8, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 40, 3000, 2**40]),
    top_p=st.sampled_from([1.0, 0.95, 0.999999, 0.5, 0.01, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.4, -0.3]),
    logit_bias=st.sampled_from([(), ((0, 5.0), (0, 0.1), (62, -100.0)), ((9999, 1.0),)]),
)


def a_history(vocab: int, seed: int) -> History:
    rng = np.random.default_rng(seed)
    text = [int(t) for t in rng.integers(0, vocab, 30) ** 2 // vocab]  # lower ids more often
    return History(text[:20], 12, text[20:])


def a_mask(vocab: int, share: float | None, seed: int) -> Bits | None:
    """Beyond the vocabulary, bits are set at random."""
    if share is None:
        return None
    rng = np.random.default_rng(seed)
    allowed = rng.random((vocab + 31) // 32 * 32) < share
    allowed[vocab:] = rng.random(len(allowed) - vocab) < 0.5
    allowed[rng.integers(vocab)] = True
    places = allowed.reshape(-1, 32) * np.uint64(2) ** np.arange(32, dtype=np.uint64)
    mask: Bits = places.sum(1).astype(np.uint32)
    return mask


def by_numpy(x: Floats, p: SamplingParams, seed: int, history: History, mask: Bits | None) -> int:
    with np.errstate(over="ignore", invalid="ignore"):
        return choose(distribution(x, p, history, mask), noise_key(seed, 0, CHOICE, 1))


@settings(max_examples=examples(600))
@given(x=rows, p=params, share=st.sampled_from([None, None, *SHARES]), seed=st.integers(0, 2**32))
def test_native_is_numpy(x: Floats, p: SamplingParams, share: float | None, seed: int) -> None:
    history, mask = a_history(len(x), seed), a_mask(len(x), share, seed)
    pick = chooser(p)
    assert isinstance(pick, NativeChooser)
    got = [pick(x, noise_key(s, 0, CHOICE, 1), history, mask) for s in (seed, seed + 1)]
    assert got == [by_numpy(x, p, s, history, mask) for s in (seed, seed + 1)]


@settings(max_examples=examples(100))
@given(seed=st.integers(0, 2**32), kept=st.integers(1, 7))
def test_top_p_ends_at_the_very_same_token(seed: int, kept: int) -> None:
    """Where top-p falls on the edge between two tokens, one unit of one weight decides."""
    x = a_row("flat", 8, seed) * np.float32(20)
    weight = _weights(x - x.max())
    order = np.argsort(-x)
    p = SamplingParams(temperature=1.0, top_p=float(weight[order][:kept].sum() / weight.sum()))
    for s in range(seed, seed + 30):
        assert chooser(p)(x, noise_key(s, 0, CHOICE, 1)) == by_numpy(x, p, s, NO_HISTORY, None)


def test_choices_follow_the_distribution() -> None:
    x = a_row("forbidden", 6, 5)
    for p in (SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, top_p=0.9, top_k=5)):
        want, n = distribution(x, p).probabilities(), 20_000
        pick = chooser(p)
        got = np.bincount([pick(x, noise_key(11, 0, CHOICE, i)) for i in range(n)], minlength=6)
        expected = want[want > 0] * n
        assert got[want == 0].sum() == 0
        assert float(((got[want > 0] - expected) ** 2 / expected).sum()) < 25  # 5 degrees of freedom


@pytest.mark.parametrize("kind", ["usual", "flat", "ties"])
def test_a_row_gives_its_token_wherever_it_lies(kind: str) -> None:
    vocab, p = 1003, SamplingParams(temperature=0.8, top_p=0.95)
    x, key, pick = a_row(kind, vocab, 3), noise_key(3, 0, CHOICE, 7), chooser(p)
    alone = pick(x, key)
    matrix = np.stack([a_row("usual", vocab, i) for i in range(5)])
    for i in range(5):
        matrix[i] = x
        assert pick(matrix[i], key) == alone
    assert pick(np.asfortranarray(matrix)[2], key) == alone  # its logits do not lie side by side
    for offset in range(16):
        buffer = np.full(vocab + 40, np.inf, np.float32)  # what stands around it counts for nothing
        buffer[offset : offset + vocab] = x
        assert pick(buffer[offset : offset + vocab], key) == alone


def test_calls_leave_nothing_behind() -> None:
    """A large row, then a small one, masked or not: as if each were the first."""
    p = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.5, frequency_penalty=0.5)
    for vocab in (9000, 65, 1000, 64, 9000):
        x, history = a_row("usual", vocab, vocab), a_history(vocab, vocab)
        for share in (None, *SHARES, None):
            mask = a_mask(vocab, share, vocab)
            token = chooser(p)(x, noise_key(vocab, 0, CHOICE, 1), history, mask)
            assert token == by_numpy(x, p, vocab, history, mask)


def machine_flags() -> Iterator[tuple[str, ...]]:
    path = Path("/proc/cpuinfo")
    known = path.read_text().split() if path.exists() else []
    yield ("-O0",)
    yield ("-O3",)
    yield from (("-O3", f"-m{name}") for name in ("avx2", "avx512f") if name in known)


@pytest.mark.parametrize("flags", list(machine_flags()), ids=" ".join)
def test_no_instruction_set_changes_a_token(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor any optimisation: compilers have been seen to get such loops wrong."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    function = bind(load("sampling", [Unit(SOURCE, ("-DPACELINE_ONE_CLONE", *flags))], HEADERS))
    for p in (
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8, top_p=0.95),
        SamplingParams(temperature=1.0, top_k=50),
    ):
        pick, usual = NativeChooser(p, function), chooser(p)
        for seed in range(60):
            x = a_row(KINDS[seed % 7], SIZES[seed % 10], seed)
            key = noise_key(seed, 0, CHOICE, 1)
            for share in (None, *SHARES):
                mask = a_mask(len(x), share, seed)
                assert pick(x, key, mask=mask) == usual(x, key, mask=mask)


def test_memory_is_used_as_it_should_be(tmp_path: Path) -> None:
    program = tmp_path / "driver"
    flags = ["-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = [*native_build._compiler("test"), *flags, str(DRIVER), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in built.stderr or "unsupported" in built.stderr:
        pytest.skip("this compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True)
    assert ran.stdout.strip() == "fine", ran.stderr


def test_without_a_compiler_numpy_chooses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    p = SamplingParams(temperature=0.8, top_p=0.9)
    x, key = a_row("usual", 1000, 1), noise_key(1, 0, CHOICE, 1)
    with_compiler = chooser(p)(x, key)
    monkeypatch.setenv("PACELINE_COMPILER", "none")
    forget()
    try:
        with caplog.at_level(logging.INFO, "paceline"):
            assert type(chooser(p)) is type(chooser(SamplingParams())) is Chooser
            assert chooser(p)(x, key) == with_compiler
        assert [r.name for r in caplog.records] == ["paceline"]  # said once
        assert "no native sampling, so a slower path is taken" in caplog.text
    finally:
        forget()


def forget() -> None:
    native._functions.cache_clear()
    native.chooser.cache_clear()


@pytest.mark.parametrize("share", [None, 0.5, 0.01])
def test_where_memory_ends_an_error_tells_and_the_next_choice_is_right(share: float | None) -> None:
    library = load("sampling", [Unit(SOURCE)], HEADERS, memory.FLAGS)
    p = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.2, logit_bias=((0, 5.0),))
    x, history, mask = a_row("usual", 9000, 1), a_history(9000, 1), a_mask(9000, share, 1)
    native_chooser, scarce = NativeChooser(p, bind(library)), memory.Scarce(library)

    def chosen() -> int:
        return native_chooser(x, noise_key(3, 0, CHOICE, 1), history, mask)

    with ThreadPoolExecutor(1) as fresh:  # what a thread has allocated it keeps
        failed, token = fresh.submit(scarce.failures, chosen, "no memory to choose one of 9000").result()
    assert failed > 0
    assert token == by_numpy(x, p, 3, history, mask)


def test_settings_are_laid_out_as_in_c() -> None:
    assert ctypes.sizeof(native.Settings) == 3 * 8 + 4 * 4 + 3 * 8


@given(rows, params, st.integers(1, 2000), st.integers(0, 2**32))
@settings(max_examples=examples(300))
def test_among_some_tokens_it_chooses_as_if_the_others_could_not_come(
    row: Floats, given_params: SamplingParams, apart: int, seed: int
) -> None:
    native_chooser = chooser(given_params)
    if native_chooser.among is None:
        assert native_chooser.needs_history
        return
    some = np.random.default_rng(seed).random(len(row)) < 1 / apart if apart > 1 else np.ones(len(row), bool)
    ids = np.flatnonzero(some) if some.any() else np.array([len(row) - 1])
    few = np.ascontiguousarray(row[ids])
    if not (few > -np.inf).any():
        return
    whole = np.full(len(row), -np.inf, np.float32)
    whole[ids] = few
    key = noise_key(seed, 0, CHOICE, 7)
    kinds = (
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_uint32,
    )
    function = ctypes.CFUNCTYPE(ctypes.c_int64, *kinds)(native_chooser.among.function)
    place = function(few.ctypes.data, ids.ctypes.data, len(ids), native_chooser.among.settings, *key)
    assert ids[place] == native_chooser(whole, key)
