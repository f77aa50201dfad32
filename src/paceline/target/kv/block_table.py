"""The block table of one sequence (PagedAttention), and runs of free blocks."""

from dataclasses import dataclass

from paceline.target.kv.radix_tree import Node


@dataclass(slots=True)
class BlockTable:
    """One live sequence: table = the nodes' blocks, then blocks of its own.

    A block that becomes full becomes a node, so every node but the last is full and wholly valid.
    """

    size: int  # rows in a block
    root: Node
    tokens: list[int]  # of the valid rows
    table: list[int]
    nodes: list[Node]
    grows: bool = False  # the last node is partial and this sequence alone writes after its rows

    @property
    def sealed(self) -> int:
        """Blocks that are nodes for good."""
        return len(self.nodes) - self.grows

    @property
    def borrowed(self) -> bool:
        """Writing the next row would alter the last node: its block must be copied first."""
        if not self.nodes:
            return False
        rows = len(self.tokens) - (len(self.nodes) - 1) * self.size
        return rows < (len(self.nodes[-1].tokens) if self.grows else self.size)

    @property
    def room(self) -> int:
        """Rows that may be written after the valid ones."""
        return 0 if self.borrowed else len(self.table) * self.size - len(self.tokens)

    def parent(self, index: int) -> Node:
        return self.nodes[index - 1] if index else self.root

    def content(self, index: int) -> tuple[int, ...]:
        """The valid tokens of one block."""
        return tuple(self.tokens[index * self.size : (index + 1) * self.size])


class FreeRuns:
    """Free blocks as runs of neighbours."""

    def __init__(self, blocks: int) -> None:
        self.count = blocks
        self._length = {0: blocks} if blocks else {}  # first block -> length
        self._start = {blocks: 0} if blocks else {}  # one past the last block -> first block

    def take(self, after: int | None) -> int:
        """The block next to `after`, which is not free itself; else one in the longest run.

        A run that follows another sequence's block is entered in its middle: both can then grow in place.
        """
        block = -1 if after is None else after + 1
        if block in self._length:
            return self._remove(block, block)
        start = min(self._length, key=lambda first: (-self._length[first], first))
        return self._remove(start + self._length[start] // 2 if start else 0, start)

    def _remove(self, block: int, start: int) -> int:
        """Takes a block out of the run that begins at `start`."""
        stop = start + self._length.pop(start)
        del self._start[stop]
        for first, end in ((start, block), (block + 1, stop)):
            if end > first:
                self._length[first] = end - first
                self._start[end] = first
        self.count -= 1
        return block

    def give(self, block: int) -> None:
        start = self._start.pop(block, block)
        stop = block + 1 + self._length.pop(block + 1, 0)
        self._length[start] = stop - start
        self._start[stop] = start
        self.count += 1
