"""Packed weights stand for exactly what a GGUF file holds, in as many bytes."""

import numpy as np
import pytest
import torch

from paceline.target.cuda.packing import FORMATS, GGUF, pack_fp8, pack_gguf, quantise_fp8, unpacked
from paceline.target.weights.dequant import ENCODINGS
from support.native_targets import decoded, random_blocks


@pytest.mark.parametrize("encoding", GGUF)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 256), (64, 768)])
def test_what_is_packed_is_what_the_file_holds(encoding: str, outputs: int, inputs: int) -> None:
    blocks = random_blocks(encoding, outputs, inputs, np.random.default_rng(GGUF.index(encoding)), tame=True)
    packed = pack_gguf(encoding, torch.from_numpy(blocks))
    assert packed.is_contiguous()
    found = unpacked(encoding, packed, inputs).numpy()
    np.testing.assert_array_equal(found, decoded(encoding, blocks))


@pytest.mark.parametrize("encoding", GGUF)
def test_packing_takes_the_bytes_of_the_file(encoding: str) -> None:
    """Six-bit scales take a byte each: 64 bytes more for 16 features of 256 inputs."""
    blocks = random_blocks(encoding, 16, 256, np.random.default_rng(1))
    packed = pack_gguf(encoding, torch.from_numpy(blocks))
    more = 64 if encoding in ("Q4_K", "Q5_K") else 0
    assert packed.numel() == blocks.size + more
    assert ENCODINGS[encoding].nbytes * 16 * 256 // ENCODINGS[encoding].elements == blocks.size


def test_fp8_weights_are_those_of_torch() -> None:
    weight = (
        torch.randn(32, 192, generator=torch.Generator().manual_seed(1)) * torch.logspace(-4, 2, 32)[:, None]
    )
    codes, scale = quantise_fp8(weight)
    found = unpacked("FP8", pack_fp8(codes), 192)
    assert torch.equal(found, codes.view(torch.float8_e4m3fn).float())
    assert found.isfinite().all()
    large = (weight / scale[:, None]).abs() > 2**-6  # below are those with fewer bits
    error = (found - weight / scale[:, None]).abs() / (weight / scale[:, None]).abs()
    assert error[large].max() <= 2**-4
    assert FORMATS["FP8"].stage_bytes == 16 * 64
