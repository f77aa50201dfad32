"""An incremental suffix array over reversed contexts. (In C++, where it compiles: native.py.)

It orders all positions of a token log by the tokens before them, read backwards. Positions whose context
matches a given one longest are neighbours in that order, so one binary search finds them: no tree, no
pointers, some ten bytes a token. Blocks keep insertion cheap, as in a B+ tree of height two.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.suffix.vote import SEPARATOR, VOTERS, WINDOW, Match, Nodes, columns, elect
from paceline.types import Cursor, common_prefix

BLOCK: Final = 128  # positions in a new block; one that has grown to twice that is split
SLACK: Final = 4096  # tokens of evicted documents that may lie in the log before it is cut

Ints: TypeAlias = "array[int]"
Snapshot: TypeAlias = tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.int64]]


class SuffixIndex(Protocol):
    """A log of documents, as ContextIndex."""

    depth: int

    def __len__(self) -> int: ...
    @property
    def documents(self) -> int: ...
    @property
    def held(self) -> int: ...
    def open(self, context: Sequence[int] = ()) -> None: ...
    def extend(self, tokens: Sequence[int]) -> None: ...
    def evict(self) -> None: ...
    def snapshot(self) -> Snapshot: ...
    def draft(
        self,
        tokens: Sequence[int],
        past: Any,  # None, or another index of the same class
        after: Sequence[int],
        budget: int,
        width: int,
        min_chance: float,
        cursor: Cursor | None = None,
    ) -> Nodes | None:
        """Extends the newest document by these tokens, and drafts what may follow them and `after`."""


class ContextIndex(SuffixIndex):
    """A log of documents, the oldest of which can be evicted and the newest of which may grow.

    A position is indexed once another token follows it, so the end of a document never matches itself.
    """

    def __init__(self, depth: int = 32) -> None:
        self.depth = depth  # tokens of context that are compared
        self.log: Ints = array("I", [SEPARATOR] * (depth + 1))  # always ends with a separator
        self._spans: deque[tuple[int, int]] = deque()  # documents, oldest first: positions first..stop - 1
        self._blocks: list[Ints] = [array("I")]  # positions, sorted by (context, position) throughout
        self._floors: list[Ints] = [array("I")]  # no context of block i is less, none of block i - 1 more
        self._size = 0

    def __len__(self) -> int:
        """The number of indexed positions."""
        return self._size

    @property
    def documents(self) -> int:
        return len(self._spans)

    @property
    def held(self) -> int:
        """Tokens of the log that live documents take, their separators and contexts included."""
        return len(self.log) - self._spans[0][0] if self._spans else 0

    def open(self, context: Sequence[int] = ()) -> None:
        """Starts a document. context: the tokens before it, of which only the last position is indexed."""
        self.log.extend(context[len(context) - self.depth :] if len(context) > self.depth else context)
        start = len(self.log) - 1 if context else len(self.log)
        self.log.append(SEPARATOR)
        self._spans.append((start, start))

    def extend(self, tokens: Sequence[int]) -> None:
        """Extends the document opened last."""
        if not tokens:
            return
        first, stop = self._spans.pop()
        self.log.pop()
        self.log.extend(array("I", tokens))
        self._spans.append((first, len(self.log) - 1))
        self.log.append(SEPARATOR)
        positions = range(stop, len(self.log) - 2)
        if len(positions) > self._size:
            self._rebuild(positions)
        else:
            for position in positions:
                self._insert(position)

    def evict(self) -> None:
        """Forgets the oldest document."""
        for position in range(*self._spans.popleft()):
            self._remove(position)
        self._trim(max(SLACK, len(self.log) // 4))

    def snapshot(self) -> Snapshot:
        """The whole state: log, positions in order, spans of the documents."""
        self._trim(0)
        spans = np.array(self._spans, np.int64).reshape(-1, 2)
        return np.array(self.log, np.uint32), np.array(self._positions(), np.uint32), spans

    @classmethod
    def restore(cls, depth: int, snapshot: Snapshot) -> "ContextIndex":
        """Raises ValueError where the parts do not make an index."""
        log, positions, spans = snapshot
        check_snapshot(depth, snapshot)
        index = cls(depth)
        index.log = array("I", log.astype(np.uint32).tobytes())
        index._spans = deque((first, stop) for first, stop in spans.tolist())
        index._adopt(array("I", positions.astype(np.uint32).tobytes()))
        if not index._in_order():
            raise ValueError("positions are out of order")
        return index

    def draft(
        self,
        tokens: Sequence[int],
        past: Any,
        after: Sequence[int],
        budget: int,
        width: int,
        min_chance: float,
        cursor: Cursor | None = None,
    ) -> Nodes | None:
        self.extend(tokens)
        context = [*self._end(), *after]
        matches = self.nearest(context, WINDOW, rank=1)
        if past is not None:
            matches += past.nearest(context, WINDOW, rank=0)
        # Longest first; of equals the newest document's before remembered ones, later before earlier.
        matches.sort(reverse=True)
        return columns(elect(matches[:VOTERS], budget, width, min_chance, cursor)) if matches else None

    def _end(self) -> Ints:
        """The last tokens of the newest document and its context, `depth` at most."""
        end = self.log[-1 - self.depth : -1]
        while SEPARATOR in end:
            del end[: end.index(SEPARATOR) + 1]
        return end

    def nearest(self, context: Sequence[int], limit: int, rank: int = 0) -> list[Match]:
        """The positions with the longest match of the end of `context`, up to `limit` on either side.

        In no order; sorted downwards they are longest first, then highest rank first, then latest first.
        """
        log, depth = self.log, self.depth
        query = array("I", context[: -depth - 1 : -1])
        i = j = bisect_right(self._floors, query) - 1
        block = self._blocks[i]
        at = bisect_right(block, query, key=lambda position: log[position : position - depth : -1])
        above, below = block[at : at + limit], block[max(0, at - limit) : at]
        while len(above) < limit and j + 1 < len(self._blocks):
            j += 1
            above += self._blocks[j][: limit - len(above)]
        while len(below) < limit and i > 0:
            i -= 1
            below = self._blocks[i][len(below) - limit :] + below
        below.reverse()
        return self._agreeing(query, above, rank) + self._agreeing(query, below, rank)

    def _agreeing(self, query: Ints, positions: Ints, rank: int) -> list[Match]:
        """Matches only get shorter with the distance from the query's own position in the order."""
        log, length = self.log, len(query)
        matches: list[Match] = []
        for position in positions if length else ():
            context = log[position : position - length : -1]
            if context != query:
                length = common_prefix(context, query)
                if not length:
                    break
                query = query[:length]
            matches.append((length, rank, position + 1, log))
        return matches

    def _context(self, position: int) -> Ints:
        return self.log[position : position - self.depth : -1]

    def _rebuild(self, new: Iterable[int]) -> None:
        self._adopt(array("I", sorted(chain(self._positions(), new), key=self._context)))

    def _positions(self) -> Ints:
        positions = array("I")
        for block in self._blocks:
            positions.extend(block)
        return positions

    def _adopt(self, positions: Ints) -> None:
        """Takes over positions that are in order."""
        self._blocks = [positions[i : i + BLOCK] for i in range(0, len(positions), BLOCK)] or [array("I")]
        self._floors = [array("I"), *(self._context(block[0]) for block in self._blocks[1:])]
        self._size = len(positions)

    def _insert(self, position: int) -> None:
        """The newest position goes behind its equals."""
        log, depth = self.log, self.depth
        context = log[position : position - depth : -1]
        i = bisect_right(self._floors, context) - 1
        block = self._blocks[i]
        block.insert(bisect_right(block, context, key=lambda p: log[p : p - depth : -1]), position)
        self._size += 1
        if len(block) >= 2 * BLOCK:
            self._blocks.insert(i + 1, block[BLOCK:])
            self._floors.insert(i + 1, self._context(block[BLOCK]))
            del block[BLOCK:]

    def _remove(self, position: int) -> None:
        """The oldest position is before its equals."""
        context = self._context(position)
        i = bisect_left(self._floors, context) - 1
        at = bisect_left(self._blocks[i], context, key=self._context)
        if at == len(self._blocks[i]):
            i, at = i + 1, 0
        del self._blocks[i][at]
        self._size -= 1
        if len(self._blocks[i]) < BLOCK // 4 and len(self._blocks) > 1:
            i = max(1, i)
            self._blocks[i - 1] += self._blocks.pop(i)
            del self._floors[i]

    def _in_order(self) -> bool:
        keys = ((self._context(position), position) for block in self._blocks for position in block)
        return all(a < b for a, b in pairwise(keys))

    def _trim(self, slack: int) -> None:
        """Cuts evicted tokens off the log, except contexts of live documents."""
        cut = (self._spans[0][0] if self._spans else len(self.log) - 1) - self.depth
        if cut > slack:
            del self.log[:cut]
            self._spans = deque((first - cut, stop - cut) for first, stop in self._spans)
            for block in filter(None, self._blocks):
                np.frombuffer(block, np.uint32)[...] -= np.uint32(cut)


def check_snapshot(depth: int, snapshot: Snapshot) -> None:
    """Raises ValueError where its parts do not fit; their order is checked when they are restored."""
    log, positions, spans = snapshot
    edges = [depth, *spans.flatten().tolist(), len(log) - 1]
    if len(log) <= depth or log[-1] != SEPARATOR or (spans.size and edges != sorted(edges)):
        raise ValueError("documents lie outside the log")
    indexed = [np.arange(first, stop) for first, stop in spans.tolist()]
    if not np.array_equal(np.sort(positions), np.concatenate([np.arange(0), *indexed])):
        raise ValueError("positions are missing or doubled")
