"""A paged KV cache (PagedAttention, arXiv 2309.06180): blocks that sequences with a common prefix share."""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final, Protocol

import numpy as np
import torch

from paceline.errors import CacheFull, SettingError
from paceline.target.kv.disk_cache import MIN_ROWS, DiskCache, Prefix, StoredPage
from paceline.target.kv.page_file import Bytes, PageFile, PageStatus, page_key
from paceline.target.kv.radix_tree import Node, RadixTree
from paceline.target.weights.model_config import ModelConfig
from paceline.types import CacheStats

BLOCK: Final = 64  # rows in a block
SLACK: Final = 256  # slots after the last block, always zero: a reader may look past a sequence's last block
MAX_REWRITES: Final = 4  # blocks that a sequence found in memory and writes to the disk again at its end
LOADED_AT_ONCE: Final = 16  # pages, between two looks at the clock
SLOW_PAGE_S: Final = 0.003  # to load a page: it was not in the system's memory, and those after it are not
READ_AHEAD: Final = 64  # pages that the system then fetches while earlier ones are copied
_MB: Final = 2**20


def token_bytes(shape: ModelConfig, itemsize: int, scale_bytes: int = 0) -> int:
    """Of the keys and values of one token. scale_bytes: of each key and each value."""
    return 2 * shape.layers * shape.kv_heads * (shape.head_dim * itemsize + scale_bytes)


def blocks_in(cache_mb: int, shape: ModelConfig, itemsize: int, scale_bytes: int = 0) -> int:
    """The blocks of keys and values that fit into cache_mb. scale_bytes: of each key and each value."""
    block_bytes = BLOCK * token_bytes(shape, itemsize, scale_bytes)
    blocks = cache_mb * _MB // block_bytes
    if not blocks:
        raise SettingError("cache_mb", cache_mb, f"{-(-block_bytes // _MB)} or more for this model")
    return blocks


class KVMemory(Protocol):
    """The memory of keys and values."""

    def copy(self, source: int, target: int, count: int) -> None: ...  # slots, both multiples of the block

    # A page holds the rows of a block from its first slot on, and nothing else that depends on anything.
    def page_bytes(self, rows: int) -> int: ...
    def save(self, slot: int, rows: int, page: Bytes) -> None: ...
    def load(self, slots: Sequence[int], pages: Sequence[PageFile]) -> list[PageStatus]: ...


class TorchKVMemory:
    """Keys and values as [layers, kv_heads, slots, head_dim]."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        slots: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (layers, kv_heads, slots + SLACK, head_dim)
        # Zeros: what a mask hides must still be finite.
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def copy(self, source: int, target: int, count: int) -> None:
        with torch.inference_mode():
            for buffer in (self.k, self.v):
                buffer[:, :, target : target + count] = buffer[:, :, source : source + count]

    def page_bytes(self, rows: int) -> int:
        layers, heads, _, width = self.k.shape
        return 2 * layers * heads * rows * width * self.k.itemsize

    def save(self, slot: int, rows: int, page: Bytes) -> None:
        with torch.inference_mode():
            for part, buffer in zip(self._parts(rows, page), (self.k, self.v), strict=True):
                part[:] = buffer[:, :, slot : slot + rows]

    def load(self, slots: Sequence[int], pages: Sequence[PageFile]) -> list[PageStatus]:
        return [self._load(slot, page) for slot, page in zip(slots, pages, strict=True)]

    def _load(self, slot: int, file: PageFile) -> PageStatus:
        page, rows = np.empty(file.nbytes, np.uint8), file.rows
        if (status := file.read(page)) == PageStatus.WHOLE:
            with torch.inference_mode():
                for part, buffer in zip(self._parts(rows, page), (self.k, self.v), strict=True):
                    buffer[:, :, slot : slot + rows] = part
        return status

    def _parts(self, rows: int, page: Bytes) -> torch.Tensor:
        layers, heads, _, width = self.k.shape
        return torch.from_numpy(page).view(self.k.dtype).view(2, layers, heads, rows, width)


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
    partial: bool = True  # a part of a block may be matched
    # For the disk tier:
    keys: list[bytes] = field(default_factory=list)  # the root's, then one of each whole block
    stored: deque[StoredPage] = field(default_factory=deque)  # pages to be loaded
    writes: bool = False  # its rows may be written
    counts: bool = True  # what it finds is a hit
    prompt_rows: int = 0  # where its prompt ends, if the page that ends there is still to be written

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

    def __init__(self, blocks: int, room: int | None = None) -> None:
        """room: most blocks that a sequence leaves free before it, for another one to grow. None: half."""
        self.count = blocks
        self._room = blocks if room is None else room
        self._length = {0: blocks} if blocks else {}  # first block -> length
        self._start = {blocks: 0} if blocks else {}  # one past the last block -> first block

    def take(self, after: int | None) -> int:
        """The block next to `after`, which is not free itself; else one in the longest run.

        A run that follows another sequence's block is entered in its middle, or after `room` blocks: both
        can then grow in place.
        """
        block = -1 if after is None else after + 1
        if block in self._length:
            return self._remove(block, block)
        start = min(self._length, key=lambda first: (-self._length[first], first))
        return self._remove(start + min(self._length[start] // 2, self._room) if start else 0, start)

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


class PagedCache:
    """Which slots hold the rows of which sequence.

    Row r of a sequence lives in slot table[r // block] * block + r % block. A pass calls `extend`, writes
    into `slots`, then tells with `append` which rows are valid; `extend`, `append` and `truncate` may all
    change the table. Rows of a prefix that was seen before are found again until they are evicted.

    For strangers (`open` without `partial`) a block is found only as a whole: with all its tokens, or with
    all that an earlier sequence had in it at its end. Nothing depends on a part that agrees, so nobody learns
    another's text token by token. That holds for the disk tier too, where pages are found by content as a
    whole, whoever opens them.
    """

    def __init__(self, rows: KVMemory, blocks: int, block: int = BLOCK, room: int | None = None) -> None:
        """room: of FreeRuns."""
        self.disk: DiskCache | None = None
        self._rows = rows
        self.blocks = blocks
        self.block = block
        self._free = FreeRuns(blocks, room)
        self._tree = RadixTree(block)
        self._live: dict[str, BlockTable] = {}
        self._queried = self._hits = self._evicted = 0

    @property
    def stats(self) -> CacheStats:
        free, cached = self._free.count, self._tree.idle
        live = self.blocks - free - cached
        disk = None if self.disk is None else self.disk.stats
        return CacheStats(self.blocks, free, cached, live, self._evicted, self._queried, self._hits, disk)

    def open(
        self,
        seq_id: str,
        tenant: str,
        tokens: Sequence[int],
        partial: bool = True,
        writes: bool = False,
        counts: bool = True,
    ) -> int:
        """Attaches the longest cached prefix and gives its length; the last token is never part of it.

        partial: it may end anywhere in a block. All sequences of a tenant should have the same.
        writes: its rows may be written to the disk. counts: `stats` count what it finds.
        """
        if seq_id in self._live:
            raise ValueError(f"sequence {seq_id!r} is open already")
        root, nodes, tail, tail_rows = self._tree.find(tenant, tuple(tokens[:-1]), partial)
        keys, stored = self._find_stored(tenant, tokens[:-1], len(nodes), tail_rows)
        if stored:
            tail, tail_rows = None, 0
        length = len(nodes) * self.block + tail_rows
        grows = False
        if tail is not None:
            # Written on in place if so; otherwise its rows are copied when the sequence first writes.
            grows = tail.holders == 0 and tail_rows == len(tail.tokens)
            nodes.append(tail)
        for node in (root, *nodes):
            self._tree.hold(node)
        table = [node.block for node in nodes]
        self._live[seq_id] = pages = BlockTable(
            self.block, root, list(tokens[:length]), table, nodes, grows, partial, keys, stored
        )
        pages.writes = writes and self.disk is not None
        pages.prompt_rows = len(tokens) - 1 if partial else 0
        pages.counts = counts
        self._queried += counts * len(tokens)
        self._hits += counts * length
        return length

    def _find_stored(
        self, tenant: str, tokens: Sequence[int], held: int, tail_rows: int
    ) -> tuple[list[bytes], deque[StoredPage]]:
        """The keys of the blocks in memory, and the pages that continue them further than memory does."""
        if self.disk is None:
            return [], deque()
        keys = self.disk.keys(tenant, tokens[: held * self.block])
        pages = self.disk.find(keys[-1], tokens[held * self.block :])
        if sum(len(page.tokens) for page in pages) < tail_rows + MIN_ROWS:
            return keys, deque()
        return keys, deque(pages)

    def restore(self, seq_id: str, seconds: float) -> tuple[int, bool]:
        """Loads the pages that `open` found on the disk, for about so long; one at least.

        Gives the valid rows, and True if there are more pages to be loaded.
        """
        pages, deadline = self._pages(seq_id), perf_counter() + seconds
        while pages.stored:
            count = LOADED_AT_ONCE if seconds else 1
            some = [pages.stored.popleft() for _ in range(min(count, len(pages.stored)))]
            began = perf_counter()
            if not self._load(seq_id, pages, some):
                pages.stored.clear()
            now = perf_counter()
            if now - began > SLOW_PAGE_S * len(some) and self.disk is not None:
                self.disk.read_ahead([pages.stored[i] for i in range(min(READ_AHEAD, len(pages.stored)))])
            if now >= deadline:
                break
        return len(pages.tokens), bool(pages.stored)

    def _load(self, seq_id: str, pages: BlockTable, stored: Sequence[StoredPage]) -> bool:
        """False if one is not there any more, or has no room: what follows it is of no use."""
        assert self.disk is not None
        fitting: list[StoredPage] = []
        with suppress(CacheFull):
            for page in stored:
                self.extend(seq_id, sum(len(p.tokens) for p in fitting) + len(page.tokens))
                fitting.append(page)
        first = len(pages.tokens) // self.block
        slots = [block * self.block for block in pages.table[first : first + len(fitting)]]
        loaded = self.disk.load(fitting, lambda files: self._rows.load(slots, files), pages.counts)
        for page in fitting[:loaded]:
            self.append(seq_id, page.tokens)
            self._hits += pages.counts * len(page.tokens)
        return loaded == len(stored)

    def extend(self, seq_id: str, n: int) -> None:
        """Makes room for n rows after the valid ones."""
        pages = self._pages(seq_id)
        if n <= pages.room:
            return
        spare = self._free.count + self._tree.idle
        copied = pages.borrowed and pages.nodes[-1].holders > 1
        free = max(0, (len(pages.table) - copied + spare) * self.block - len(pages.tokens))
        if n > free:
            raise CacheFull(
                f"no room in the KV cache: {n} more rows needed, {free} are free or can be freed; "
                "raise cache_mb or run fewer sequences at once"
            )
        fresh = -(-(len(pages.tokens) + n) // self.block) - len(pages.table)
        if pages.borrowed:
            self._own_last(pages, copy=fresh < spare)
        for _ in range(fresh):
            pages.table.append(self._take(pages.table[-1] if pages.table else None))

    def append(self, seq_id: str, tokens: Sequence[int]) -> None:
        """The rows of these tokens have been written after the valid ones."""
        pages = self._pages(seq_id)
        if len(tokens) > pages.room:
            raise ValueError(
                f"{len(tokens)} rows appended to {seq_id!r}, room for {pages.room}: extend first"
            )
        pages.tokens.extend(tokens)
        while (pages.sealed + 1) * self.block <= len(pages.tokens):
            self._seal(pages)
            self._write_block(pages, pages.sealed - 1)
        if pages.writes and 0 < pages.prompt_rows <= len(pages.tokens):
            self._write_part(pages, pages.prompt_rows)  # for the same prompt, or one that begins with it
            pages.prompt_rows = 0

    def truncate(self, seq_id: str, length: int) -> None:
        """Drops the rows from `length` on, and the room after them."""
        pages = self._pages(seq_id)
        if not 0 <= length <= len(pages.tokens):
            raise ValueError(f"{seq_id!r} has {len(pages.tokens)} rows, cannot be cut to {length}")
        keep = -(-length // self.block)
        self._drop_own(pages, keep)
        for node in reversed(pages.nodes[keep:]):
            self._tree.release(node)
        pages.grows = pages.grows and keep >= len(pages.nodes)
        del pages.nodes[keep:], pages.table[keep:], pages.tokens[length:]
        del pages.keys[length // self.block + 1 :]
        pages.stored.clear()

    def close(self, seq_id: str) -> None:
        """Ends a sequence; its rows stay cached until they are evicted."""
        pages = self._pages(seq_id)
        if pages.writes:
            self._write_rest(pages)
        self._keep_tail(pages)
        self._drop_own(pages, 0)
        for node in (*reversed(pages.nodes), pages.root):
            self._tree.release(node)
        self._tree.settle(pages.root)
        del self._live[seq_id]

    def clear(self, tenant: str | None = None) -> None:
        """Forgets what no live sequence holds, of one tenant or of all."""
        for block in self._tree.clear(tenant):
            self._free.give(block)

    def page_bytes(self, rows: int) -> int:
        """Of a page of so many rows, as a file."""
        return self._rows.page_bytes(rows)

    def length(self, seq_id: str) -> int:
        return len(self._pages(seq_id).tokens)

    def table(self, seq_id: str) -> list[int]:
        return list(self._pages(seq_id).table)

    def slots(self, seq_id: str, start: int, stop: int) -> list[int]:
        """The slots of rows [start, stop), written or not."""
        pages, size = self._pages(seq_id), self.block
        self._check_rows(pages, start, stop)
        first = start // size
        if stop <= (first + 1) * size and start < stop:  # in one block
            shift = (pages.table[first] - first) * size
            return list(range(start + shift, stop + shift))
        slots: list[int] = []
        while start < stop:
            end = min(stop, (start // size + 1) * size)
            shift = pages.table[start // size] * size - start // size * size
            slots.extend(range(start + shift, end + shift))
            start = end
        return slots

    def first_slot(self, seq_id: str, upto: int) -> int | None:
        """The slot of row 0 if the rows [0, upto) lie in consecutive blocks, else None."""
        pages = self._pages(seq_id)
        self._check_rows(pages, 0, upto)
        table = pages.table[: -(-upto // self.block)]
        first = table[0] if table else 0
        return first * self.block if table == list(range(first, first + len(table))) else None

    def _pages(self, seq_id: str) -> BlockTable:
        if seq_id not in self._live:
            raise KeyError(f"sequence {seq_id!r} is not open")
        return self._live[seq_id]

    def _check_rows(self, pages: BlockTable, start: int, stop: int) -> None:
        end = len(pages.tokens) + pages.room
        if not 0 <= start <= stop <= end:
            raise ValueError(f"rows {start} to {stop} are out of range, there are {end}: extend first")

    def _take(self, after: int | None) -> int:
        if not self._free.count:
            self._free.give(self._tree.evict())
            self._evicted += 1
        return self._free.take(after)

    def _own_last(self, pages: BlockTable, copy: bool) -> None:
        """Makes the last block, which is a node's, the sequence's own."""
        node = pages.nodes.pop()
        pages.grows = False
        if copy:
            rows = len(pages.tokens) - len(pages.nodes) * self.block
            pages.table[-1] = self._take(pages.table[-2] if len(pages.table) > 1 else None)
            self._rows.copy(node.block * self.block, pages.table[-1] * self.block, rows)
            self._tree.release(node)
            return
        # Every other block is needed: the node itself is given up, after all its descendants.
        while node.children:
            self._free.give(self._tree.evict())
            self._evicted += 1
        self._tree.remove(node)
        self._evicted += 1

    def _seal(self, pages: BlockTable) -> None:
        """The first block that is not a whole node is full now: makes it one, or uses its equal."""
        index = pages.sealed
        content = pages.content(index)
        node = pages.parent(index).children.get(content)
        if pages.grows:
            pages.grows = False
            if node is None:
                self._tree.grow(pages.nodes[-1], content)
                return
            self._tree.release(pages.nodes.pop())
        elif node is None:
            node = self._tree.add(pages.parent(index), content, pages.table[index])
        else:
            self._free.give(pages.table[index])
        self._tree.hold(node)
        pages.nodes.append(node)
        pages.table[index] = node.block

    def _write_block(self, pages: BlockTable, index: int) -> None:
        """Notes the key of a block that became whole, and offers it to the disk tier."""
        if pages.keys:
            pages.keys.append(page_key(pages.keys[index], pages.content(index)))
            self._offer(pages, index, self.block, pages.keys[-1])

    def _write_part(self, pages: BlockTable, end: int) -> bytes | None:
        """Offers the rows of a block up to row `end` to the disk tier; gives the page's key."""
        index, rows = divmod(end, self.block)
        if rows < MIN_ROWS or index >= len(pages.keys):
            return None
        key = page_key(pages.keys[index], pages.content(index)[:rows])
        self._offer(pages, index, rows, key)
        return key

    def _offer(self, pages: BlockTable, index: int, rows: int, key: bytes) -> None:
        if self.disk is not None and pages.writes:
            slot = pages.table[index] * self.block
            self.disk.offer(key, rows, lambda page: self._rows.save(slot, rows, page))

    def _write_rest(self, pages: BlockTable) -> None:
        """At its end: the last rows, and blocks that were found in memory but are not on the disk."""
        assert self.disk is not None
        missing = [i for i, key in enumerate(pages.keys[1:]) if key not in self.disk]
        for index in missing[:MAX_REWRITES]:
            self._offer(pages, index, self.block, pages.keys[index + 1])
        tail = self._write_part(pages, len(pages.tokens))
        self.disk.used([*pages.keys[1:], *([] if tail is None else [tail])])
        self.disk.ended(Prefix(pages.root.tenant, pages.tokens))

    def _keep_tail(self, pages: BlockTable) -> None:
        """Registers the last, partial block, unless another one holds the same and, if that counts, more."""
        index = pages.sealed
        content = pages.content(index)
        if pages.borrowed or not content:
            return
        parent = pages.parent(index)
        rival, equal = parent.closest(content) if pages.partial else parent.longest(content)
        if rival is not None and equal == len(content):
            self._tree.touch(rival)
        elif pages.grows:
            self._tree.grow(pages.nodes[-1], content)
        else:
            self._tree.add(pages.parent(index), content, pages.table[index])
            del pages.table[index]

    def _drop_own(self, pages: BlockTable, keep: int) -> None:
        """Frees the blocks of the table that are no node's, all but the first `keep`."""
        start = max(keep, len(pages.nodes))
        for block in pages.table[start:]:
            self._free.give(block)
        del pages.table[start:]
