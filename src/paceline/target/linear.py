"""Matrix products, and how many rows they need to give every row the same bits.

Libraries switch kernels with the number of rows, and a row's last bits switch with them. The cure is to pad
the rows to a multiple of the row tile: the smallest one, found by trying, at which no kernel switches.
"""

import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_ROWS: Final = 16  # row counts up to this one are what the tile is chosen for
CUDA_TILE: Final = 32
_SMALLEST_TILE: Final = 4  # fewer rows take no less time: the weights have to be read either way
_PACKED_FOR: Final = 16  # rows oneDNN is told to expect when it chooses a weight layout


class Linear(Protocol):
    bytes_held: int

    def __call__(self, x: Tensor) -> Tensor: ...  # [rows, in] -> [rows, out]


class PlainLinear:
    """A weight as it was loaded."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        self.bytes_held = bytes_of(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """A weight in the blocked layout of oneDNN: about twice as fast as a plain one for a few rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR)
        self._bias = bias
        self.bytes_held = bytes_of(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


class GroupedLinear:
    """A product in groups of exactly MOST_ROWS rows, for libraries that no smaller tile satisfies."""

    def __init__(self, inner: Linear) -> None:
        self._inner = inner
        self.bytes_held = inner.bytes_held

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([self._inner(part) for part in torch.split(x, MOST_ROWS)])


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


def find_row_tile(products: Iterable[Callable[[int], Tensor]]) -> RowTile:
    """The smallest tile at which every product gives its rows the same bits whatever their number.

    products[i](n) are the first n rows of one and the same result, computed with n rows.
    """
    tile = _SMALLEST_TILE
    for product in products:
        while not _rows_agree(product, tile):
            if tile == MOST_ROWS:
                return RowTile(MOST_ROWS, exact=True)
            tile *= 2
    return RowTile(tile)


def _rows_agree(product: Callable[[int], Tensor], tile: int) -> bool:
    expected = product(MOST_ROWS)
    for rows in (*range(tile, MOST_ROWS, tile), 2 * MOST_ROWS):
        both = min(rows, MOST_ROWS)
        if not torch.equal(product(rows)[:both], expected[:both]):
            return False
    return True
