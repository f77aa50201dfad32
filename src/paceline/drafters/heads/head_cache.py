"""What a drafter made of each position it saw, kept for the sequence and for what follows it.

An agent's next turn begins with the text of the last one. The target finds that text in its cache and does
not compute it again, so nobody sees its hidden states a second time: what was made of them must be kept.
"""

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.types import Seq

Ids = NDArray[np.int64]


class _Track:
    """Rows of one sequence, in the order of their positions; grows by doubling."""

    def __init__(self, positions: "array[int]", rows: Tensor) -> None:
        self._positions, self._rows, self._count = positions, rows, len(positions)
        self._most = len(rows)  # that there is room for
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
        """The rows, and the first of those for the positions from `start` on, which are yet to be filled."""
        if start <= self.last:
            raise ValueError(f"rows from position {start} on do not follow those that are held")
        first, end = self._count, self._count + count
        if end > self._most:
            self._most = max(end, 2 * self._most, 64)
            more = like.new_empty(self._most - first, *self._rows.shape[1:])
            self._rows = torch.cat([self.rows.to(like), more])
        self._positions.extend(range(start, start + count))
        self._count, self.last = end, max(self.last, start + count - 1)
        return self._rows, first

    def before(self, position: int) -> "_Track":
        count = bisect_left(self._positions, position)
        return _Track(self._positions[:count], self.rows[:count])

    def since(self, position: int) -> tuple["array[int]", Tensor, int, int]:
        """Positions and rows, of both the first that is meant, and their number."""
        first = bisect_left(self._positions, position)
        return self._positions, self._rows, first, self._count - first

    def copied(self, most: int) -> "_Track":
        """The last `most` rows, in memory of their own."""
        first = max(0, self._count - most)
        return _Track(self._positions[first:], self.rows[first:].clone())


@dataclass(frozen=True, slots=True)
class _Followed:
    seq: Seq
    track: _Track


@dataclass(frozen=True, slots=True)
class _Past:
    tokens: Ids
    track: _Track


DEFAULT_POSITIONS: Final = 16384  # positions, for those who do not know what the target's cache holds


class HeadCache:
    """Rows by position, for sequences that run and for those that ended.

    ahead: how many tokens after its own position a row was made of. most: positions held of ended sequences:
    those of the tenants heard of last stay, and of these the ones used last. Tenants never share. shape: that
    of every row. like: where rows are and of which type.
    """

    def __init__(
        self, shape: Sequence[int], most: int = DEFAULT_POSITIONS, ahead: int = 0, like: Tensor | None = None
    ) -> None:
        self._most, self._ahead = most, ahead
        self._nothing = (torch.empty(0) if like is None else like).new_empty(0, *shape)
        self._live: dict[str, _Followed] = {}
        self._past: dict[str, OrderedDict[int, _Past]] = {}  # tenant -> those used last at the end
        self._ended = 0  # sequences; a past is known by its number

    def begin(self, seq: Seq) -> None:
        """What is known of the positions that the target will not compute is there at once."""
        self._live[seq.id] = _Followed(seq, self._known(seq).copied(seq.cached))

    def append(self, seq_id: str, start: int, rows: Tensor) -> None:
        """rows [count, *shape] of the positions from `start` on, which come after all that are held."""
        whole, first = self.room(seq_id, start, len(rows), rows)
        whole[first : first + len(rows)] = rows

    def room(self, seq_id: str, start: int, count: int, like: Tensor) -> tuple[Tensor, int]:
        """Rows as `append` would add them, to be filled by the caller, and which is the first of them.

        They are of the type of `like`.
        """
        return self._live[seq_id].track.room(start, count, like)

    def rows(self, seq_id: str) -> tuple[Tensor, Tensor]:
        """Positions [count], ascending, and rows [count, *shape]; good until more are appended."""
        track = self._live[seq_id].track
        return torch.from_numpy(track.positions), track.rows

    def since(self, seq_id: str, position: int) -> tuple["array[int]", Tensor, int, int]:
        """Positions and rows, the first of them that is not before `position`, and how many there are."""
        return self._live[seq_id].track.since(position)

    def last(self, seq_id: str) -> int:
        """The last position held; -1: none is; -2: it was never begun."""
        followed = self._live.get(seq_id)
        return -2 if followed is None else followed.track.last

    def drop(self, seq_id: str) -> None:
        """As if it had never begun: nothing is kept of it."""
        self._live.pop(seq_id, None)

    def end(self, seq: Seq) -> None:
        followed = self._live.pop(seq.id, None)
        if followed is None or not seq.learn or not len(followed.track):
            return
        tokens, shelf = np.array(seq.tokens, np.int64), self._past.pop(seq.tenant, OrderedDict())
        self._past[seq.tenant] = shelf  # the tenant heard of last is last
        track = followed.track.copied(self._most)
        for number, past in list(shelf.items()):
            if _common(past.tokens, tokens) == len(past.tokens) and _covers(track, past.track):
                del shelf[number]  # all that it knows is known of the longer text
        shelf[self._ended] = _Past(tokens, track)
        self._ended += 1
        self._shrink()

    def _shrink(self) -> None:
        excess = sum(map(self.held, self._past)) - self._most
        while excess > 0:
            tenant, shelf = next(iter(self._past.items()))
            _, past = shelf.popitem(last=False)
            excess -= len(past.track)
            if not shelf:
                del self._past[tenant]

    def held(self, tenant: str) -> int:
        """Positions of ended sequences."""
        return sum(len(past.track) for past in self._past.get(tenant, {}).values())

    def forget(self, tenant: str) -> None:
        self._past.pop(tenant, None)

    def _known(self, seq: Seq) -> _Track:
        """The most that any one sequence of the tenant tells about the positions before `seq.cached`."""
        tokens = np.array(seq.tokens, np.int64)
        best, used = _Track(array("q"), self._nothing), None
        if not seq.cached:
            return best
        for other in self._live.values():
            if other.seq.tenant == seq.tenant and other.seq.learn:
                best = max(best, self._usable(np.array(other.seq.tokens), other.track, tokens, seq), key=len)
        shelf = self._past.get(seq.tenant, OrderedDict())
        for number, past in shelf.items():
            found = self._usable(past.tokens, past.track, tokens, seq)
            if len(found) > len(best):
                best, used = found, number
        if used is not None:
            shelf.move_to_end(used)
        return best

    def _usable(self, theirs: Ids, track: _Track, tokens: Ids, seq: Seq) -> _Track:
        return track.before(min(seq.cached, _common(theirs, tokens) - self._ahead))


def _common(a: Ids, b: Ids) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _covers(new: _Track, old: _Track) -> bool:
    return bool(np.isin(old.positions, new.positions).all())
