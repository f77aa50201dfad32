import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.target.weights.dequant import ENCODINGS, Bytes, Floats
from support.tiny_gguf import encoded


def reference(blocks: Bytes, kind: str) -> Floats:
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    return np.asarray(values, np.float32).reshape(len(blocks), -1)


def decoded(blocks: Bytes, kind: str) -> Floats:
    out = np.full((len(blocks), ENCODINGS[kind].elements), np.nan, np.float32)
    ENCODINGS[kind].decode(blocks, out)
    return out


@pytest.mark.parametrize("kind", ENCODINGS)
def test_block_sizes_are_those_of_the_format(kind: str) -> None:
    encoding = ENCODINGS[kind]
    assert (encoding.elements, encoding.nbytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


@pytest.mark.parametrize("kind", ENCODINGS)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 40))
def test_any_bytes_decode_exactly_as_the_gguf_package_decodes_them(kind: str, seed: int, count: int) -> None:
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (count, ENCODINGS[kind].nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random scales may be infinite
        np.testing.assert_array_equal(decoded(blocks, kind), reference(blocks, kind))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_values_come_back_close(kind: str) -> None:
    values = np.random.default_rng(3).standard_normal((64, 256), dtype=np.float32)
    blocks = encoded(values, kind).reshape(-1, ENCODINGS[kind].nbytes)
    np.testing.assert_allclose(decoded(blocks, kind).reshape(values.shape), values, atol=0.4)
