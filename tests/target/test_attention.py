"""What attention gives for a row depends on the keys that it sees, and on nothing beside them."""

import pytest
import torch
from torch import Tensor

from paceline.target.attention import KEY_TILE, Heads, attend

HEADS = Heads(kv_heads=3, group=3, head_dim=64, scale=0.125, window=0)
ROWS = 32  # as many as a GPU is given at once
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


def attended(q: Tensor, kv: Tensor, seen: int, tiles: int) -> Tensor:
    mask = torch.zeros(HEADS.kv_heads, HEADS.group * ROWS, tiles * KEY_TILE, device=q.device)
    mask[:, :, seen:] = float("-inf")
    k, v = kv[:, :, : tiles * KEY_TILE]
    return attend(q, k, v, mask, HEADS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seen", [250, 1000, 1020, 2040, 3000, 4090])
def test_keys_that_are_hidden_change_no_bit(device: str, seen: int) -> None:
    """A draft may reach into a tile of keys, or past a number of them, that plain decoding has yet to see."""
    generator = torch.Generator().manual_seed(seen)
    q = torch.randn(9, ROWS, 64, generator=generator).to(device)
    kv = torch.randn(2, 3, 18 * KEY_TILE, 64, generator=generator).to(device)
    least = -(-seen // KEY_TILE)
    expected = attended(q, kv, seen, least)
    differ = [n for n in range(least + 1, 19) if not torch.equal(attended(q, kv, seen, n), expected)]
    assert not differ


@pytest.mark.parametrize("device", DEVICES)
def test_attention_is_softmax_of_products(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(9, ROWS, 64, generator=generator).to(device)
    kv = torch.randn(2, 3, 3 * KEY_TILE, 64, generator=generator).to(device)
    k, v = (part[:, :600].repeat_interleave(HEADS.group, 0).double() for part in kv)
    expected = (q.double() @ k.transpose(1, 2) * HEADS.scale).softmax(-1) @ v
    torch.testing.assert_close(
        attended(q, kv, 600, 3), expected.transpose(0, 1).reshape(ROWS, -1).float(), rtol=1e-5, atol=1e-5
    )
