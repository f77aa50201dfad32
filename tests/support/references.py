"""Slow, plain models of the KV cache and of a native pass."""

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import CacheFull
from paceline.target.eager.rope import amplitudes, frequencies
from paceline.target.kv.cache import PagedCache, TorchKVMemory
from paceline.target.kv.radix_tree import Node
from paceline.target.native.library import GROUP
from paceline.target.native.target import NativeTarget
from paceline.target.weights.model_config import Rope
from paceline.target.weights.reader import load
from paceline.types import common_prefix
from support.native_targets import Doubles, Floats, Packed, as_taken

LAYERS, HEADS, DIM = 2, 2, 3
CHUNK = 256  # keys whose weights share a unit
GARBAGE = -1.0  # what a rejected row leaves behind


def small_cache(blocks: int, block: int = 4) -> PagedCache:
    return PagedCache(TorchKVMemory(LAYERS, HEADS, DIM, blocks * block), blocks, block)


def rows_in(cache: PagedCache) -> TorchKVMemory:
    rows = cache._rows
    assert isinstance(rows, TorchKVMemory)
    return rows


def rows_of(tokens: Sequence[int], start: int = 0) -> torch.Tensor:
    """The content of the rows from `start` on: [layers, heads, rows, dim], every element different."""
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


def run(cache: PagedCache, tokens: Sequence[int], tenant: str = "", partial: bool = True) -> int:
    """A whole request; gives what was shared."""
    shared = cache.open("run", tenant, tokens, partial)
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


STRANGERS = "s"  # a tenant for whom parts of blocks are not matched


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
        shared = self.cache.open(seq_id, tenant, tokens, partial=tenant != STRANGERS)
        known = [t for owner, t in self.known if owner == tenant]
        if tenant == STRANGERS:
            self.check_whole(shared, tokens, known)
        else:
            best = max((common_prefix(list(t), tokens) for t in known), default=0)
            assert shared <= min(best, len(tokens) - 1)
            if not self.forgot and not self.cache.stats.evicted:
                assert shared == min(best, len(tokens) - 1)
        self.live[seq_id] = tenant, tokens[:shared]
        self.wanted[seq_id] = tokens[shared:]

    def check_whole(self, shared: int, tokens: list[int], known: list[tuple[int, ...]]) -> None:
        """A match is whole blocks, or a text that was known to its very end."""
        ends = {len(t) for t in known if list(t) == tokens[: len(t)] and len(t) < len(tokens)}
        assert shared in {0, *ends}
        if not self.forgot and not self.cache.stats.evicted:
            assert shared >= max((end for end in ends if end % self.cache.block == 0), default=0)

    def extend(self, seq_id: str, n: int) -> bool:
        """True if there was room; there must be if live sequences leave enough blocks."""
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


class FloatReference:
    def __init__(self, model: Path, target: NativeTarget, int8: bool = False) -> None:
        self._target = target
        weights = load(model, torch.float32)
        self.shape = weights.shape
        self._weights: dict[str, Floats] = {}
        for name, tensor in weights.tensors.items():
            values = tensor.numpy()
            rounded = int8 and values.ndim == 2 and not name.endswith("router")
            self._weights[name] = eight_bits(values) if rounded else values

    def run(self, tokens: list[int]) -> Doubles:
        """Logits [rows, vocab] after every token."""
        x = self.embedded(tokens)
        for layer in range(self.shape.layers):
            x = self.layer(layer, x)
        return self.scores(x)

    def embedded(self, tokens: list[int]) -> Doubles:
        return self._weights["embed"][tokens].astype(np.float64) * self.shape.embed_scale

    def layer(self, layer: int, x: Doubles) -> Doubles:
        """One layer over the rows of a whole sequence."""
        x = x + self._maybe_norm(self._attention(layer, x), f"layers.{layer}.post_attn_norm")
        normed = self._norm(x, f"layers.{layer}.ffn_norm")
        made = (
            self._mixture(layer, normed)
            if self.shape.sparse(layer)
            else self._network(normed, f"layers.{layer}.")
        )
        return x + self._maybe_norm(made, f"layers.{layer}.post_ffn_norm")

    def _network(self, x: Doubles, name: str) -> Doubles:
        gate, up = (self._times(x, name + part) for part in ("gate", "up"))
        if self.shape.activation == "clamped_swiglu":
            limit = self.shape.gate_limit
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + 1
        inner = 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        slopes = {"silu": gate, "gelu_tanh": inner, "clamped_swiglu": self.shape.gate_slope * gate}
        slope = slopes[self.shape.activation]
        return self._times(gate / (1 + np.exp(-slope)) * up, name + "down")

    def _mixture(self, layer: int, x: Doubles) -> Doubles:
        """Every expert for every row, most of them times zero."""
        experts = self.shape.experts
        assert experts is not None
        logits = x @ self._weights[f"layers.{layer}.router"].astype(np.float64).T
        logits += self._weights.get(f"layers.{layer}.router_bias", np.zeros(1, np.float32))
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        shares[shares < np.sort(shares)[:, -experts.used, None]] = 0
        if experts.renormalise:
            shares /= shares.sum(-1, keepdims=True)
        made = np.zeros_like(x)
        for expert in range(experts.count):
            made += shares[:, expert, None] * self._network(x, f"layers.{layer}.experts.{expert}.")
        return made

    def scores(self, x: Doubles) -> Doubles:
        logits = self._times(self._norm(x, "norm"), "head" if "head" in self._weights else "embed")
        return _capped(logits, self.shape.logit_softcap)

    def _attention(self, layer: int, x: Doubles) -> Doubles:
        shape, rows = self.shape, len(x)
        normed = self._norm32(x.astype(np.float32), f"layers.{layer}.attn_norm")
        q, k, v = (self._heads32(normed, f"layers.{layer}.{part}") for part in "qkv")
        if f"layers.{layer}.q_norm" in self._weights:
            q, k = self._norm32(q, f"layers.{layer}.q_norm"), self._norm32(k, f"layers.{layer}.k_norm")
        repeat = shape.heads // shape.kv_heads
        local = shape.local(layer)
        rope = shape.local_rope or shape.rope if local else shape.rope
        queries, keys = (codes * scales for codes, scales in (_dot_codes(_rotated(x, rope)) for x in (q, k)))
        values, value_scales = _value_codes(v)
        keys, values, value_scales = (
            np.repeat(each, repeat, axis=0) for each in (keys, values, value_scales)
        )
        scores = queries @ keys.swapaxes(1, 2) * (shape.attn_scale or shape.head_dim**-0.5)
        scores = _capped(scores, shape.attn_softcap)
        seen = np.tri(rows, dtype=bool)
        if local:
            seen &= ~np.tri(rows, k=-shape.window, dtype=bool)
        scores[:, ~seen] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        found = np.zeros_like(queries)
        for chunk in (slice(i, i + CHUNK) for i in range(0, rows, CHUNK)):
            weights = _weight_codes(shares[:, :, chunk] * value_scales[:, None, chunk, 0])
            found += weights @ values[:, chunk]
        total = shares.sum(-1, keepdims=True)
        if (sinks := self._weights.get(f"layers.{layer}.sinks")) is not None:
            total += np.exp(sinks[:, None, None] - scores.max(-1, keepdims=True))
        found /= total
        return self._times(found.swapaxes(0, 1).reshape(rows, -1), f"layers.{layer}.o")

    def _heads32(self, x: Floats, name: str) -> Floats:
        """[heads, rows, head_dim]"""
        weight = Packed(self._target._held[0].matrix(name), np.empty(0, np.uint8))
        product = weight.times(self._target._lib, np.pad(x, ((0, 0), (0, -x.shape[1] % GROUP))))
        product += self._weights.get(f"{name}_bias", np.zeros(1, np.float32))
        return product.reshape(len(x), -1, self.shape.head_dim).swapaxes(0, 1)

    def _norm32(self, x: Floats, name: str) -> Floats:
        eps = np.float32(self.shape.norm_eps)
        inverse = np.float32(1) / np.sqrt(_sum_of_squares(x) / np.float32(x.shape[-1]) + eps)
        return np.asarray(x * inverse * self._weights[name])

    def _times(self, x: Doubles, name: str) -> Doubles:
        weight = self._weights[name].astype(np.float64)
        padding = -x.shape[1] % GROUP
        taken = as_taken(np.pad(x, ((0, 0), (0, padding))).astype(np.float32))[:, : x.shape[1]]
        product: Doubles = taken @ weight.T
        return product + self._weights.get(f"{name}_bias", np.zeros(1, np.float32))

    def _norm(self, x: Doubles, name: str) -> Doubles:
        rms = np.sqrt((x * x).mean(-1, keepdims=True) + self.shape.norm_eps)
        scaled: Doubles = x / rms * self._weights[name]
        return scaled

    def _maybe_norm(self, x: Doubles, name: str) -> Doubles:
        return self._norm(x, name) if name in self._weights else x


def _rotated(x: Floats, rope: Rope) -> Floats:
    steps, scaled = frequencies(rope, x.shape[-1]).numpy(), amplitudes(rope, x.shape[-1])
    angles = (np.arange(x.shape[1], dtype=np.float32)[:, None] * steps).astype(np.float64)
    a, b = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    if scaled is not None:
        cos, sin = cos * scaled.numpy(), sin * scaled.numpy()
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)


def _capped(x: Doubles, cap: float) -> Doubles:
    return cap * np.tanh(x / cap) if cap else x


def _sum_of_squares(x: Floats) -> Floats:
    """[.., 1]: added up in sixteen lanes, which are then folded in halves."""
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % GROUP)])
    lanes = np.zeros((*x.shape[:-1], 16), np.float32)
    for i in range(0, padded.shape[-1], 16):
        piece = padded[..., i : i + 16].astype(np.float64)
        lanes = (piece * piece + lanes).astype(np.float32)
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
    return lanes


def _dot_codes(x: Floats) -> tuple[Doubles, Doubles]:
    """Queries or keys as 16-bit codes of a norm of at most 46000, and their scales [.., 1]."""
    norm = np.sqrt(_sum_of_squares(x))
    return _rounded(
        x, np.maximum(np.abs(x).max(-1, keepdims=True) / np.float32(32767), norm / np.float32(46000))
    )


def _value_codes(x: Floats) -> tuple[Doubles, Doubles]:
    return _rounded(x, np.abs(x).max(-1, keepdims=True) / np.float32(8191))


def _rounded(x: Floats, scales: Floats) -> tuple[Doubles, Doubles]:
    """In float32 as the pass does it: a code at the border would else be another one."""
    return np.rint(x * (np.float32(1) / scales)).astype(np.float64), scales.astype(np.float64)


def _weight_codes(weights: Doubles) -> Doubles:
    """A chunk's weights, times the scales of their values, after their way through 16 bits."""
    unit = np.maximum(weights.max(-1) / 32767, weights.sum(-1) / 261000)[..., None]
    codes = np.rint(np.divide(weights, unit, out=np.zeros_like(weights), where=unit > 0))
    return np.asarray(codes * unit)


def attend(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> Doubles:
    """Every query sees every key: [queries, head_dim]."""
    scores: Doubles = q.astype(np.float64) @ k.astype(np.float64).T
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(shares @ v.astype(np.float64) / shares.sum(-1, keepdims=True))


def attend_in_codes(q: Floats, k: Floats, v: Floats) -> Doubles:
    """The same as a native pass does it."""
    (queries, query_scales), (keys, key_scales), (values, value_scales) = (
        *map(_dot_codes, (q, k)),
        _value_codes(v),
    )
    scores: Doubles = (queries * query_scales) @ (keys * key_scales).T
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    found = np.zeros_like(queries)
    for chunk in (slice(i, i + CHUNK) for i in range(0, len(k), CHUNK)):
        found += _weight_codes(shares[:, chunk] * value_scales[chunk, 0]) @ values[chunk]
    return np.asarray(found / shares.sum(-1, keepdims=True))


def eight_bits(values: Floats) -> Floats:
    """Groups of 32 inputs as 8-bit codes and a half-precision scale."""
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % GROUP)))
    groups = padded.reshape(len(values), -1, GROUP)
    scale = (np.abs(groups).max(-1, keepdims=True) / np.float32(127)).astype(np.float16).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes: NDArray[np.float32] = np.clip(np.nan_to_num(np.rint(groups / scale)), -127, 127)
    return np.asarray(codes * scale).reshape(padded.shape)[:, : values.shape[1]]
