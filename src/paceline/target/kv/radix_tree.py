"""A radix tree of cached prefixes (RadixAttention, arXiv 2312.07104): one per tenant, a node per block."""

from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.types import common_prefix

Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    """A block whose first len(tokens) rows hold these tokens, following those of its ancestors.

    Full unless a sequence ended inside it. Only full nodes have children. These rows never change
    while the node is in the tree.
    """

    tenant: str
    parent: "Node | None"  # None: a tenant's root, which has no block
    tokens: Tokens
    block: int
    holders: int = 0  # live sequences; whoever holds a node holds all its ancestors
    children: dict[Tokens, "Node"] = field(default_factory=dict)
    order: list[Tokens] = field(default_factory=list)  # the children's tokens, sorted

    def closest(self, tokens: Tokens) -> tuple["Node | None", int]:
        """The child that agrees longest with `tokens`, and how long; on a tie the one that ends there."""
        # The longest common prefix is always with a neighbour in sorted order.
        at = bisect_left(self.order, tokens)
        near = [(common_prefix(key, tokens), key) for key in self.order[max(0, at - 1) : at + 1]]
        length, key = max(near, default=(0, ()))
        if length == 0:
            return None, 0
        return self.children.get(tokens[:length]) or self.children[key], length

    def longest(self, tokens: Tokens) -> tuple["Node | None", int]:
        """The longest child whose tokens all agree with `tokens`, and its length."""
        for length in range(len(tokens), 0, -1):
            if (child := self.children.get(tokens[:length])) is not None:
                return child, length
        return None, 0


class PrefixMatch(NamedTuple):
    root: Node
    full: list[Node]  # wholly equal blocks, from the first token on
    tail: Node | None  # the block after them that agrees longest with what remains
    tail_rows: int


class RadixTree:
    """Finds blocks by content, counts who holds them, and knows which to give up first."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._roots: dict[str, Node] = {}
        # Nodes nobody holds, least recently used first. Each comes after all its descendants, because
        # chains are released deepest first: so the first one is always a leaf.
        self._idle: OrderedDict[Node, None] = OrderedDict()

    @property
    def idle(self) -> int:
        return len(self._idle)

    def find(self, tenant: str, tokens: Tokens, partial: bool = True) -> PrefixMatch:
        """The longest cached prefix of `tokens`. The root is created if need be: hold it or `settle` it.

        partial: the last node may agree with `tokens` in a part only.
        """
        root = node = self._roots.setdefault(tenant, Node(tenant, None, (), -1))
        full: list[Node] = []
        start, size = 0, self._block
        while start + size <= len(tokens) and (child := node.children.get(tokens[start : start + size])):
            full.append(child)
            node, start = child, start + size
        rest = tokens[start : start + size]
        return PrefixMatch(root, full, *(node.closest(rest) if partial else node.longest(rest)))

    def add(self, parent: Node, tokens: Tokens, block: int) -> Node:
        """Registers a block that nobody holds yet."""
        node = Node(parent.tenant, parent, tokens, block)
        self._link(node)
        self._idle[node] = None
        return node

    def grow(self, node: Node, tokens: Tokens) -> None:
        """More rows of the node's block are now valid."""
        self._unlink(node)
        node.tokens = tokens
        self._link(node)

    def hold(self, node: Node) -> None:
        node.holders += 1
        self._idle.pop(node, None)

    def release(self, node: Node) -> None:
        """Chains must be released deepest first."""
        node.holders -= 1
        if node.holders == 0 and node.parent is not None:
            self._idle[node] = None

    def touch(self, node: Node) -> None:
        """Counts as a use of a node whose parent is held."""
        if node in self._idle:
            self._idle.move_to_end(node)

    def evict(self) -> int:
        """Forgets the least recently used node and gives back its block."""
        node = next(iter(self._idle))
        self.remove(node)
        return node.block

    def remove(self, node: Node) -> None:
        """Forgets a node without children."""
        self._unlink(node)
        self._idle.pop(node, None)
        assert node.parent is not None
        self.settle(node.parent)

    def clear(self, tenant: str | None) -> list[int]:
        """Forgets all nodes that nobody holds, of one tenant or of all, and gives back their blocks."""
        gone = [node for node in self._idle if tenant is None or node.tenant == tenant]
        for node in gone:
            self.remove(node)
        return [node.block for node in gone]

    def settle(self, node: Node) -> None:
        """Drops a tenant's root once nothing needs it."""
        if node.parent is None and not node.holders and not node.children:
            self._roots.pop(node.tenant, None)

    def _link(self, node: Node) -> None:
        assert node.parent is not None
        node.parent.children[node.tokens] = node
        insort(node.parent.order, node.tokens)

    def _unlink(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.tokens]
        del node.parent.order[bisect_left(node.parent.order, node.tokens)]
