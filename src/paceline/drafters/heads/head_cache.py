"""The head's KV cache. Rows outlive their sequence, so that an agent's next turn can reuse them.

That turn begins with the text of the last one. The target finds the text in its prefix cache and does not
compute it again, so no head receives its hidden states a second time: their rows must stay.
"""

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.types import Seq, common_prefix

Ids = NDArray[np.int64]
Tokens: TypeAlias = "array[int]"


MIN_ROWS: Final = 64  # that a sequence has room for, once it has any


def _copy(rows: Tensor, to: Tensor, first: int) -> None:
    """Copies rows into `to`, from its row `first` on.

    On a CPU never with torch, whose threads spin for milliseconds after a large copy: on the target's cores.
    """
    if not len(rows):
        return
    part = to[first : first + len(rows)]
    if rows.dtype == to.dtype and rows.device.type == to.device.type == "cpu":
        part.view(torch.uint8).numpy()[:] = rows.detach().contiguous().view(torch.uint8).numpy()
    else:
        part.copy_(rows)


class _Rows:
    """Rows of one sequence, in the order of their positions."""

    def __init__(self, positions: "array[int]", rows: Tensor) -> None:
        self._positions, self._rows, self._count = positions, rows, len(positions)
        self._capacity = len(rows)
        self.last = positions[-1] if positions else -1  # position

    def __len__(self) -> int:
        return self._count

    @property
    def positions(self) -> Ids:
        return np.array(self._positions, np.int64)

    @property
    def rows(self) -> Tensor:
        return self._rows[: self._count]

    def room(self, start: int, count: int, like: Tensor) -> tuple[Tensor, int]:
        """The tensor of rows, and the index of the first new one; the caller fills `count` of them."""
        if start <= self.last:
            raise ValueError(f"rows from position {start} on do not follow position {self.last}")
        first, end = self._count, self._count + count
        if end > self._capacity:
            self._move(end + max(end // 4, MIN_ROWS), like)
        self._positions.extend(range(start, start + count))
        self._count, self.last = end, max(self.last, start + count - 1)
        return self._rows, first

    def _move(self, capacity: int, like: Tensor) -> None:
        """To larger memory of the type of `like`."""
        larger = like.new_empty(capacity, *self._rows.shape[1:])
        _copy(self.rows, larger, 0)
        self._rows, self._capacity = larger, capacity

    def before(self, position: int) -> "_Rows":
        count = bisect_left(self._positions, position)
        return _Rows(self._positions[:count], self.rows[:count])

    def since(self, position: int) -> tuple["array[int]", Tensor, int, int]:
        """All positions and rows, the index of the first at or after `position`, and how many there are."""
        first = bisect_left(self._positions, position)
        return self._positions, self._rows, first, self._count - first

    def copied(self, max_rows: int) -> "_Rows":
        """The last `max_rows` rows, in memory of their own."""
        first = max(0, self._count - max_rows)
        copy = _Rows(self._positions[first:], self.rows[first:])
        if len(copy):
            copy._move(len(copy) + MIN_ROWS, self._rows)
        return copy


@dataclass(slots=True)
class _Running:
    seq: Seq
    computed: int  # positions that the target found in its prefix cache
    rows: _Rows | None = None  # looked up when they are needed


@dataclass(frozen=True, slots=True)
class _Ended:
    tokens: Tokens
    rows: _Rows


DEFAULT_POSITIONS: Final = 16384  # used where the size of the target's cache is unknown


class HeadCache:
    """Rows by position, of running and of ended sequences.

    A sequence whose rows nobody asks for costs nothing: neither is its text looked up, nor is a row copied.
    shape: of every row. max_positions: of ended sequences; the least recently used go first, of the tenant
    that was idle longest. Tenants never share. ahead: the number of tokens after its own position on which a
    row depends. like: device and type of the rows.
    """

    def __init__(
        self,
        shape: Sequence[int],
        max_positions: int = DEFAULT_POSITIONS,
        ahead: int = 0,
        like: Tensor | None = None,
    ) -> None:
        self._max_positions, self._ahead = max_positions, ahead
        self._empty = (torch.empty(0) if like is None else like).new_empty(0, *shape)
        self._running: dict[str, _Running] = {}
        self._ended: dict[str, OrderedDict[int, _Ended]] = {}  # tenant -> number -> sequence, LRU first
        self._next_number = 0

    def begin(self, seq: Seq) -> None:
        """It has the rows of the positions that the target found in its prefix cache."""
        self._running[seq.id] = _Running(seq, seq.computed)

    def _rows_of(self, running: _Running) -> _Rows:
        if running.rows is None:
            running.rows = self._reusable(running).copied(running.computed)
        return running.rows

    def append(self, seq_id: str, start: int, rows: Tensor) -> None:
        """rows [count, *shape] of the positions from `start` on, which come after all that are cached."""
        whole, first = self.room(seq_id, start, len(rows), rows)
        _copy(rows, whole, first)

    def room(self, seq_id: str, start: int, count: int, like: Tensor) -> tuple[Tensor, int]:
        """Room for rows as `append` adds them, of the type of `like`: the tensor, and the index of the first.

        The caller must fill them.
        """
        return self._rows_of(self._running[seq_id]).room(start, count, like)

    def rows(self, seq_id: str) -> tuple[Tensor, Tensor]:
        """Positions [count], ascending, and rows [count, *shape]; valid until the next append."""
        rows = self._rows_of(self._running[seq_id])
        return torch.from_numpy(rows.positions), rows.rows

    def since(self, seq_id: str, position: int) -> tuple["array[int]", Tensor, int, int]:
        """All positions and rows, the index of the first at or after `position`, and how many there are."""
        return self._rows_of(self._running[seq_id]).since(position)

    def last(self, seq_id: str) -> int:
        """The last cached position; -1: none is; -2: the sequence is not running."""
        running = self._running.get(seq_id)
        return -2 if running is None else self._rows_of(running).last

    def last_used(self, seq_id: str) -> int:
        """The same, but -1 as long as nobody has asked for the sequence's rows."""
        running = self._running.get(seq_id)
        return -1 if running is None or running.rows is None else running.rows.last

    def drop(self, seq_id: str) -> None:
        """Forgets a running sequence."""
        self._running.pop(seq_id, None)

    def end(self, seq: Seq) -> None:
        running = self._running.pop(seq.id, None)
        if running is None or not seq.remember or not running.rows:
            return
        tokens, ended = array("q", seq.tokens), self._ended.pop(seq.tenant, OrderedDict())
        self._ended[seq.tenant] = ended  # the most recently used tenant is last
        rows = running.rows
        if len(rows) > self._max_positions:
            rows = rows.copied(self._max_positions)
        for number, other in list(ended.items()):
            if common_prefix(other.tokens, tokens) == len(other.tokens) and _covers(rows, other.rows):
                del ended[number]  # the longer sequence has all its rows
        ended[self._next_number] = _Ended(tokens, rows)
        self._next_number += 1
        self._shrink()

    def _shrink(self) -> None:
        excess = sum(map(self.cached, self._ended)) - self._max_positions
        while excess > 0:
            tenant, ended = next(iter(self._ended.items()))
            _, oldest = ended.popitem(last=False)
            excess -= len(oldest.rows)
            if not ended:
                del self._ended[tenant]

    def cached(self, tenant: str) -> int:
        """Positions of ended sequences."""
        return sum(len(ended.rows) for ended in self._ended.get(tenant, {}).values())

    def forget(self, tenant: str) -> None:
        self._ended.pop(tenant, None)

    def _reusable(self, running: _Running) -> _Rows:
        """Rows for positions that were computed before: the most that any one sequence of the tenant has."""
        best, used, seq, computed = _Rows(array("q"), self._empty), None, running.seq, running.computed
        if not computed:
            return best
        tokens = array("q", seq.tokens[: computed + self._ahead])
        for other in self._running.values():
            if other.rows is not None and other.seq.tenant == seq.tenant and other.seq.remember:
                usable = self._usable(array("q", other.seq.tokens), other.rows, tokens, computed)
                best = max(best, usable, key=len)
        ended = self._ended.get(seq.tenant, OrderedDict())
        for number, sequence in ended.items():
            usable = self._usable(sequence.tokens, sequence.rows, tokens, computed)
            if len(usable) > len(best):
                best, used = usable, number
        if used is not None:
            ended.move_to_end(used)
        return best

    def _usable(self, others: Tokens, rows: _Rows, tokens: Tokens, computed: int) -> _Rows:
        return rows.before(min(computed, common_prefix(others, tokens) - self._ahead))


def _covers(new: _Rows, old: _Rows) -> bool:
    return bool(np.isin(old.positions, new.positions).all())
