"""Products of packed weights and quantised rows, against float64 and against themselves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.target.weights.dequant import ENCODINGS
from support import examples
from support.native_targets import (
    HALVES,
    KINDS,
    Bytes,
    Doubles,
    Floats,
    as_taken,
    block_elements,
    built,
    decoded,
    every_path,
    pack,
    quantised,
    random_blocks,
    runnable,
    without_base,
)

BOUND = 2e-6  # some thirty roundings to 24 bits, of sums that run over at most 16 groups
FIRST = runnable()[0]


def magnitudes(kind: str, source: Bytes, x: Doubles) -> Doubles:
    """Sums of the sizes of all terms that a product adds up: what its rounding errors are relative to."""
    weight, scaled = decoded(kind, source), decoded(kind, without_base(kind, source))
    parts = np.abs(scaled).astype(np.float64) + np.abs(weight.astype(np.float64) - scaled)
    return np.asarray(np.abs(x) @ parts.T)


def some_rows(rows: int, inputs: int, random: np.random.Generator) -> Floats:
    """Rows of very different sizes, some groups of which are zero."""
    x = random.standard_normal((rows, inputs)) * 10.0 ** random.uniform(-3, 3, (rows, 1))
    x.reshape(rows, -1, 32)[random.random((rows, inputs // 32)) < 0.1] = 0
    return x.astype(np.float32)


MANY = (49, 50, 51, 56, 61, 130)  # rows: from about 50 on a pair of tiles is unpacked at once
shapes = given(
    kind=st.sampled_from(KINDS),
    outputs=st.integers(1, 70),
    blocks=st.integers(1, 16),
    rows=st.integers(1, 40) | st.sampled_from(MANY),
    seed=st.integers(0, 2**32 - 1),
)


def inputs_of(kind: str, blocks: int) -> int:
    return (blocks if block_elements(kind) == 32 else -(-blocks // 8)) * block_elements(kind)


@pytest.mark.parametrize("path", every_path())
@settings(max_examples=examples(60))
@shapes
def test_products_equal_a_float64_reference(
    path: str, kind: str, outputs: int, blocks: int, rows: int, seed: int
) -> None:
    lib, random = built(path), np.random.default_rng(seed)
    source = random_blocks(kind, outputs, inputs_of(kind, blocks), random, tame=True)
    (packed,) = pack(lib, kind, source)
    x = some_rows(rows, packed.linear.inputs, random)
    taken = as_taken(x)
    found = packed.times(lib, x)
    expected = taken @ decoded(kind, source).astype(np.float64).T
    assert (np.abs(found[:, :outputs] - expected) <= BOUND * magnitudes(kind, source, taken)).all()
    assert not found[:, outputs:].any()


@settings(max_examples=examples(60))
@shapes
def test_all_paths_give_the_same_bits(kind: str, outputs: int, blocks: int, rows: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    source = random_blocks(kind, outputs, inputs_of(kind, blocks), random)
    (packed,) = pack(built(FIRST), kind, source)
    x = some_rows(rows, packed.linear.inputs, random)
    first = packed.times(built(FIRST), x)
    for path in runnable()[1:]:
        np.testing.assert_array_equal(packed.times(built(path), x).view(np.int32), first.view(np.int32), path)


@pytest.mark.parametrize("path", every_path())
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_feel_its_neighbours(path: str, kind: str) -> None:
    """Whatever the number of rows, its place and the rows beside it: the same bits."""
    lib, random = built(path), np.random.default_rng(1)
    inputs = 1280  # three of the blocks that are unpacked at once, the last one not full
    (packed,) = pack(lib, kind, random_blocks(kind, 40, inputs, random, tame=True))
    x = some_rows(max(MANY), inputs, random)
    alone = np.concatenate([packed.times(lib, row[None]) for row in x])
    for rows in (*range(1, 41), *MANY):
        np.testing.assert_array_equal(packed.times(lib, x[:rows]), alone[:rows], f"{rows} rows")
        picked = random.permutation(len(x))[:rows]
        np.testing.assert_array_equal(packed.times(lib, x[picked]), alone[picked], f"{rows} rows")


@pytest.mark.sampled(7)
@pytest.mark.parametrize("path", every_path())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", [0x00, 0xFF, 0x7F, 0x80])
@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_codes_do_not_saturate(path: str, kind: str, code: int, sign: int) -> None:
    """All codes at an end of their range, all rows at 127 or -127: sums of pairs would not fit 16 bits."""
    lib, inputs = built(path), 512
    flat = np.full((32 * inputs // ENCODINGS[kind].elements, ENCODINGS[kind].nbytes), code, np.uint8)
    if kind == "MXFP4":  # its scale is a byte: 2 ** -1
        flat[:, 0] = 126
    for at in HALVES[kind]:
        flat[:, at : at + 2] = np.array([0.5], np.float16).view(np.uint8)
    source = flat.reshape(32, -1)
    (packed,) = pack(lib, kind, source)
    x = np.full((3, inputs), sign * 2.0, np.float32)
    x[1, ::2] *= -1
    x[2, 1::4] = 0.01
    expected = as_taken(x) @ decoded(kind, source).astype(np.float64).T
    error = np.abs(packed.times(lib, x) - expected)
    assert (error <= BOUND * magnitudes(kind, source, as_taken(x))).all()
    assert set(np.abs(quantised(x)[0][:2]).ravel()) == {127.0}


@pytest.mark.parametrize("path", every_path())
def test_extreme_eight_bit_codes_by_hand(path: str) -> None:
    lib = built(path)
    for weight, x in ((127, 1.0), (-128, 1.0), (127, -1.0), (-128, -1.0)):
        source = np.full((32, 34 * 4), np.int8(weight).view(np.uint8), np.uint8)
        source.reshape(-1, 34)[:, :2] = np.array([1.0], np.float16).view(np.uint8)
        (packed,) = pack(lib, "Q8_0", source)
        found = packed.times(lib, np.full((1, 128), 127 * x, np.float32))
        np.testing.assert_array_equal(found, np.full((1, 32), 128.0 * weight * 127 * x))


@pytest.mark.parametrize("path", every_path())
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_zero_tiny_or_no_numbers(path: str, kind: str) -> None:
    lib, random = built(path), np.random.default_rng(2)
    (packed,) = pack(lib, kind, random_blocks(kind, 40, 512, random, tame=True))
    x = some_rows(12, 512, random)
    clean = packed.times(lib, x)
    assert not packed.times(lib, np.zeros((5, 512), np.float32)).any()
    for place in (0, 3, 4, 11):
        for bad in (np.nan, np.inf, -np.inf, 3e38, 1e-37, 1e-40):
            dirty = x.copy()
            dirty[place, 7] = bad
            dirty[place, 40:90] = bad
            found = packed.times(lib, dirty)
            others = np.arange(12) != place
            np.testing.assert_array_equal(found[others], clean[others])
    tiny = packed.times(lib, np.full((1, 512), 1e-37, np.float32))
    assert (np.abs(tiny) < 1e-28).all()
    assert np.isfinite(tiny).all()
