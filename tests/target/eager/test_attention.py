"""The attention of a row depends on the keys that it sees, and on nothing else."""

import pytest
import torch
from torch import Tensor

from paceline.target.eager.attention import KEY_TILE, Heads, attend
from paceline.target.eager.decoder import Decoder
from paceline.target.eager.linear import CUDA_TILE
from support.models import CONFIG, random_weights

HEADS = Heads(kv_heads=2, group=2, head_dim=64, scale=0.125, window=0)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
        ],
    ),
]


@pytest.fixture(scope="module")
def cpu_rows() -> int:
    """As many as attention is given at once on this CPU."""
    weights = random_weights(kv_heads=HEADS.kv_heads, head_dim=HEADS.head_dim)
    return Decoder(weights.shape, dict(weights.tensors), torch.device(CONFIG.device)).attention_tile.size


def drawn(rows: int, tiles: int, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Queries, and keys with values."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(HEADS.kv_heads * HEADS.group, rows, HEADS.head_dim, generator=generator)
    kv = torch.randn(2, HEADS.kv_heads, tiles * KEY_TILE, HEADS.head_dim, generator=generator)
    return q.to(device), kv.to(device)


def attended(q: Tensor, kv: Tensor, seen: int, tiles: int) -> Tensor:
    mask = torch.zeros(HEADS.kv_heads, HEADS.group * q.shape[1], tiles * KEY_TILE, device=q.device)
    mask[:, :, seen:] = float("-inf")
    k, v = kv[:, :, : tiles * KEY_TILE]
    return attend(q, k, v, mask, HEADS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("copied", [False, True])  # as from a cache of another type
@pytest.mark.parametrize("seen", [250, 1000, 1020, 2040, 3000, 4090])
def test_keys_that_are_hidden_change_no_bit(device: str, seen: int, copied: bool, cpu_rows: int) -> None:
    """A draft may reach into a tile of keys, or past a number of them, that plain decoding has yet to see."""
    q, kv = drawn(cpu_rows if device == "cpu" else CUDA_TILE, 18, seen, device)

    def with_tiles(tiles: int) -> Tensor:
        read = kv[:, :, : tiles * KEY_TILE]
        return attended(q, read.clone() if copied else read, seen, tiles)

    least = -(-seen // KEY_TILE)
    expected = with_tiles(least)
    assert not [tiles for tiles in range(least + 1, 19) if not torch.equal(with_tiles(tiles), expected)]


@pytest.mark.parametrize("device", DEVICES)
def test_attention_is_softmax_of_products(device: str) -> None:
    q, kv = drawn(CUDA_TILE, 3, 0, device)
    k, v = (part[:, :600].repeat_interleave(HEADS.group, 0).double() for part in kv)
    expected = (q.double() @ k.transpose(1, 2) * HEADS.scale).softmax(-1) @ v
    torch.testing.assert_close(
        attended(q, kv, 600, 3), expected.transpose(0, 1).flatten(1).float(), rtol=1e-5, atol=1e-5
    )
