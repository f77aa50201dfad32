"""Matrix products, and how many rows they need to give every row the same bits.

Libraries switch kernels with the number of rows, some even within them, and a row's last bits switch along.
The cure is to pad the rows to a multiple of the row tile, which is found by trying.
"""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_ROWS: Final = 16  # row counts up to this one are what the tile is chosen for
CUDA_TILE: Final = 32
_PACKED_FOR: Final = 16  # rows for which oneDNN chooses a weight layout


class Linear(Protocol):
    bytes_held: int

    @property
    def weight(self) -> Tensor: ...  # [out, in], in row-major order: unpacked if need be
    def __call__(self, x: Tensor) -> Tensor: ...  # [rows, in] -> [rows, out]


class PlainLinear:
    """A weight as it was loaded."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self._bias = weight, bias
        self.bytes_held = bytes_of(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self._bias)


class PackedLinear:
    """A weight in the blocked layout of oneDNN: about twice as fast as a plain one for a few rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR)
        self._bias = bias
        self.bytes_held = bytes_of(weight, bias)

    @property
    def weight(self) -> Tensor:
        dense: Tensor = self._weight.to_dense()
        return dense

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


class GroupedLinear:
    """A product a fixed number of rows at a time."""

    def __init__(self, inner: Linear, rows: int) -> None:
        self._inner, self._rows = inner, rows
        self.bytes_held = inner.bytes_held

    @property
    def weight(self) -> Tensor:
        return self._inner.weight

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([self._inner(part) for part in torch.split(x, self._rows)])


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    return (PackedLinear if can_pack(weight) else PlainLinear)(weight, bias)


def can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def bytes_of(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@dataclass(frozen=True, slots=True)
class RowTile:
    """Rows are padded to a multiple of `size`; if `exact`, kernels are only ever given `size` rows."""

    size: int
    exact: bool = False

    def padded(self, rows: int) -> int:
        return -(-rows // self.size) * self.size

    @property
    def counts(self) -> tuple[int, ...]:
        """Row counts that kernels may meet."""
        return (self.size,) if self.exact else (*range(self.size, MAX_ROWS + 1, self.size), 2 * MAX_ROWS)


# Powers of two, so that a multiple of the largest is one of each. Fewer than 4 rows take no less time, since
# the weights have to be read. The last tile satisfies everyone.
_TILES: Final = (
    *(RowTile(size) for size in (4, 8, MAX_ROWS)),
    *(RowTile(size, exact=True) for size in (MAX_ROWS, 8, 4, 2, 1)),
)
# Sums that differ in their last bit round to the same 16 bits nearly always: it takes many to see it.
_ENOUGH: Final = 2**17


@dataclass(frozen=True, slots=True)
class Product:
    """A computation whose rows ought to be independent of one another."""

    run: Callable[[Tensor], Tensor]  # [rows, *row] -> [rows, ...]
    row: tuple[int, ...]
    dtype: torch.dtype


def find_row_tile(product: Product) -> RowTile:
    """The first tile at which the product's rows do not depend on their number or position."""
    return next(tile for tile in _TILES if _agrees(product, tile.counts))


def _agrees(product: Product, counts: Sequence[int]) -> bool:
    """True if all rows, each rotated to the next position, equal those of the largest count unrotated."""
    generator = torch.Generator().manual_seed(0)
    seen, enough = 0, 1 if product.dtype == torch.float32 else _ENOUGH
    while seen < enough:
        x = torch.randn(counts[-1], *product.row, generator=generator).to(product.dtype)
        expected = product.run(x)
        for count in counts:
            rows = product.run(x[:count].roll(1, 0)).roll(-1, 0)
            if not torch.equal(rows, expected[:count]):
                return False
        seen += expected[: counts[0]].numel()
    return True
