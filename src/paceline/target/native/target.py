"""The target in C++: packed weights, a 16-bit KV cache, and the bookkeeping between passes."""

import ctypes
import json
import logging
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from paceline import limits
from paceline.config import EngineConfig
from paceline.errors import ModelError, UsageError
from paceline.heads.block import BlockConfig
from paceline.heads.head_checkpoint import StoredHead
from paceline.target.base import FeedRecord, PagedTarget, check_layers
from paceline.target.eager.rope import amplitudes, frequencies
from paceline.target.kv.cache import BLOCK, PagedCache, blocks_in, token_bytes
from paceline.target.kv.disk_cache import DiskCache
from paceline.target.kv.page_file import CHECKSUM, PageFile, PageFormat, PageStatus
from paceline.target.native import library
from paceline.target.native.batch import NativeBatch, ScratchBlocks
from paceline.target.native.block_head import NativeBlock, unsupported_reason
from paceline.target.native.embeddings import PackedEmbeddings, packed_embeddings
from paceline.target.native.library import SUB_BLOCK
from paceline.target.native.packing import Bytes, PackedWeights
from paceline.target.native.threads import ThreadPool
from paceline.target.weights.model_config import ModelConfig, Rope, layer_share
from paceline.types import NO_DRAFT, Feed, Scores

PASS_ROWS: Final = 512  # in one native pass; a longer one is cut, which changes no bit
SPARE: Final = 128  # sub-blocks for the branches of one tree of 64 nodes; memory only where they are used
ROPE_SAMPLE: Final = 4096  # positions whose rotations are part of what names a page
ROOM: Final = (
    8  # blocks between two sequences: no pass needs more, and memory that was used before is used again
)
MAX_READY: Final = 128 * 2**20  # bytes of the KV cache made ready for pages that are on the disk
BLOCKS_BEFORE: Final = 4 * ROOM  # that requests may take before the one whose pages are loaded
_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE of Linux 5.14 and later
_CODE: Final = np.dtype(np.int16)
_SCALE: Final = np.dtype(np.float32)
_NOISE: Final = 1000  # code of a deviation: the norm of any vector stays within the limit of attention.h

log = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True)
class _FeedRecord(FeedRecord):
    slots: list[int]  # of each node of the draft


def cache_token_bytes(shape: ModelConfig) -> int:
    return token_bytes(shape, _CODE.itemsize, _SCALE.itemsize)


class NativeTarget(PagedTarget[_FeedRecord]):
    """A row's bits depend on its sequence alone: not on other rows, batches, chunks, threads or the cache."""

    invariant_rows = 2**31
    disk_tier = True
    timed_contexts: tuple[int, ...] = (256, 2048)

    def __init__(
        self, shape: ModelConfig, weights: PackedWeights, fingerprint: str, path: str, config: EngineConfig
    ) -> None:
        self.path = path
        self.shape = shape = shape.within(config.max_model_len)
        self.vocab_size, self.width = shape.vocab_size, shape.width
        self.layers, self.layer_share = shape.layers, layer_share(shape)
        self.fingerprint = fingerprint
        self.bytes_held = weights.nbytes
        self.threads = config.threads or limits.cores()
        blocks = blocks_in(config.cache_mb, shape, _CODE.itemsize, _SCALE.itemsize)
        spare = SPARE * config.max_batch
        self.pool = ThreadPool(path, self.threads)
        self._kv = NativeKVMemory(shape, blocks * BLOCK + spare * SUB_BLOCK, self.pool)
        super().__init__(PagedCache(self._kv, blocks, room=ROOM), shape.max_context)
        self._scratch = ScratchBlocks(blocks * BLOCK // SUB_BLOCK, spare)
        self._rope = _RopeTable(shape.rope, shape.head_dim)
        self._local_rope = _RopeTable(shape.local_rope, shape.head_dim) if shape.local_rope else self._rope
        self._lib = self.pool.lib
        self._embeddings = packed_embeddings(self._lib, shape, weights, fingerprint)
        layers, experts = _layers(shape, weights)
        self._held = (weights, layers, experts)  # referenced by C++
        model = _model(shape, weights, self._kv, layers)
        self._decoder = self._lib.paceline_open(ctypes.byref(model), self.pool.handle)
        if not self._decoder:
            raise ModelError("no memory for the native engine: give a smaller cache_mb")
        weakref.finalize(self, self._lib.paceline_close, self._decoder).atexit = False

    def describe(self) -> str:
        return f"native, {self.path}, {self.threads} threads"

    def add_disk_cache(self, folder: Path, limit: int, name: str) -> None:
        """Pages of the KV cache go to this folder and are found there. limit: bytes. name: of the model.

        Every path computes the same bits, so a page is named neither by it nor by the number of threads.
        """
        decides = [self.fingerprint, self._held[0].digest, library.source_digest(), self._kv.layout()]
        digest = sha256(json.dumps([*decides, sys.byteorder]).encode())
        for rope in (self._rope, self._local_rope):
            for table in rope.rows(range(ROPE_SAMPLE)):
                digest.update(table.tobytes())
        xxh64 = self._lib.paceline_xxh64
        page_format = PageFormat(digest.digest(), lambda page: xxh64(page.ctypes.data, len(page), 0))
        self._cache.disk = DiskCache(
            folder, page_format, limit, self._kv.page_bytes, BLOCK, name, self.fingerprint
        )

    def make_ready(self) -> None:
        """Has the system provide memory for the pages that are on the disk, in a thread of its own."""
        disk = self._cache.disk
        if disk is None or not disk.own_pages:
            return
        most = MAX_READY // self._kv.page_bytes(BLOCK)
        slots = min((disk.own_pages + BLOCKS_BEFORE) * BLOCK, most * BLOCK, self.capacity)
        threading.Thread(target=self._kv.make_ready, args=(slots,), daemon=True).start()

    def embeddings(self) -> PackedEmbeddings:
        return self._embeddings

    def final_norm(self, rows: Tensor) -> Tensor:
        return F.rms_norm(rows, (self.shape.width,), self._embeddings.norm, self.shape.norm_eps)

    def block_runner(self, head: StoredHead) -> NativeBlock | None:
        """On the target's own threads, for a block head of a supported shape."""
        if head.card.kind != "block":
            return None
        shape = cast(BlockConfig, head.card.shape)
        against = unsupported_reason(shape, self.shape)
        if against:
            log.warning("the block drafter runs on torch, which is slower here: %s", against)
            return None
        return NativeBlock(shape, head.draft_ids, head.weights, self._embeddings, self.pool)

    def forward(self, feeds: Sequence[Feed], taps: Sequence[int] = ()) -> Scores:
        for feed in feeds:  # before any row is written: a full cache leaves every sequence as it was
            depth = max(map(len, feed.draft.paths()), default=0)
            self._cache.extend(feed.seq_id, len(feed.tokens) + depth)
        self._scratch.reset()
        parts: list[tuple[NDArray[np.float32], NDArray[np.float32]]] = []
        starts, firsts = [0], [0]
        batch = NativeBatch()
        for feed in feeds:
            starts.append(starts[-1] + (1 + len(feed.draft)) * feed.scored)
            firsts.append(firsts[-1] + len(feed.tokens) + len(feed.draft))
            for piece, offset in _pieces(feed):
                if batch.tokens and len(batch.tokens) + len(piece.tokens) + len(piece.draft) > PASS_ROWS:
                    parts.append(self._run(batch, taps))
                    batch = NativeBatch()
                self._add(batch, piece, feed, offset)
        parts.append(self._run(batch, taps))
        logits = parts[0][0] if len(parts) == 1 else np.concatenate([part[0] for part in parts])
        hidden = parts[0][1] if len(parts) == 1 else np.concatenate([part[1] for part in parts], axis=1)
        tapped = dict(zip(sorted(set(taps)), torch.from_numpy(hidden).unbind(), strict=True))
        return Scores(torch.from_numpy(logits), tuple(starts[:-1]), tuple(firsts[:-1]), tapped)

    def skip_forward(self, feeds: Sequence[Feed], starts: Sequence[int], layers: Sequence[int]) -> Scores:
        self._reserve_skip_rows(feeds, starts)
        batch = NativeBatch()
        for feed, start in zip(feeds, starts, strict=True):
            batch.add(feed, start, self._cache.table(feed.seq_id), BLOCK, self._scratch)
        logits, _ = self._run(batch, (), layers)
        return Scores(torch.from_numpy(logits), tuple(range(len(feeds))))

    def _move_draft(self, seq_id: str, start: int, path: Sequence[int], fed: _FeedRecord) -> None:
        sources = [fed.slots[node] for node in path]
        targets = self._cache.slots(seq_id, start, start + len(path))
        if sources != targets:
            self._kv.move(sources, targets)

    def _fill_with_noise(self, slots: list[int]) -> None:
        self._kv.fill_with_noise(slots)

    def _release_memory(self) -> None:
        self._kv.release()

    def _add(self, batch: NativeBatch, piece: Feed, feed: Feed, offset: int) -> None:
        base = self._cache.length(feed.seq_id)
        table = self._cache.table(feed.seq_id)
        node = batch.add(piece, base + offset, table, BLOCK, self._scratch)
        slots = [batch.writes[node + i][0] for i in range(len(piece.draft))]
        self._feeds[feed.seq_id] = _FeedRecord(base, tuple(feed.tokens), feed.draft, slots)

    def _run(
        self, batch: NativeBatch, taps: Sequence[int], layers: Sequence[int] | None = None
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Logits [scored, vocab] and hidden states [taps, rows, width]. layers: None runs them all."""
        layers = range(self.layers) if layers is None else layers
        rows, scored, tapped = len(batch.tokens), len(batch.scored), sorted(set(taps))
        logits = np.empty((scored, self.vocab_size), np.float32)
        hidden = np.empty((len(tapped), rows, self.shape.width), np.float32)
        cosines, sines = self._rope.rows(batch.positions)
        local = self._local_rope.rows(batch.positions) if self.shape.local_rope else (cosines, sines)
        counts = np.fromiter(map(len, batch.writes), np.int32, rows)
        held = {
            "tokens": _ints(batch.tokens),
            "cosines": cosines,
            "sines": sines,
            "local_cosines": local[0],
            "local_sines": local[1],
            "span": _ints(batch.spans),
            "span_rows": _ints(batch.span_rows),
            "tables": _ints(batch.tables),
            "write_starts": _ints([0, *np.cumsum(counts)]),
            "writes": _ints([slot for slots in batch.writes for slot in slots]),
            "copy": _ints(batch.copies),
            "scored_rows": _ints(batch.scored),
            "tap_layers": _ints(tapped),
            "run_layers": _ints(layers),
            "logits": logits,
            "hidden": hidden,
        }
        run = library.Pass(
            rows=rows,
            spans=len(batch.spans),
            scored=scored,
            taps=len(tapped),
            copies=len(batch.copies),
            layers=len(layers),
            **{name: array.ctypes.data for name, array in held.items()},
        )
        self._check(batch, tapped, layers)
        with self.pool.busy():
            failed = self._lib.paceline_forward(self._decoder, ctypes.byref(run))
        if failed:
            raise ModelError(
                f"no memory for a pass of {rows} rows: give a smaller prefill_chunk or max_batch"
            )
        return logits, hidden

    def _check(self, batch: NativeBatch, taps: Sequence[int], layers: Sequence[int]) -> None:
        """Preconditions of the C++ side."""
        if not 0 <= min(batch.tokens) <= max(batch.tokens) < self.vocab_size:
            raise ValueError(f"a token is not one of the model's {self.vocab_size}")
        if taps and not 0 <= taps[0] <= taps[-1] < self.layers:
            raise ValueError(f"taps={taps!r}: the model has layers 0 to {self.layers - 1}")
        check_layers(layers, self.layers)


def _ints(values: Sequence[Any]) -> NDArray[np.int32]:
    return np.asarray(values, np.int32)


def _pieces(feed: Feed) -> list[tuple[Feed, int]]:
    """A feed of many tokens as several of which only the last is scored, with their offsets."""
    cuts = list(range(0, len(feed.tokens), PASS_ROWS))
    *inner, last = cuts
    pieces = [(Feed(feed.seq_id, feed.tokens[i : i + PASS_ROWS], NO_DRAFT, scored=False), i) for i in inner]
    return [*pieces, (Feed(feed.seq_id, feed.tokens[last:], feed.draft, feed.scored), last)]


class NativeKVMemory:
    """Keys and values as [layers, kv_heads, sub-blocks, numbers of a sub-block], as model.h describes them.

    A key or a value is head_dim 16-bit codes and one scale. Slot s is token s % 16 of sub-block s // 16.
    Memory is touched only as rows are written.
    """

    keys: NDArray[np.int16]
    values: NDArray[np.int16]

    def __init__(self, shape: ModelConfig, slots: int, pool: ThreadPool) -> None:
        self._pool = pool
        self.sub_blocks = slots // SUB_BLOCK
        self._key_layout = _sub_block(shape.head_dim // 2, SUB_BLOCK, 2)
        self._value_layout = _sub_block(SUB_BLOCK // 2, shape.head_dim, 2)
        size = (shape.layers, shape.kv_heads, self.sub_blocks, self._key_layout.itemsize // _CODE.itemsize)
        try:
            self._memory = [_memory(_CODE.itemsize * prod(size)) for _ in range(2)]
        except (MemoryError, OSError):
            raise UsageError("the KV cache does not fit into memory: give a smaller cache_mb") from None
        self.keys, self.values = (np.frombuffer(memory, _CODE).reshape(size) for memory in self._memory)

    def release(self) -> None:
        """All rows are zeros again, and take no memory until they are written."""
        for memory in self._memory:
            if hasattr(mmap, "MADV_DONTNEED"):
                memory.madvise(mmap.MADV_DONTNEED)

    def copy(self, source: int, target: int, count: int) -> None:
        """Both multiples of 16; whole sub-blocks are copied."""
        subs = -(-count // SUB_BLOCK)
        a, b = source // SUB_BLOCK, target // SUB_BLOCK
        for cache in (self.keys, self.values):
            cache[:, :, b : b + subs] = cache[:, :, a : a + subs]

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Single slots; every source is read before any target is written."""
        (a, i), (b, j) = np.divmod(sources, SUB_BLOCK), np.divmod(targets, SUB_BLOCK)
        keys, values = self._fields(self.keys, self.values)
        keys["codes"][:, :, b, :, j] = keys["codes"][:, :, a, :, i]
        values["codes"][:, :, b, j // 2, :, j % 2] = values["codes"][:, :, a, i // 2, :, i % 2]
        for part in (keys, values):
            part["scales"][:, :, b, j] = part["scales"][:, :, a, i]

    def make_ready(self, slots: int) -> None:
        """Has the system provide the memory of the first slots now; rows that are there stay as they are."""
        for memory, array in zip(self._memory, (self.keys, self.values), strict=True):
            each = array.strides[1]  # bytes of one layer's head
            used = slots * each // (self.sub_blocks * SUB_BLOCK)
            for start in range(0, array.nbytes, each):
                page = start // mmap.PAGESIZE * mmap.PAGESIZE
                with suppress(OSError, ValueError):  # not every system can
                    memory.madvise(_POPULATE_WRITE, page, start + used - page)

    def page_bytes(self, rows: int) -> int:
        return sum(array.nbytes for array in self._views(0, rows))

    def save(self, slot: int, rows: int, page: Bytes) -> None:
        """Whole sub-blocks, in which zeros follow the rows."""
        views = self._views(slot, rows)
        parts = _parts(page, views)
        for part, view in zip(parts, views, strict=True):
            part[:] = view
        unused = np.arange(SUB_BLOCK - -rows % SUB_BLOCK, SUB_BLOCK)
        keys, values = (part[:, :, -1] for part in self._fields(*parts))
        keys["codes"][:, :, :, unused] = 0
        values["codes"][:, :, unused // 2, :, unused % 2] = 0
        for part in (keys, values):
            part["scales"][:, :, unused] = 0

    def load(self, slots: Sequence[int], pages: Sequence[PageFile]) -> list[PageStatus]:
        """By all threads of the pass: each reads a page to its place and checks it (csrc/page_file.cpp)."""
        reads = (library.Page * len(pages))()
        for read, slot, page in zip(reads, slots, pages, strict=True):
            read.path, read.header = os.fsencode(page.path), page.header
            read.header_bytes, read.checksum_at = len(page.header), CHECKSUM
            for part, array in zip(read.parts, (self.keys, self.values), strict=True):
                layers, heads, _, _ = array.shape
                sub, count = slot // SUB_BLOCK, -(-page.rows // SUB_BLOCK)
                part.at = array.ctypes.data + sub * array.strides[2]
                part.count, part.stride, part.bytes = (
                    layers * heads,
                    array.strides[1],
                    count * array.strides[2],
                )
        with self._pool.busy():
            self._pool.lib.paceline_read_pages(self._pool.handle, reads, len(pages))
        return [PageStatus(read.status) for read in reads]

    def _views(self, slot: int, rows: int) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
        """The sub-blocks that hold these rows. slot: a multiple of 16."""
        sub, count = slot // SUB_BLOCK, -(-rows // SUB_BLOCK)
        return self.keys[:, :, sub : sub + count], self.values[:, :, sub : sub + count]

    def layout(self) -> list[object]:
        """Decides what the bytes of a page mean, besides the engine's own source."""
        shapes = [(array.shape[:2], array.shape[3:], array.dtype.str) for array in (self.keys, self.values)]
        return [BLOCK, SUB_BLOCK, shapes]

    def fill_with_noise(self, slots: list[int]) -> None:
        """Fills slots, the first a multiple of 16, and what else is in their sub-blocks, with small noise."""
        size = self._key_layout["codes"].shape[0] * 2
        random = np.random.default_rng(0).standard_normal(SUB_BLOCK * size)
        noise = np.clip(random * _NOISE, -3 * _NOISE, 3 * _NOISE).astype(np.int16)
        for sub in sorted({slot // SUB_BLOCK for slot in slots}):
            for part in self._fields(self.keys, self.values):
                part["codes"][:, :, sub] = noise.reshape(part["codes"].shape[3:])
                part["scales"][:, :, sub] = 1 / _NOISE

    def _fields(
        self, keys: NDArray[np.int16], values: NDArray[np.int16]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """The same memory with the fields codes and scales, [layers, kv_heads, sub-blocks]."""
        return keys.view(self._key_layout)[..., 0], values.view(self._value_layout)[..., 0]


def _sub_block(*codes: int) -> np.dtype[Any]:
    return np.dtype([("codes", _CODE, codes), ("scales", _SCALE, (SUB_BLOCK,))])


def _parts(page: Bytes, views: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """A page as arrays of the views' types and shapes."""
    ends = np.cumsum([view.nbytes for view in views])
    pieces = np.split(page, ends[:-1])
    return [piece.view(view.dtype).reshape(view.shape) for piece, view in zip(pieces, views, strict=True)]


def _memory(nbytes: int) -> mmap.mmap:
    """Zeros in small pages: a sequence's rows lie in every layer, and would fill a huge page in each."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


class _RopeTable:
    """Cosines and sines by position; grows with the highest position used."""

    def __init__(self, rope: Rope, head_dim: int) -> None:
        self._frequencies = frequencies(rope, head_dim).numpy()
        scaled = amplitudes(rope, head_dim)
        self._amplitudes = None if scaled is None else scaled.numpy()
        self._cos = self._sin = np.empty((0, len(self._frequencies)), np.float32)

    def rows(self, positions: Sequence[int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        if (need := max(positions) + 1) > len(self._cos):
            stop = -(-need // 1024) * 1024
            angles = np.arange(stop, dtype=np.float32)[:, None] * self._frequencies
            self._cos = np.cos(angles.astype(np.float64)).astype(np.float32)
            self._sin = np.sin(angles.astype(np.float64)).astype(np.float32)
            if self._amplitudes is not None:
                self._cos, self._sin = self._cos * self._amplitudes, self._sin * self._amplitudes
        return self._cos[positions], self._sin[positions]


def _layers(shape: ModelConfig, weights: PackedWeights) -> tuple["ctypes.Array[library.Layer]", list[Any]]:
    """The layers, and the arrays of experts and their biases that they point at."""
    layers = (library.Layer * shape.layers)()
    stacks: list[Any] = []
    for i in range(shape.layers):
        absent = library.EXPERT_LINEARS if shape.sparse(i) else ()
        for name in library.LINEARS:
            if name not in absent:
                setattr(layers[i], name, weights.matrix(f"layers.{i}.{name}"))
        for name in library.VECTORS:
            setattr(layers[i], name, weights.vector(f"layers.{i}.{name}"))
        layers[i].local = shape.local(i)
        if shape.experts is not None and shape.sparse(i):
            stack = (library.Linear * (3 * shape.experts.count))(
                *(
                    weights.matrix(f"layers.{i}.experts.{expert}.{part}")
                    for expert in range(shape.experts.count)
                    for part in library.EXPERT_LINEARS
                )
            )
            layers[i].experts = ctypes.addressof(stack)
            stacks.append(stack)
            biases = [
                weights.vector(f"layers.{i}.experts.{expert}.{part}_bias")
                for expert in range(shape.experts.count)
                for part in library.EXPERT_LINEARS
            ]
            if None not in biases:
                addresses = (ctypes.c_void_p * len(biases))(*biases)
                layers[i].expert_biases = ctypes.addressof(addresses)
                stacks.append(addresses)
    return layers, stacks


def _model(shape: ModelConfig, weights: PackedWeights, rows: NativeKVMemory, layers: Any) -> library.Model:
    embed = weights.matrix("embed")
    return library.Model(
        layers=shape.layers,
        width=shape.width,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ff_width=shape.ff_width,
        vocab=shape.vocab_size,
        window=shape.window if any(shape.local_layers) else 0,
        experts=shape.experts.count if shape.experts else 0,
        experts_used=shape.experts.used if shape.experts else 0,
        renormalise=shape.experts is not None and shape.experts.renormalise,
        activation=library.ACTIVATIONS.index(shape.activation),
        norm_eps=shape.norm_eps,
        attn_scale=shape.attn_scale or shape.head_dim**-0.5,
        embed_scale=shape.embed_scale,
        attn_softcap=shape.attn_softcap,
        logit_softcap=shape.logit_softcap,
        gate_limit=shape.gate_limit,
        gate_slope=shape.gate_slope,
        layer=ctypes.addressof(layers),
        embed=embed,
        head=weights.matrix("head") if "head" in weights.layout.matrices else embed,
        norm=weights.vector("norm"),
        keys=rows.keys.ctypes.data,
        values=rows.values.ctypes.data,
        sub_blocks=rows.sub_blocks,
    )
