"""The rows of one pass, as lists: which tokens, who sees whom, and where keys go.

A chain's rows go to the sequence's own slots. A tree's first path does too; every other path gets spare
sub-blocks of its own, where the rows it shares with others are written a second time, so that each path reads
its keys as if it were a chain.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.errors import CacheFull
from paceline.target.native.library import SUB_BLOCK
from paceline.types import Feed, common_prefix


class ScratchBlocks:
    """Sub-blocks that belong to no sequence, handed out anew for every pass."""

    def __init__(self, first: int, count: int) -> None:
        self._first, self._count, self._taken = first, count, 0

    def reset(self) -> None:
        self._taken = 0

    def take(self, count: int) -> list[int]:
        start = self._first + self._taken
        self._taken += count
        if self._taken > self._count:
            raise CacheFull(f"draft trees need more than {self._count} scratch blocks: draft less at once")
        return list(range(start, start + count))


@dataclass(slots=True)
class NativeBatch:
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    spans: list[tuple[int, int, int, int]] = field(default_factory=list)  # see Span in model.h
    span_rows: list[int] = field(default_factory=list)
    tables: list[int] = field(default_factory=list)
    writes: list[list[int]] = field(default_factory=list)  # slots of each row, its own first
    copies: list[tuple[int, int]] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)

    def add(self, feed: Feed, start: int, blocks: Sequence[int], block: int, scratch: ScratchBlocks) -> int:
        """A feed whose first row is at position `start`; gives the row of its first node."""
        first, draft = len(self.tokens), feed.draft
        root = first + len(feed.tokens)
        self.tokens += [*feed.tokens, *draft.tokens]
        drafted = start + len(feed.tokens)  # the position of the first draft token
        self.positions += [
            *range(start, drafted),
            *(drafted + draft.depth(node) - 1 for node in range(len(draft))),
        ]
        self.writes += [[] for _ in range(len(feed.tokens) + len(draft))]
        if feed.scored:
            self.scored += range(root - 1, len(self.tokens))
        table = [b * (block // SUB_BLOCK) + i for b in blocks for i in range(block // SUB_BLOCK)]
        before, *others = sorted(draft.paths()) or [()]
        self._span([*range(first, root), *(root + node for node in before)], start, table)
        for path in others:
            shared = common_prefix(before, path)
            own = self._path_table(path, feed, start, root, table, scratch)
            self._span([root + node for node in path[shared:]], drafted + shared, own, write=False)
            before = path
        return root

    def _span(self, rows: Sequence[int], start: int, table: Sequence[int], write: bool = True) -> None:
        self.spans.append((len(self.span_rows), len(rows), start, len(self.tables)))
        self.span_rows += rows
        self.tables += table[: (start + len(rows) - 1) // SUB_BLOCK + 1]
        if write:
            self._write(rows, start, table)

    def _write(self, rows: Sequence[int], start: int, table: Sequence[int]) -> None:
        for position, row in enumerate(rows, start):
            self.writes[row].append(table[position // SUB_BLOCK] * SUB_BLOCK + position % SUB_BLOCK)

    def _path_table(
        self,
        path: Sequence[int],
        feed: Feed,
        start: int,
        root: int,
        table: Sequence[int],
        scratch: ScratchBlocks,
    ) -> list[int]:
        """The sequence's sub-blocks before the draft, then scratch ones that hold this path."""
        drafted = start + len(feed.tokens)
        shared = drafted // SUB_BLOCK
        own = scratch.take((drafted + len(path) - 1) // SUB_BLOCK + 1 - shared)
        again = max(start, shared * SUB_BLOCK)  # rows of this pass that share a sub-block with the draft
        rows = [*range(root - (drafted - again), root), *(root + node for node in path)]
        if shared * SUB_BLOCK < start:
            self.copies.append((table[shared], own[0]))
        whole = [*table[:shared], *own]
        self._write(rows, again, whole)
        return whole
