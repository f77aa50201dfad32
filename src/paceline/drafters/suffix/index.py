"""Every place in a log of tokens, kept in the order of what stands before it, read backwards.

In that order the places whose past is most like a given context lie side by side, so that one binary
search finds them: no tree, no pointers, some ten bytes a token.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.types import common_prefix

SEPARATOR: Final = 0xFFFFFFFF  # stands before and behind every document; never a token
BLOCK: Final = 128  # places in a new block; one that has grown to twice that is split
SLACK: Final = 4096  # tokens of evicted documents that may lie in the log before it is cut

Ints: TypeAlias = "array[int]"
Match: TypeAlias = tuple[int, int, int, Ints]  # tokens in common, rank, place of what followed, its log
Snapshot: TypeAlias = tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.int64]]


class ContextIndex:
    """A log of documents, the oldest of which can be evicted and the newest of which may grow.

    A place is the position of a token in the log. It is indexed once another token follows it, so the end
    of a growing document never finds itself.
    """

    def __init__(self, depth: int = 32) -> None:
        self.depth = depth  # tokens of context that are compared
        self.log: Ints = array("I", [SEPARATOR] * (depth + 1))  # always ends with a separator
        self._spans: deque[tuple[int, int]] = deque()  # documents, oldest first: places first..stop - 1
        self._blocks: list[Ints] = [array("I")]  # places, sorted by (context, place) throughout
        self._floors: list[Ints] = [array("I")]  # no context of block i is less, none of block i - 1 more
        self._size = 0

    def __len__(self) -> int:
        """How many places are indexed."""
        return self._size

    @property
    def documents(self) -> int:
        return len(self._spans)

    @property
    def held(self) -> int:
        """How many tokens the live documents take in the log, their separators and contexts included."""
        return len(self.log) - self._spans[0][0] if self._spans else 0

    def open(self, context: Sequence[int] = ()) -> None:
        """Starts a document; `context` is what stood before it, and only its last place is indexed."""
        self.log.extend(context[len(context) - self.depth :] if len(context) > self.depth else context)
        start = len(self.log) - 1 if context else len(self.log)
        self.log.append(SEPARATOR)
        self._spans.append((start, start))

    def extend(self, tokens: Sequence[int]) -> None:
        """Lengthens the document opened last."""
        if not tokens:
            return
        first, stop = self._spans.pop()
        self.log.pop()
        self.log.extend(array("I", tokens))
        self._spans.append((first, len(self.log) - 1))
        self.log.append(SEPARATOR)
        places = range(stop, len(self.log) - 2)
        if len(places) > self._size:
            self._rebuild(places)
        else:
            for place in places:
                self._insert(place)

    def evict(self) -> None:
        """Forgets the oldest document."""
        for place in range(*self._spans.popleft()):
            self._remove(place)
        self._trim(max(SLACK, len(self.log) // 4))

    def snapshot(self) -> Snapshot:
        """Everything there is to know, as (log, places in order, spans of the documents)."""
        self._trim(0)
        spans = np.array(self._spans, np.int64).reshape(-1, 2)
        return np.array(self.log, np.uint32), np.array(self._places(), np.uint32), spans

    @classmethod
    def restore(cls, depth: int, snapshot: Snapshot) -> "ContextIndex":
        """Raises ValueError where the parts do not make an index."""
        log, places, spans = snapshot
        index = cls(depth)
        index.log = array("I", log.astype(np.uint32).tobytes())
        index._spans = deque((first, stop) for first, stop in spans.tolist())
        edges = [depth, *(edge for span in index._spans for edge in span), len(index.log) - 1]
        if len(index.log) <= depth or index.log[-1] != SEPARATOR or (spans.size and edges != sorted(edges)):
            raise ValueError("documents lie outside the log")
        indexed = [np.arange(first, stop) for first, stop in index._spans]
        if not np.array_equal(np.sort(places), np.concatenate([np.arange(0), *indexed])):
            raise ValueError("places are missing or doubled")
        index._adopt(array("I", places.astype(np.uint32).tobytes()))
        if not index._in_order():
            raise ValueError("places are out of order")
        return index

    def nearest(self, context: Sequence[int], limit: int, rank: int = 0) -> list[Match]:
        """The places whose past agrees longest with the end of `context`, up to `limit` on either side.

        In no order; sorted downwards they are longest first, then highest rank first, then latest first.
        """
        log, depth = self.log, self.depth
        wanted = array("I", context[: -depth - 1 : -1])
        i = j = bisect_right(self._floors, wanted) - 1
        block = self._blocks[i]
        at = bisect_right(block, wanted, key=lambda place: log[place : place - depth : -1])
        above, below = block[at : at + limit], block[max(0, at - limit) : at]
        while len(above) < limit and j + 1 < len(self._blocks):
            j += 1
            above += self._blocks[j][: limit - len(above)]
        while len(below) < limit and i > 0:
            i -= 1
            below = self._blocks[i][len(below) - limit :] + below
        below.reverse()
        return self._agreeing(wanted, above, rank) + self._agreeing(wanted, below, rank)

    def _agreeing(self, wanted: Ints, places: Ints, rank: int) -> list[Match]:
        """Agreement only shrinks on the way out from where `wanted` belongs."""
        log, length = self.log, len(wanted)
        found: list[Match] = []
        for place in places if length else ():
            context = log[place : place - length : -1]
            if context != wanted:
                length = common_prefix(context, wanted)
                if not length:
                    break
                wanted = wanted[:length]
            found.append((length, rank, place + 1, log))
        return found

    def _context(self, place: int) -> Ints:
        return self.log[place : place - self.depth : -1]

    def _rebuild(self, new: Iterable[int]) -> None:
        self._adopt(array("I", sorted(chain(self._places(), new), key=self._context)))

    def _places(self) -> Ints:
        places = array("I")
        for block in self._blocks:
            places.extend(block)
        return places

    def _adopt(self, places: Ints) -> None:
        """Takes over places that are in order."""
        self._blocks = [places[i : i + BLOCK] for i in range(0, len(places), BLOCK)] or [array("I")]
        self._floors = [array("I"), *(self._context(block[0]) for block in self._blocks[1:])]
        self._size = len(places)

    def _insert(self, place: int) -> None:
        """The newest place stands behind its equals."""
        log, depth = self.log, self.depth
        context = log[place : place - depth : -1]
        i = bisect_right(self._floors, context) - 1
        block = self._blocks[i]
        block.insert(bisect_right(block, context, key=lambda p: log[p : p - depth : -1]), place)
        self._size += 1
        if len(block) >= 2 * BLOCK:
            self._blocks.insert(i + 1, block[BLOCK:])
            self._floors.insert(i + 1, self._context(block[BLOCK]))
            del block[BLOCK:]

    def _remove(self, place: int) -> None:
        """The oldest place stands before its equals."""
        context = self._context(place)
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
        keys = ((self._context(place), place) for block in self._blocks for place in block)
        return all(a < b for a, b in pairwise(keys))

    def _trim(self, slack: int) -> None:
        """Cuts off what was evicted, but for the contexts of what was not."""
        cut = (self._spans[0][0] if self._spans else len(self.log) - 1) - self.depth
        if cut > slack:
            del self.log[:cut]
            self._spans = deque((first - cut, stop - cut) for first, stop in self._spans)
            for block in filter(None, self._blocks):
                np.frombuffer(block, np.uint32)[...] -= np.uint32(cut)
