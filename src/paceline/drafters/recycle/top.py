"""The largest of many, without sorting them."""

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # a command that needs no model starts without torch
    from torch import Tensor

DEPTH: Final = 64  # columns are this long

Floats = NDArray[np.float32]
Places = NDArray[np.int64]


def largest(rows: "Tensor", k: int) -> tuple[Floats, Places]:
    """Values and places of the k largest of each row, largest first.

    On a CPU in this thread alone: torch's threads would fight those of a native target for its cores.
    """
    if rows.device.type == "cpu":
        return largest_here(rows.numpy(), k)
    values, places = rows.topk(min(k, rows.shape[1]), 1)
    return values.numpy(force=True), places.numpy(force=True)


def largest_here(rows: Floats, k: int) -> tuple[Floats, Places]:
    """Each row is cut into columns: the k largest lie in the k columns with the largest maxima, so nothing
    else has to be compared. Several times faster than to look at every value, and as exact.
    """
    count, size = rows.shape
    width = size // DEPTH
    if width <= k:
        places = _top(rows, min(k, size))
        return np.take_along_axis(rows, places, 1), places
    best = _top(rows[:, : width * DEPTH].reshape(count, DEPTH, width).max(1), k)
    places = (best[:, :, None] + np.arange(0, width * DEPTH, width)).reshape(count, -1)
    rest = np.broadcast_to(np.arange(width * DEPTH, size), (count, size - width * DEPTH))
    places = np.concatenate([places, rest], 1)
    places = np.take_along_axis(places, _top(np.take_along_axis(rows, places, 1), k), 1)
    return np.take_along_axis(rows, places, 1), places


def _top(values: Floats, k: int) -> Places:
    """Places of the k largest of each row, largest first."""
    found = np.argpartition(values, -k, 1)[:, -k:]
    order = np.argsort(-np.take_along_axis(values, found, 1), 1, kind="stable")
    return np.take_along_axis(found, order, 1)
