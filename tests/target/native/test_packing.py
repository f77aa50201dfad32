"""Packing rounds nothing but floats: what is unpacked is what target/dequant.py decodes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.target.native import library
from paceline.target.native.packing import TO_FOUR_BITS
from paceline.target.weights.dequant import ENCODINGS
from support import examples
from support.native_targets import (
    KINDS,
    Doubles,
    Floats,
    block_elements,
    built,
    decoded,
    every_path,
    pack,
    random_blocks,
    up,
)


def test_every_encoding_is_covered() -> None:
    assert set(KINDS) == {"Q4_K", "Q5_K", "Q4_1", "Q5_1", "Q4_0", "Q5_0", "Q8_0", "Q6_K", "Q3_K", "MXFP4"}
    assert set(library.ENCODINGS.values()) == set(library.FORMATS)


@pytest.mark.parametrize("path", every_path())
@pytest.mark.parametrize("kind", KINDS)
def test_unpacked_is_what_was_encoded(path: str, kind: str) -> None:
    """Values are equal; a zero may lose its sign."""
    lib, random = built(path), np.random.default_rng(KINDS.index(kind))
    for outputs, blocks in ((1, 1), (16, 2), (17, 1), (33, 3), (48, 1), (95, 2)):
        source = random_blocks(kind, outputs, blocks * block_elements(kind), random)
        (packed,) = pack(lib, kind, source)
        found = packed.unpacked(lib)
        assert found.shape == (up(outputs, 32), blocks * block_elements(kind))
        np.testing.assert_array_equal(found[:outputs], decoded(kind, source))
        assert not found[outputs:].any(), "padding must be zero"


@settings(max_examples=examples(60))
@given(
    kind=st.sampled_from(KINDS),
    outputs=st.integers(1, 70),
    blocks=st.integers(1, 4),
    pieces=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_in_any_order(kind: str, outputs: int, blocks: int, pieces: int, seed: int) -> None:
    lib, random = built("portable"), np.random.default_rng(seed)
    source = random_blocks(kind, outputs, blocks * block_elements(kind), random)
    order = random.permutation(outputs).astype(np.int32)
    (packed,) = pack(lib, kind, source, order=order, pieces=pieces)
    np.testing.assert_array_equal(packed.unpacked(lib)[:outputs], decoded(kind, source)[order])


@pytest.mark.parametrize("path", every_path())
@pytest.mark.parametrize("kind", [*KINDS, "F32"])
def test_woven_matrices_do_not_mix(path: str, kind: str) -> None:
    """Gate and up lie in turns: each is as if it were alone, in its rows and in its products."""
    lib, random = built(path), np.random.default_rng(3)
    outputs, inputs = 75, 512
    if kind == "F32":
        sources = [random.standard_normal((outputs, inputs), np.float32).view(np.uint8) for _ in range(2)]
    else:
        sources = [random_blocks(kind, outputs, inputs, random, tame=True) for _ in range(2)]
    x = random.standard_normal((5, inputs), np.float32)
    for woven, source in zip(pack(lib, kind, *sources), sources, strict=True):
        (alone,) = pack(lib, kind, source)
        np.testing.assert_array_equal(woven.unpacked(lib), alone.unpacked(lib))
        np.testing.assert_array_equal(woven.times(lib, x), alone.times(lib, x))


def test_every_code_of_every_output_and_input() -> None:
    """One weight at a time is not zero: it comes out in its place and nowhere else."""
    lib = built("portable")
    for kind in ("Q8_0", "Q4_0", "Q6_K"):
        inputs, nbytes = block_elements(kind), ENCODINGS[kind].nbytes
        zero = {"Q8_0": 0, "Q4_0": 0x88, "Q6_K": 0}[kind]
        source = np.full((32, nbytes), zero, np.uint8)
        if kind == "Q6_K":
            source[:, 128:192] = 0xAA  # two upper bits 10: with low bits 0, the code 32 that means zero
            source[:, 192:208] = np.arange(1, 17, dtype=np.uint8)
        at = 208 if kind == "Q6_K" else 0
        source[:, at : at + 2] = np.array([1.0], np.float16).view(np.uint8)
        codes = slice(0, 128) if kind == "Q6_K" else slice(2, nbytes)
        for byte in range(codes.start, codes.stop):
            changed = source.copy()
            row = byte % 32
            changed[row, byte] = zero ^ 0x01
            (packed,) = pack(lib, kind, changed)
            found = packed.unpacked(lib)
            np.testing.assert_array_equal(found, decoded(kind, changed))
            assert np.count_nonzero(found) == 1
            assert found.shape == (32, inputs)


def floats_there_and_back(values: Floats) -> tuple[Floats, Doubles]:
    """Values [outputs, inputs] after eight bits, and how far each may be off.

    Half a step, and what 127 steps lack of the largest because the scale is rounded to half precision: up to
    0.07 of a step, more only where it is below 2 ** -14 or above 65504.
    """
    lib = built("portable")
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % 32)))
    (packed,) = pack(lib, "F32", np.ascontiguousarray(padded).view(np.uint8))
    found = packed.unpacked(lib)[: len(values)]
    assert not found[:, values.shape[1] :].any()
    most = np.abs(padded).reshape(len(values), -1, 32).max(-1).astype(np.float64)
    steps = np.minimum(most / 127, 65504).astype(np.float16).astype(np.float64)
    bound = np.maximum(0.5001 * steps, most - 127 * steps) * (1 + 1e-6)
    return found[:, : values.shape[1]], np.repeat(bound, 32, axis=1)[:, : values.shape[1]]


@settings(max_examples=examples(80))
@given(
    outputs=st.integers(1, 40),
    inputs=st.integers(1, 200),
    size=st.floats(-2, 6),
    seed=st.integers(0, 2**32 - 1),
)
def test_floats_are_at_most_half_a_step_off(outputs: int, inputs: int, size: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    values = (random.standard_normal((outputs, inputs)) * 10**size).astype(np.float32)
    values[random.random(outputs) < 0.2] = 0
    found, bound = floats_there_and_back(values)
    assert (np.abs(found.astype(np.float64) - values) <= bound).all()
    assert not found[~values.any(1)].any()
    ordinary = np.abs(values).max() / 127 > 2**-14
    assert not ordinary or bound.max() <= 0.51 * np.abs(values).max() / 127


def test_floats_too_large_or_small_for_a_half_precision_scale() -> None:
    huge = np.array([[3e38, -3e38, np.inf, -np.inf, 1.0, 0.0]], np.float32)
    found, _ = floats_there_and_back(huge)
    largest = np.float32(65504 * 127)
    np.testing.assert_array_equal(found, [[largest, -largest, largest, -largest, 0, 0]])
    random = np.random.default_rng(0)
    for size in (1e-3, 1e-4, 1e-5, 1e-7, 1e-12, 1e-40):
        tiny = (random.standard_normal((16, 64)) * size).astype(np.float32)
        found, bound = floats_there_and_back(tiny)
        assert (np.abs(found - tiny) <= bound).all()
        assert (bound <= max(0.51 * np.abs(tiny).max() / 127, 127 * 2.0**-25)).all()


def in_four_bits(values: Floats) -> Floats:
    lib = built("portable")
    (packed,) = pack(lib, TO_FOUR_BITS, np.ascontiguousarray(values).view(np.uint8))
    return packed.unpacked(lib)[: len(values)]


def rounded_once(values: Floats) -> Doubles:
    """Four bits with the scale that the value of largest magnitude gives."""
    groups = values.astype(np.float64).reshape(len(values), -1, 32)
    most = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)
    scale = (most / -8).astype(np.float16).astype(np.float64)
    codes = np.clip(np.rint(np.divide(groups, scale, where=scale != 0, out=np.zeros_like(groups))), -8, 7)
    return np.asarray((codes * scale).reshape(values.shape))


@settings(max_examples=examples(40))
@given(outputs=st.integers(1, 40), groups=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_four_bits_err_no_more_than_the_usual_rounding(outputs: int, groups: int, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((outputs, 32 * groups)).astype(np.float32)
    values[0, :32] = 0
    found = in_four_bits(values)
    off, usual = (((x - values) ** 2).reshape(outputs, -1, 32).sum(-1) for x in (found, rounded_once(values)))
    assert (off <= usual * (1 + 1e-5)).all()
    assert not found[0, :32].any()
    for group in found.reshape(-1, 32):
        assert len(np.unique(group)) <= 16


def test_four_bits_hold_what_they_can_hold() -> None:
    codes = np.random.default_rng(1).integers(-8, 8, (9, 64)).astype(np.float32)
    codes[:, ::32] = -8
    np.testing.assert_array_equal(in_four_bits(codes * np.float32(0.25)), codes * 0.25)


def test_four_bits_of_what_is_no_number() -> None:
    odd = np.zeros((4, 32), np.float32)
    odd[0, 3], odd[1, 4], odd[2, 5], odd[3, :] = np.inf, -np.inf, np.nan, 1e38
    assert np.isfinite(in_four_bits(odd)).all()
