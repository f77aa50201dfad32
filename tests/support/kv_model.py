"""A cache that is recomputed from scratch: a row's content is a function of the tokens up to it."""

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from paceline.errors import CacheFull
from paceline.target.kv.cache import PagedCache, TorchKVMemory
from paceline.target.kv.radix_tree import Node
from paceline.types import common_prefix

LAYERS, HEADS, DIM = 2, 2, 3
GARBAGE = -1.0  # what a rejected row leaves behind


def small_cache(blocks: int, block: int = 4) -> PagedCache:
    return PagedCache(TorchKVMemory(LAYERS, HEADS, DIM, blocks * block), blocks, block)


def rows_in(cache: PagedCache) -> TorchKVMemory:
    rows = cache._rows
    assert isinstance(rows, TorchKVMemory)
    return rows


def rows_of(tokens: Sequence[int], start: int = 0) -> torch.Tensor:
    """What the rows from `start` on must hold: [layers, heads, rows, dim], every element different."""
    prefixes = [bytes(tokens[: i + 1]) for i in range(start, len(tokens))]
    values = torch.tensor([float(zlib.crc32(prefix) % 2**16) for prefix in prefixes])
    places = torch.arange(LAYERS * HEADS * DIM, dtype=torch.float32).view(LAYERS, HEADS, 1, DIM)
    return values.view(1, 1, -1, 1) * 16 + places


def write(cache: PagedCache, seq_id: str, tokens: Sequence[int], start: int) -> None:
    """Stands for a pass: writes the rows from `start` on of a sequence that has these tokens."""
    slots = cache.slots(seq_id, start, len(tokens))
    rows_in(cache).k[:, :, slots] = rows_of(tokens, start)
    rows_in(cache).v[:, :, slots] = -rows_of(tokens, start)


def feed(cache: PagedCache, seq_id: str, tokens: Sequence[int]) -> None:
    """Computes all tokens the cache does not hold yet."""
    start = cache.length(seq_id)
    cache.extend(seq_id, len(tokens) - start)
    write(cache, seq_id, tokens, start)
    cache.append(seq_id, tokens[start:])


def run(cache: PagedCache, tokens: Sequence[int], tenant: str = "") -> int:
    """A whole request; gives what was shared."""
    shared = cache.open("run", tenant, tokens)
    feed(cache, "run", tokens)
    cache.close("run")
    return shared


def holds(cache: PagedCache, slots: list[int], tokens: Sequence[int], start: int = 0) -> bool:
    wanted, rows = rows_of(tokens, start), rows_in(cache)
    return bool(torch.equal(rows.k[:, :, slots], wanted) and torch.equal(rows.v[:, :, slots], -wanted))


def nodes_of(cache: PagedCache) -> Iterator[tuple[Node, tuple[int, ...]]]:
    """Every cached block with the tokens that lead up to it."""
    stack: list[tuple[Node, tuple[int, ...]]] = [(root, ()) for root in cache._tree._roots.values()]
    while stack:
        parent, before = stack.pop()
        assert parent.order == sorted(parent.children)
        for tokens, node in parent.children.items():
            assert node.tokens == tokens
            assert node.parent is parent
            assert node.tenant == parent.tenant
            assert not node.children or len(tokens) == cache.block
            yield node, before
            stack.append((node, before + tokens))


def free_blocks(cache: PagedCache) -> list[int]:
    runs = cache._free._length
    assert {first + length: first for first, length in runs.items()} == cache._free._start
    assert not runs.keys() & cache._free._start.keys(), "neighbouring runs must be one"
    return [first + i for first, length in runs.items() for i in range(length)]


def check_books(cache: PagedCache) -> None:
    """Every block is in one place, every count is what it counts, every cached row is right."""
    nodes = list(nodes_of(cache))
    holders = Counter(id(node) for pages in cache._live.values() for node in pages.nodes)
    own = [block for pages in cache._live.values() for block in pages.table[len(pages.nodes) :]]
    blocks = [node.block for node, _ in nodes] + own + free_blocks(cache)
    assert sorted(blocks) == list(range(cache.blocks))
    assert len(free_blocks(cache)) == cache._free.count == cache.stats.free
    assert {id(node) for node, _ in nodes if not node.holders} == {id(node) for node in cache._tree._idle}
    for node, before in nodes:
        assert node.holders == holders[id(node)]
        slots = [node.block * cache.block + i for i in range(len(node.tokens))]
        assert holds(cache, slots, before + node.tokens, len(before))
    for pages in cache._live.values():
        assert not pages.grows or len(pages.nodes[-1].tokens) < cache.block
    seen: set[int] = set()
    for node in cache._tree._idle:
        assert all(id(child) in seen for child in node.children.values()), "a block must outlive what follows"
        seen.add(id(node))
    used_roots = {pages.root.tenant for pages in cache._live.values()} | {node.tenant for node, _ in nodes}
    assert cache._tree._roots.keys() == used_roots
    assert not rows_in(cache).k[:, :, cache.blocks * cache.block :].any()


def picture(cache: PagedCache) -> object:
    """All there is to know, for comparing before and after."""
    live = {i: (p.tokens[:], p.table[:], [id(n) for n in p.nodes], p.grows) for i, p in cache._live.items()}
    nodes = {id(n): (n.tokens, n.block, n.holders, before) for n, before in nodes_of(cache)}
    return live, nodes, [id(n) for n in cache._tree._idle], sorted(free_blocks(cache)), cache.stats


class Model:
    """Drives a cache and knows what it must hold. Choices are numbers, modulo what there is to choose."""

    def __init__(self, block: int, blocks: int) -> None:
        self.cache = small_cache(blocks, block)
        self.live: dict[str, tuple[str, list[int]]] = {}  # tenant, tokens of the valid rows
        self.wanted: dict[str, list[int]] = {}  # what was asked for at open and is not computed yet
        self.known: list[tuple[str, tuple[int, ...]]] = []  # what was ever full or closed
        self.forgot = False
        self.opened = 0

    def pick(self, which: int) -> str:
        return sorted(self.live)[which % len(self.live)]

    @property
    def newest(self) -> int:
        return sorted(self.live).index(f"s{self.opened - 1}")

    def remember(self, seq_id: str, length: int) -> None:
        tenant, tokens = self.live[seq_id]
        self.known.append((tenant, tuple(tokens[:length])))

    def open(self, tenant: str, past: int, cut: int, more: list[int]) -> None:
        """Opens a sequence that begins like an earlier one, of whichever tenant."""
        pasts = [[], *(t for _, t in self.live.values()), *(list(t) for _, t in self.known)]
        begin = pasts[-1 - past % len(pasts)]
        tokens = begin[: len(begin) - cut % (len(begin) + 1)] + more
        seq_id = f"s{self.opened}"
        self.opened += 1
        best = max((common_prefix(list(t), tokens) for owner, t in self.known if owner == tenant), default=0)
        shared = self.cache.open(seq_id, tenant, tokens)
        assert shared <= min(best, len(tokens) - 1)
        if not self.forgot and not self.cache.stats.evicted:
            assert shared == min(best, len(tokens) - 1)
        self.live[seq_id] = tenant, tokens[:shared]
        self.wanted[seq_id] = tokens[shared:]

    def extend(self, seq_id: str, n: int) -> bool:
        """Whether there was room; there must be if live sequences leave enough blocks."""
        length = len(self.live[seq_id][1])
        table = self.cache.table(seq_id)
        others = {block for other in self.live if other != seq_id for block in self.cache.table(other)}
        spare = self.cache.blocks - len(others | set(table))
        fresh = -(-(length + n) // self.cache.block) - len(table)
        shares_last = length < len(table) * self.cache.block and table[-1] in others
        before = picture(self.cache)
        try:
            self.cache.extend(seq_id, n)
        except CacheFull:
            assert fresh + shares_last > spare
            assert picture(self.cache) == before
            return False
        assert fresh <= spare
        return True

    def compute(self, which: int, new: list[int], lost: int) -> None:
        """A pass: writes what is wanted, or else the new tokens, and rows that are then rejected."""
        seq_id = self.pick(which)
        _, tokens = self.live[seq_id]
        start = len(tokens)
        new = self.wanted[seq_id] or new
        if not self.extend(seq_id, len(new) + lost):
            return
        write(self.cache, seq_id, tokens + new, start)
        rejected = self.cache.slots(seq_id, start + len(new), start + len(new) + lost)
        rows_in(self.cache).k[:, :, rejected] = rows_in(self.cache).v[:, :, rejected] = GARBAGE
        self.cache.append(seq_id, new)
        tokens.extend(new)
        self.wanted[seq_id] = []
        for end in range(start + 1, len(tokens) + 1):
            if end % self.cache.block == 0:
                self.remember(seq_id, end)

    def truncate(self, which: int, drop: int) -> None:
        seq_id = self.pick(which)
        _, tokens = self.live[seq_id]
        length = len(tokens) - drop % (len(tokens) + 1)
        self.cache.truncate(seq_id, length)
        del tokens[length:]
        self.wanted[seq_id] = []

    def close(self, which: int) -> None:
        seq_id = self.pick(which)
        self.remember(seq_id, len(self.live[seq_id][1]))
        self.cache.close(seq_id)
        del self.live[seq_id], self.wanted[seq_id]

    def clear(self, tenant: str | None) -> None:
        self.cache.clear(tenant)
        self.forgot = True

    def check(self) -> None:
        check_books(self.cache)
        stats = self.cache.stats
        assert stats.free + stats.cached + stats.live == stats.blocks
        assert self.live or stats.live == 0
        for seq_id, (_, tokens) in self.live.items():
            assert self.cache.length(seq_id) == len(tokens)
            slots = self.cache.slots(seq_id, 0, len(tokens))
            table, size = self.cache.table(seq_id), self.cache.block
            assert slots == [table[r // size] * size + r % size for r in range(len(tokens))]
            assert holds(self.cache, slots, tokens)
            first = slots[0] if slots else 0
            straight = slots == list(range(first, first + len(slots)))
            assert (self.cache.first_slot(seq_id, len(tokens)) is not None) == straight
