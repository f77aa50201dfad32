"""Candidate successors of each token, and how often such candidates are right, by confidence level."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from copy import copy
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # a command that needs no model starts without torch
    from torch import Tensor

LEVELS: Final = 16  # steps of the target's probability for a successor
PROMPT_LEVELS: Final = 4  # the same for successors known from a prompt only
EMPTY: Final = -1  # pads short lists
DECAY: Final = 0.999  # weight of old evidence at each new one
INITIAL_ROWS: Final = 64

# How often successors of each level are right, before any evidence; from agent traffic.
PRIOR: Final = np.array([*(0.6 * (level + 0.5) / LEVELS for level in range(LEVELS)), 0.08, 0.12, 0.2, 0.55])
PRIOR_WEIGHT: Final = 20.0  # observations that the prior counts as

COLUMN_DEPTH: Final = 64  # values of a row that share a column in the search for the largest

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
Successors = list[tuple[int, float]]


class Table:
    """One row of successors for each token; the last write wins."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._row: dict[int, int] = {}
        self._tokens: NDArray[np.int32] = np.full((INITIAL_ROWS, width), EMPTY, np.int32)
        self._levels: NDArray[np.uint8] = np.zeros((INITIAL_ROWS, width), np.uint8)
        self._right = PRIOR_WEIGHT * PRIOR
        self._tried = np.full(len(PRIOR), PRIOR_WEIGHT)

    def __len__(self) -> int:
        return len(self._row)

    @property
    def room(self) -> int:
        """Rows that memory is allocated for."""
        return len(self._tokens)

    def copy(self) -> "Table":
        twin = copy(self)
        twin._row = dict(self._row)
        for name in ("_tokens", "_levels", "_right", "_tried"):
            setattr(twin, name, getattr(self, name).copy())
        return twin

    def successors(self, token: int) -> Successors:
        """The tokens that may follow, each with its chance, most likely first."""
        row = self._row.get(token)
        if row is None:
            return []
        chances = (self._right / self._tried)[self._levels[row]].tolist()
        pairs = [(t, c) for t, c in zip(self._tokens[row].tolist(), chances, strict=True) if t != EMPTY]
        return sorted(pairs, key=lambda pair: -pair[1])

    def write(self, tokens: Sequence[int], successors: Ids, chances: NDArray[np.float32]) -> None:
        """Row i of successors follows tokens[i]; the target gave them these chances."""
        self._put(tokens, successors, np.minimum(chances * LEVELS, LEVELS - 1).astype(np.uint8))

    def read(self, prompt: Sequence[int]) -> None:
        """Fills rows of new tokens with their successors in the prompt, most frequent first."""
        follow: defaultdict[int, list[int]] = defaultdict(list)
        for after, token in pairwise(reversed(prompt)):
            if token not in self._row:
                follow[token].append(after)
        successors = np.full((len(follow), self.width), EMPTY)
        levels = np.zeros((len(follow), self.width), np.uint8)
        for row, following in enumerate(follow.values()):
            common = Counter(following).most_common(self.width)  # of equals, the last in the text first
            for rank, (token, n) in enumerate(common):
                successors[row, rank] = token
                levels[row, rank] = LEVELS + min(PROMPT_LEVELS - 1, PROMPT_LEVELS * n // len(following))
        self._put(list(follow), successors, levels)

    def learn(self, tokens: Sequence[int]) -> None:
        """Counts which of these consecutive tokens were among the successors of the one before."""
        pairs = [(self._row[a], b) for a, b in pairwise(tokens) if a in self._row]
        if not pairs:
            return
        rows = np.array([row for row, _ in pairs])
        filled = self._tokens[rows] != EMPTY
        right = self._tokens[rows] == np.array([[token] for _, token in pairs])
        levels = self._levels[rows]
        keep = DECAY ** len(pairs)
        self._tried = keep * self._tried + np.bincount(levels[filled], minlength=len(PRIOR))
        self._right = keep * self._right + np.bincount(levels[right], minlength=len(PRIOR))

    def _put(self, tokens: Sequence[int], successors: Ids, levels: NDArray[np.uint8]) -> None:
        rows = [self._row.setdefault(token, len(self._row)) for token in tokens]
        if len(self._row) > self.room:
            more = ((0, max(self.room, len(self._row) - self.room)), (0, 0))
            self._tokens = np.pad(self._tokens, more, constant_values=EMPTY)
            self._levels = np.pad(self._levels, more)
        self._tokens[rows] = EMPTY
        self._tokens[rows, : successors.shape[1]] = successors
        self._levels[rows, : successors.shape[1]] = levels


def largest(rows: "Tensor", k: int) -> tuple[Floats, Ids]:
    """Top-k of each row: values and columns, largest first.

    On a CPU in this thread alone: torch's threads would fight those of a native target for its cores.
    """
    if rows.device.type == "cpu":
        return largest_here(rows.numpy(), k)
    values, columns = rows.topk(min(k, rows.shape[1]), 1)
    return values.numpy(force=True), columns.numpy(force=True)


def largest_here(rows: Floats, k: int) -> tuple[Floats, Ids]:
    """Each row is cut into columns: the k largest lie in the k columns with the largest maxima, so nothing
    else has to be compared. Several times faster than to look at every value, and as exact.
    """
    count, size = rows.shape
    width = size // COLUMN_DEPTH
    if width <= k:
        columns = _top(rows, min(k, size))
        return np.take_along_axis(rows, columns, 1), columns
    best = _top(rows[:, : width * COLUMN_DEPTH].reshape(count, COLUMN_DEPTH, width).max(1), k)
    columns = (best[:, :, None] + np.arange(0, width * COLUMN_DEPTH, width)).reshape(count, -1)
    rest = np.broadcast_to(np.arange(width * COLUMN_DEPTH, size), (count, size - width * COLUMN_DEPTH))
    columns = np.concatenate([columns, rest], 1)
    columns = np.take_along_axis(columns, _top(np.take_along_axis(rows, columns, 1), k), 1)
    return np.take_along_axis(rows, columns, 1), columns


def _top(values: Floats, k: int) -> Ids:
    """Columns of the k largest of each row, largest first."""
    top = np.argpartition(values, -k, 1)[:, -k:]
    order = np.argsort(-np.take_along_axis(values, top, 1), 1, kind="stable")
    return np.take_along_axis(top, order, 1)
