"""The kernels of a pass over static buffers, captured once for each row bucket.

Captured graphs hold addresses, and everything that differs between passes is data in static buffers
(PassInput, page tables): a graph is never captured again as contexts grow.
"""

import ctypes as c
import math
import os
from collections.abc import Callable, Hashable, Sequence, Set
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import chain
from struct import Struct
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline.errors import ModelError
from paceline.sampling.distribution import lowest
from paceline.target.cuda import arguments as args
from paceline.target.cuda.arguments import (
    BINS,
    IN_PROMPT,
    KEY_CHUNK,
    MAX_CANDIDATES,
    MAX_DEPTH,
    MAX_ROWS,
    MAX_SEQUENCES,
    PAGE,
    SPLITS,
    THREADS,
    WARPS,
)
from paceline.target.cuda.batch import PassRows, SequenceRows, pass_groups
from paceline.target.cuda.driver import Launcher
from paceline.target.cuda.packing import FORMATS, UNIT_INPUTS, PackedFormat
from paceline.target.cuda.weights import CudaWeights, LayerWeights, Matrix
from paceline.target.eager.rope import amplitudes, frequencies
from paceline.target.kv.cache import TorchKVMemory
from paceline.target.weights.model_config import ModelConfig
from paceline.types import Bits, Sampler

BUCKETS: Final = (8, 16, 32, 64)  # rows
TABLES: Final = 256  # sequences whose page tables are on the device
LINEAR_TILES: Final = 2  # tiles of 16 features in a block, as in kernels.cu
LINEAR_KB: Final = 110
WIDE_TILES: Final = 4  # for 64 rows, or 32 with weights of 8 bits
WIDE_KB: Final = 200
MIN_PARTS: Final = 8192  # partial results of attention, all rows of a pass together
FULL_CONTEXT_ROWS: Final = 8  # rows whose partial results fit whatever the context
COMBINE_WARPS: Final = 4

_LOOKS: Final = 2**23  # at what the GPU writes, before it is asked what is wrong: a second or so


def product_tiling(
    name: str, rows: int, shape: ModelConfig, multiprocessors: int, int8: bool
) -> tuple[int, int]:
    """Tiles of a block of a product for a bucket of rows, and its KB of shared memory, as in kernels.cu."""
    if name == "residual":
        return residual_tiling(rows, shape, multiprocessors)
    wide = rows > 32 or (rows == 32 and int8)
    return WIDE_TILES if wide else LINEAR_TILES, WIDE_KB if rows >= 32 else LINEAR_KB


def residual_tiling(rows: int, shape: ModelConfig, multiprocessors: int) -> tuple[int, int]:
    """The same for products that add to the residual stream, which have few features.

    For few rows narrow models get one tile, so that more blocks share the work. Where there is still less
    than one block to a multiprocessor and the inputs are long, each has more on its way. For many rows a
    block has as many tiles as leave one for nearly every multiprocessor. Where that leaves a few blocks
    for a second turn, stages are short, so that two blocks share a multiprocessor and all run at once.
    """
    width = shape.width
    if rows <= 16:
        tiles = 1 if width <= 4096 or width % 32 else 2
        few = width // 16 // tiles <= multiprocessors
        return tiles, WIDE_KB if few and shape.ff_width >= 4096 else LINEAR_KB
    min_blocks, widest = max(64, 0.9 * multiprocessors), (4, 2) if rows == 64 else (2,)
    fitting = (n for n in widest if width >= 16 * n * min_blocks and width % (16 * n) == 0)
    tiles = next(fitting, 1)
    few_left = multiprocessors < width // 16 // tiles < 1.75 * multiprocessors
    return tiles, LINEAR_KB if rows == 32 and few_left else WIDE_KB


def packed_tiling(name: str, rows: int, shape: ModelConfig, multiprocessors: int) -> tuple[int, int]:
    """The same for packed weights: rows of x take more bytes than the weights of one tile.

    So a block has as many tiles as leave one block for nearly every multiprocessor.
    """
    if name == "residual":
        min_features = 16 * 0.9 * multiprocessors
        fitting = (n for n in (4, 2) if shape.width >= n * min_features and shape.width % (16 * n) == 0)
        tiles = next(fitting, 1)
        few_blocks = shape.width // 16 // tiles <= multiprocessors
        return tiles, WIDE_KB if few_blocks or rows > 16 else LINEAR_KB
    if rows > 16:
        return WIDE_TILES, WIDE_KB
    features = {
        "qkv": (shape.heads + 2 * shape.kv_heads) * shape.head_dim,
        "gated": 2 * shape.ff_width,
        "store": shape.vocab_size,
    }[name]
    narrow = name != "store" and features < 16 * WIDE_TILES * multiprocessors
    return LINEAR_TILES if narrow else WIDE_TILES, LINEAR_KB


Products = Set[tuple[str, str]]  # names of kernels and types of weights
DENSE: Final[Products] = frozenset((name, "bf16") for name in ("qkv", "gated", "residual", "store"))


def defines(
    shape: ModelConfig, multiprocessors: int, products: Products = DENSE, groups: int = 1
) -> list[str]:
    """What the kernels are built with for a model. groups: of rows in a pass, at most."""
    few, some, many = (residual_tiling(rows, shape, multiprocessors) for rows in (16, 32, 64))
    values: dict[str, object] = {"RESIDUAL_TILES": few[0], "RESIDUAL_KB": few[1]}
    values |= {"RESIDUAL_TILES_32": some[0], "RESIDUAL_KB_32": some[1], "RESIDUAL_TILES_64": many[0]}
    if packed := sorted((name, kind) for name, kind in products if kind in FORMATS):
        for name in ("qkv", "gated", "residual"):
            tiles, kb = packed_tiling(name, 16, shape, multiprocessors)
            values[f"PACKED_{name.upper()}_TILES"] = tiles
        values["PACKED_RESIDUAL_KB"] = kb
        values["PRODUCTS"] = " ".join(f"PRODUCT({name},{kind})" for name, kind in packed)
    types = {kind for _, kind in products}
    return [
        *(f"-D{name}={value}" for name, value in values.items()),
        *(["-DWITH_INT8"] if "int8" in types else []),
        *(["-DWITH_GROUPS"] if groups > 1 else []),
        *([] if "bf16" in types else ["-DWITHOUT_BF16"]),
    ]


class PageTables:
    """The pages of sequences on the device: [TABLES, max_pages]. Only what changed is uploaded."""

    def __init__(self, max_context: int, device: torch.device) -> None:
        self.max_pages = -(-max_context // PAGE) + 1
        self.device_tables = torch.zeros(TABLES, self.max_pages, dtype=torch.int32, device=device)
        self._held: dict[str, tuple[int, list[int]]] = {}  # sequence -> row, pages
        self._free = list(range(TABLES))

    def row(self, seq_id: str, pages: list[int]) -> int:
        """Where the sequence's pages are. The least recently asked for gives way."""
        row, held = self._held.pop(seq_id, (-1, []))
        if row < 0:
            row = self._free.pop() if self._free else self._held.pop(next(iter(self._held)))[0]
        if held != pages:
            same = next(
                (i for i, (a, b) in enumerate(zip(held, pages, strict=False)) if a != b),
                min(len(held), len(pages)),
            )
            if new := pages[same:]:
                self.device_tables[row, same : len(pages)] = torch.tensor(new, dtype=torch.int32)
        self._held[seq_id] = (row, pages)
        return row

    def drop(self, seq_id: str) -> None:
        if seq_id in self._held:
            self._free.append(self._held.pop(seq_id)[0])


@dataclass(slots=True)
class _History:
    row: int
    tokens: int  # of its text that are counted


class Histories:
    """Bias and token counts of sequences on the device, for their penalties.

    bias: [histories, stride] float32. counts: how often the output holds a token, and IN_PROMPT.
    """

    def __init__(self, count: int, stride: int, launcher: Launcher) -> None:
        self._stride, self._launcher = stride, launcher
        self._held: dict[str, _History] = {}
        self._free = list(range(count))
        self.bias = torch.zeros(count, stride, device=launcher.device)
        self.counts = torch.zeros(count, stride, dtype=torch.int32, device=launcher.device)

    def row(self, seq_id: str, sampler: Sampler) -> int:
        """Where the sequence's bias and counts are, brought up to date; -1: it needs none."""
        if not sampler.bias and not sampler.penalises:
            return -1
        held = self._held.pop(seq_id, None) or self._begin(sampler)
        self._held[seq_id] = held  # the least recently asked for gives way
        if sampler.penalises:
            self._count_new(held, sampler.text)
        return held.row

    def drop(self, seq_id: str) -> None:
        if seq_id in self._held:
            self._free.append(self._held.pop(seq_id).row)

    def _begin(self, sampler: Sampler) -> _History:
        row = self._free.pop() if self._free else self._held.pop(next(iter(self._held))).row
        bias = torch.zeros(self._stride)
        for token, gain in sampler.bias:
            bias[token] = gain
        self.bias[row] = bias
        if sampler.penalises:
            output = torch.tensor(sampler.text[sampler.prompt_len :], dtype=torch.int64)
            spoken = torch.bincount(output, minlength=self._stride)
            counts = spoken.to(torch.int32)
            counts[list(set(sampler.text[: sampler.prompt_len]))] += IN_PROMPT
            self.counts[row] = counts
        return _History(row, len(sampler.text))

    def _count_new(self, held: _History, text: Sequence[int]) -> None:
        for first in range(held.tokens, len(text), MAX_DEPTH):
            new = text[first : first + MAX_DEPTH]
            argument = args.CountTokens(self.counts[held.row].data_ptr(), len(new))
            argument.token[: len(new)] = new
            self._launcher.launch("spoken", 1, THREADS, 0, argument)
        held.tokens = len(text)


def mask_words(vocab: int) -> int:
    """Of a row, a multiple of 4."""
    return -(-vocab // 128) * 4


class HostMasks:
    """Masks of the rows of a pass in pinned memory, where the device fetches them."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._words = -(-vocab // 32)
        self.stride = mask_words(vocab)
        pinned, flags = device.type == "cuda", 4 * MAX_ROWS
        self.memory = torch.zeros(flags + MAX_ROWS * self.stride, dtype=torch.int32, pin_memory=pinned)
        words = self.memory.numpy().view(np.uint32)
        self._flags, self._rows = words[:flags:4], words[flags:].reshape(MAX_ROWS, self.stride)

    def clear(self) -> None:
        self._flags[:] = 0

    def set(self, row: int, mask: Bits) -> None:
        self._flags[row] = 1
        self._rows[row, : self._words] = mask


class Buffers:
    """Every buffer that a pass touches besides weights and cache. Those in BY_GROUP: [groups, ...]."""

    BY_GROUP: Final = (
        *("residual", "x_attn", "x_ffn", "queries", "attended", "gated", "square_sums", "qkv", "logits"),
        *("processed", "arrived", "top", "score", "token", "cut_counts", "cut_weights", "cut_candidates"),
        *("cut_found", "input", "host_input", "host_taken", "host_chosen", "masks", "masked"),
    )

    def __init__(
        self,
        weights: CudaWeights,
        max_context: int,
        device: torch.device,
        groups: int = 1,
        throughput: bool = False,
    ) -> None:
        shape = weights.shape
        self.groups = groups

        def new(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        attended = shape.heads * shape.head_dim
        self.residual = new(groups, MAX_ROWS, shape.width)
        self.x_attn = new(groups, MAX_ROWS, shape.width, dtype=torch.bfloat16)
        self.x_ffn = new(groups, MAX_ROWS, shape.width, dtype=torch.bfloat16)
        self.queries = new(groups, MAX_ROWS, attended, dtype=torch.bfloat16)
        self.attended = new(groups, MAX_ROWS, attended, dtype=torch.bfloat16)
        self.gated = new(groups, MAX_ROWS, shape.ff_width, dtype=torch.bfloat16)
        self.square_sums = new(groups, 2 * shape.layers + 1, MAX_ROWS, dtype=torch.int64)
        self.logits = new(groups, MAX_ROWS, weights.padded_vocab)
        self.processed = new(groups, MAX_ROWS, weights.padded_vocab)  # logits after bias and penalties
        first = weights.layers[0]
        self.qkv = None if first.q_norm is None else new(groups, MAX_ROWS, _features(first.qkv))
        chunks = -(-max_context // KEY_CHUNK) + 1
        self.max_parts = max(MIN_PARTS, FULL_CONTEXT_ROWS * chunks)
        self.partial = new(shape.heads, self.max_parts, shape.head_dim)
        self.part_weight = new(shape.heads, self.max_parts, 2)
        self.arrived = new(groups, 1, dtype=torch.int32)  # blocks of `choose`
        self.top = new(groups, MAX_ROWS, SPLITS, dtype=torch.int64)
        self.score = new(groups, MAX_ROWS, SPLITS, dtype=torch.int64)
        self.token = new(groups, MAX_ROWS, SPLITS, dtype=torch.int32)
        self.cut_counts = new(groups, MAX_ROWS, BINS, dtype=torch.int32)
        self.cut_weights = new(groups, MAX_ROWS, BINS, dtype=torch.int64)
        self.cut_candidates = new(groups, MAX_ROWS, MAX_CANDIDATES, dtype=torch.int64)
        self.cut_found = new(groups, MAX_ROWS, dtype=torch.int32)
        self.input = new(groups, c.sizeof(args.PassInput) // 4, dtype=torch.int32)
        self.cos, self.sin = _rope_tables(shape, max_context, device)
        pinned = device.type == "cuda"
        self.host_input = torch.zeros(
            groups, c.sizeof(args.PassInput) // 4, dtype=torch.int32, pin_memory=pinned
        )
        self.host_taken = torch.zeros(groups, 1, dtype=torch.int32, pin_memory=pinned)
        self.host_chosen = torch.zeros(groups, 1 + MAX_ROWS, dtype=torch.int32, pin_memory=pinned)
        self.masks = new(groups, MAX_ROWS, mask_words(shape.vocab_size), dtype=torch.int32)
        self.masked = new(groups, MAX_ROWS, dtype=torch.int32)
        self.sums: Tensor | None = None  # [rows * features] of torch's products, one after another
        if throughput and groups > 1 and weights.kind == "bf16":
            widest = max(matrix.features for name, matrix in weights.products() if name != "store")
            self.sums = new(groups * MAX_ROWS * widest, dtype=torch.bfloat16)
        self._taps: dict[tuple[int, ...], Tensor] = {}

    def taps(self, layers: tuple[int, ...]) -> Tensor:
        """[layers, groups * MAX_ROWS, width]: where the outputs of these layers are copied to."""
        if layers not in self._taps:
            rows, width = self.groups * MAX_ROWS, self.residual.shape[-1]
            self._taps[layers] = self.residual.new_zeros(len(layers), rows, width)
        return self._taps[layers]

    def group(self, which: int) -> "Buffers":
        """Those of one group of rows."""
        own = copy(self)
        for name in self.BY_GROUP:
            if (value := getattr(self, name)) is not None:
                setattr(own, name, value[which])
        return own


def _rope_tables(shape: ModelConfig, max_context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [position, head_dim / 2]: the same numbers as the eager decoder's."""
    steps = frequencies(shape.rope, shape.head_dim).to(device)
    angles = torch.arange(max_context, dtype=torch.float32, device=device)[:, None] * steps
    cos, sin = angles.double().cos().float(), angles.double().sin().float()
    scaled = amplitudes(shape.rope, shape.head_dim)
    return (cos, sin) if scaled is None else (cos * scaled.to(device), sin * scaled.to(device))


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel."""

    name: str
    grid: int
    threads: int
    shared_bytes: int
    argument: c.Structure

    def run(self, launcher: Launcher) -> None:
        launcher.launch(self.name, self.grid, self.threads, self.shared_bytes, self.argument)


@dataclass(frozen=True, slots=True)
class TorchProduct:
    """A product by torch, whose sums depend on the number of rows."""

    x: Tensor  # [rows, inputs] bf16
    weight: Tensor  # [features, inputs] bf16
    sums: Tensor  # [rows, features] bf16

    def run(self, launcher: Launcher) -> None:
        torch.mm(self.x, self.weight.t(), out=self.sums)


Launches = Sequence[Launch | TorchProduct]
K = TypeVar("K", bound=Hashable)


class GraphSet(Generic[K]):
    """Lists of kernels by kind: launched one by one at first, then as a graph where the launcher has them."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._launches: dict[K, Launches] = {}
        self._graphs: dict[K, Callable[[], None]] = {}

    def run(self, kind: K, kernels_of: Callable[[K], Launches]) -> None:
        replay = self._graphs.get(kind)
        if replay is not None:
            replay()
            return
        if kind not in self._launches:
            self._launches[kind] = kernels_of(kind)
        launches = self._launches[kind]
        self._launch_all(launches)
        if any(isinstance(one, TorchProduct) for one in launches):
            return  # torch's libraries take memory as they go, which a graph must not
        with suppress(torch.OutOfMemoryError):  # without memory for the graph the kernels alone run too
            replay = self._launcher.capture(lambda: self._launch_all(launches))
        if replay is not None:
            self._graphs[kind] = replay

    def _launch_all(self, launches: Launches) -> None:
        for one in launches:
            one.run(self._launcher)


def wait_for(word: "memoryview[int]", number: int) -> None:
    """Until the GPU has written this number there. Other threads may run meanwhile."""
    looks = 0
    while word[0] != number:
        looks += 1
        if looks % 32 == 0:
            os.sched_yield()
        if looks % _LOOKS == 0:
            torch.cuda.synchronize()  # tells what went wrong, if something did
            if word[0] != number:
                raise ModelError("the GPU ended a pass without an answer")


class ChooseKind(NamedTuple):
    """What the kernels that choose tokens have to look at, of any row."""

    bucket: int  # rows
    cut: bool = False  # top-k, top-p or min-p
    history: bool = False  # bias or penalties
    masked: bool = False
    group: int = 0  # of the pass, where they run by themselves


class PassKind(NamedTuple):
    """What a graph is captured for."""

    bucket: int  # rows
    layers: tuple[int, ...] = ()  # to run, ascending; (): all
    taps: tuple[int, ...] = ()  # layers whose output is wanted
    scored: bool = True  # whether logits are wanted
    choose: ChooseKind | None = None  # whether tokens are, chosen in the same graph
    groups: int = 1  # of so many rows


class RowGroup:
    """A group of rows of passes: its buffers, and what host and device tell one another of it."""

    def __init__(self, buffers: Buffers, vocab: int, device: torch.device) -> None:
        self.buffers, self.masks = buffers, HostMasks(vocab, device)
        self.number = 0  # of its last pass
        self.taken = words_of(buffers.host_taken)
        self.chosen_words = words_of(buffers.host_chosen)
        self._input = _InputWriter(buffers.host_input)

    def fill(
        self, rows: PassRows, tables: Sequence[int], histories: Sequence[int], bucket: int, number: int
    ) -> None:
        wait_for(self.taken, self.number)  # from then on the input may be overwritten
        self.number = number
        self._input.fill(rows, tables, histories, number, bucket)

    def chosen(self, rows: int) -> list[int]:
        """The tokens of the first rows, once the last pass has chosen them."""
        wait_for(self.chosen_words, self.number)
        return self.chosen_words[1 : 1 + rows].tolist()


class PassRunner:
    """Runs passes: fills the input, then launches the kernels or replays their graph."""

    def __init__(
        self,
        launcher: Launcher,
        weights: CudaWeights,
        rows: TorchKVMemory,
        max_context: int,
        max_batch: int = 16,
        throughput: bool = False,
    ) -> None:
        """throughput: torch multiplies in passes of several groups."""
        self._launcher, self._weights, self._rows = launcher, weights, rows
        self.buffers = Buffers(weights, max_context, launcher.device, pass_groups(max_batch), throughput)
        vocab, device = weights.shape.vocab_size, launcher.device
        self.groups = [RowGroup(self.buffers.group(i), vocab, device) for i in range(self.buffers.groups)]
        self.tables = PageTables(max_context, launcher.device)
        self.histories = Histories(max(max_batch, MAX_SEQUENCES), weights.padded_vocab, launcher)
        self._number = 0
        self._graphs = GraphSet[PassKind | ChooseKind](launcher)
        self._last: PassKind | None = None

    def run(self, groups: Sequence[PassRows], pages: Callable[[str], list[int]], kind: PassKind) -> None:
        """Results are in the buffers of the groups, in the order of the current stream."""
        self._number = self._number % 2**30 + 1
        for rows, group in zip(groups, self.groups, strict=False):
            tables, histories = [], []
            for s in rows.sequences:
                tables.append(self.tables.row(s.seq_id, pages(s.seq_id)))
                histories.append(-1 if s.sampler is None else self.histories.row(s.seq_id, s.sampler))
            group.fill(rows, tables, histories, kind.bucket, self._number)
        self._last = kind
        self._replay(kind)

    def choose(
        self, rows: PassRows, masks: Sequence[Sequence[Bits | Exception | None]], kind: ChooseKind
    ) -> None:
        """Chooses the tokens of a group of the pass just launched, whose masks were not known before."""
        host = self.groups[kind.group].masks
        host.clear()
        for s, of_sequence in zip(rows.sequences, masks, strict=True):
            for row, mask in enumerate(of_sequence[: s.first_row + s.row_count - s.scored_row], s.scored_row):
                if isinstance(mask, np.ndarray):  # where a mask is not known, nobody reads the token
                    host.set(row, mask)
        self._replay(kind)

    def _replay(self, kind: PassKind | ChooseKind) -> None:
        self._graphs.run(kind, self._kernels)

    def _kernels(self, kind: PassKind | ChooseKind) -> Launches:
        return PassKernels(self, kind).launches

    def replay_last(self) -> None:
        """Runs the pass before once more, to time it."""
        assert self._last is not None
        self._graphs.run(self._last, self._kernels)

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copies rows of every layer from slot to slot."""
        keys, values = self._rows.k, self._rows.v
        heads, head_dim = keys.shape[0] * keys.shape[1], keys.shape[3]
        for i in range(0, len(source), MAX_DEPTH):
            part = slice(i, i + MAX_DEPTH)
            argument = args.MoveRows(
                keys.data_ptr(), values.data_ptr(), keys.stride(1), head_dim, len(source[part])
            )
            argument.source[: len(source[part])] = source[part]
            argument.target[: len(target[part])] = target[part]
            self._launcher.launch("move", heads, THREADS, MAX_DEPTH * head_dim * 2, argument)


class PassKernels:
    """The launches of one kind of pass, in order."""

    def __init__(self, runner: PassRunner, kind: PassKind | ChooseKind) -> None:
        self._weights = runner._weights
        first = kind.group if isinstance(kind, ChooseKind) else 0
        count = 1 if isinstance(kind, ChooseKind) else kind.groups
        self._row_groups = runner.groups[first : first + count]
        self._groups = [group.buffers for group in self._row_groups]
        self._buffers = self._groups[0]  # those of the others follow
        self._rows, self._tables, self._histories = runner._rows, runner.tables, runner.histories
        self._shape = self._weights.shape
        self._multiprocessors = runner._launcher.multiprocessors
        self._row_tiles = kind.bucket // 8
        self.launches: list[Launch | TorchProduct] = []
        if isinstance(kind, ChooseKind):
            self._choose(kind)
            return
        self._kind = kind
        self._layers = kind.layers or tuple(range(self._shape.layers))
        self._begin()
        for place, layer in enumerate(self._layers):
            self._layer(place, layer)
        if kind.scored:
            self._head()
        if kind.choose is not None:
            self._choose(kind.choose)

    def _begin(self) -> None:
        for b in self._groups:
            take = args.TakeInput(
                host=address(b.host_input), input=address(b.input), host_taken=address(b.host_taken)
            )
            self._add("take", 1, THREADS, 16, take)
        for b in self._groups:
            embed = args.Embed(
                input=address(b.input),
                embeddings=address(self._weights.embed),
                norm=address(self._norm_before(0)),
                residual=address(b.residual),
                square_sums=address(b.square_sums),
                out=address(b.x_attn),
                width=self._shape.width,
                norms=len(b.square_sums),
            )
            self._add("embed", self._kind.bucket, THREADS, 4 * WARPS, embed)

    def _norm_before(self, place: int) -> Tensor:
        """The attention norm of the layer at this place, or the last norm after all of them."""
        if place < len(self._layers):
            return self._weights.layers[self._layers[place]].attn_norm
        return self._weights.norm

    def _layer(self, place: int, layer: int) -> None:
        b, shape, weights = self._buffers, self._shape, self._weights.layers[layer]
        before, between, after = (b.square_sums[2 * place + i] for i in range(3))
        cache = self._cache(layer)
        if weights.q_norm is None:
            for part in weights.qkv:
                self._qkv(part, before, cache, first=place == 0)
        else:
            self._qkv_with_norms(weights, before, cache, first=place == 0)
        self._attention(cache, window=shape.window if shape.local_layers and shape.local_layers[layer] else 0)
        taps = self._kind.taps
        tap = b.taps(taps)[taps.index(layer)] if layer in taps else None
        self._residual(weights.o, b.attended, weights.ffn_norm, between, b.x_ffn)
        gated = self._linear(weights.gate_up, b.x_ffn, between, out=address(b.gated), columns=shape.ff_width)
        self._product("gated", gated, weights.gate_up, b.x_ffn)
        self._residual(weights.down, b.gated, self._norm_before(place + 1), after, b.x_attn, tap)

    def _qkv(self, part: Matrix, squares: Tensor, cache: args.KvCache, first: bool) -> None:
        b, shape = self._buffers, self._shape
        argument = self._linear(
            part,
            b.x_attn,
            squares,
            queries=address(b.queries),
            cache=cache,
            cos=address(b.cos),
            sin=address(b.sin),
            head_dim=shape.head_dim,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            query_scale=_query_scale(shape),
            starts_next_late=first,
        )
        self._product("qkv", argument, part, b.x_attn)

    def _qkv_with_norms(
        self, weights: LayerWeights, squares: Tensor, cache: args.KvCache, first: bool
    ) -> None:
        b, shape = self._buffers, self._shape
        for part in weights.qkv:
            product = self._linear(
                part,
                b.x_attn,
                squares,
                out_f32=address(b.qkv),
                columns=_features(weights.qkv),
                starts_next_late=first,
            )
            self._product("store", product, part, b.x_attn)
        heads = self._kind.bucket * (shape.heads + 2 * shape.kv_heads)
        for b in self._groups:
            argument = args.HeadNorm(
                qkv=address(b.qkv),
                query_norm=address(weights.q_norm),
                key_norm=address(weights.k_norm),
                cos=address(b.cos),
                sin=address(b.sin),
                input=address(b.input),
                queries=address(b.queries),
                cache=cache,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                norm_eps=shape.norm_eps,
                query_scale=_query_scale(shape),
            )
            self._add(f"head_norm_{shape.head_dim}", heads // 4, 128, 0, argument)

    def _attention(self, cache: args.KvCache, window: int) -> None:
        for group in self._groups:  # partial results are in the same memory, one group after another
            self._attention_of(group, cache, window)

    def _attention_of(self, b: Buffers, cache: args.KvCache, window: int) -> None:
        shape, d = self._shape, self._shape.head_dim
        argument = args.Attention(
            queries=address(b.queries),
            cache=cache,
            tables=address(self._tables.device_tables),
            input=address(b.input),
            partial=address(b.partial),
            weight=address(b.part_weight),
            out=address(b.attended),
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            max_pages=self._tables.max_pages,
            max_parts=b.max_parts,
            window=window,
        )
        grid = self._multiprocessors * (128 // d)
        self._add(f"attend_{d}", grid, THREADS, attention_shared_bytes(d), argument)
        shared = COMBINE_WARPS * (d + 1) * 4
        self._add(f"combine_{d}", self._kind.bucket * shape.heads, 32 * COMBINE_WARPS, shared, argument)

    def _residual(
        self, matrix: Matrix, x: Tensor, norm: Tensor, squares: Tensor, out: Tensor, tap: Tensor | None = None
    ) -> None:
        b = self._buffers
        argument = self._linear(
            matrix,
            x,
            None,
            residual=address(b.residual),
            next_norm=address(norm),
            next_square_sum=address(squares),
            tap=address(tap),
            out=address(out),
            columns=self._shape.width,
        )
        self._product("residual", argument, matrix, x)

    def _head(self) -> None:
        b, head = self._buffers, self._weights.head
        squares = b.square_sums[2 * len(self._layers)]
        argument = self._linear(head, b.x_attn, squares, out_f32=address(b.logits), columns=head.features)
        self._product("store", argument, head, b.x_attn)

    def _choose(self, kind: ChooseKind) -> None:
        for group in self._row_groups:
            self._choose_of(group, kind)

    def _choose_of(self, group: RowGroup, kind: ChooseKind) -> None:
        b = group.buffers
        argument = args.Choose(
            logits=address(b.logits),
            vocab=self._shape.vocab_size,
            stride=b.logits.shape[1],
            input=address(b.input),
            top=address(b.top),
            score=address(b.score),
            token=address(b.token),
            arrived=address(b.arrived),
            host=address(b.host_chosen),
        )
        grid, shared = kind.bucket * SPLITS, 12 * WARPS + 4
        if kind.masked:
            argument.host_masks, argument.mask_words = address(group.masks.memory), group.masks.stride
            argument.masks, argument.masked = address(b.masks), address(b.masked)
            self._add("masks", grid, THREADS, 4, argument)
        if kind.history:
            argument.processed = address(b.processed)
            argument.bias, argument.counts = address(self._histories.bias), address(self._histories.counts)
            self._add("process", grid, THREADS, 4 * MAX_ROWS + 4, argument)
        if kind.cut:
            argument.cut_counts, argument.cut_weights = address(b.cut_counts), address(b.cut_weights)
            argument.cut_candidates, argument.cut_found = address(b.cut_candidates), address(b.cut_found)
            shared = 8 * (MAX_CANDIDATES + THREADS) + 4
        self._add("top", grid, THREADS, 8 * WARPS, argument)
        if kind.cut:
            self._add("count", grid, THREADS, 12 * BINS, argument)
            self._add("gather", grid, THREADS, 4, argument)
        self._add("choose", grid, THREADS, shared, argument)

    def _linear(self, matrix: Matrix, x: Tensor, squares: Tensor | None, **more: object) -> args.Linear:
        return args.Linear(
            weight=address(matrix.weight),
            scale=address(matrix.scale),
            bias=address(matrix.bias),
            x=address(x),
            square_sum=address(squares),
            inputs=matrix.inputs,
            first_feature=matrix.first_feature,
            inverse_width=1 / self._shape.width,
            norm_eps=self._shape.norm_eps,
            input=address(self._buffers.input),
            row_groups=len(self._groups),
            square_stride=self._buffers.square_sums.numel(),
            **more,
        )

    def _product(self, name: str, argument: args.Linear, matrix: Matrix, x: Tensor) -> None:
        groups = len(self._groups)
        sums = self._buffers.sums
        if groups > 1 and sums is not None and name != "store":
            self._torch_product(name, argument, matrix, x, sums)
            return
        self.launches.append(
            product_launch(
                name, argument, matrix, self._row_tiles, self._shape, self._multiprocessors, groups
            )
        )

    def _torch_product(
        self, name: str, argument: args.Linear, matrix: Matrix, x: Tensor, memory: Tensor
    ) -> None:
        """The sums by torch, in one product for all rows; then the epilogue."""
        rows, inputs = len(self._groups) * MAX_ROWS, matrix.inputs
        sums = memory[: rows * matrix.features].view(rows, matrix.features)
        argument.sums, argument.features = address(sums), matrix.features
        self.launches.append(TorchProduct(x.as_strided((rows, inputs), (inputs, 1)), matrix.weight, sums))
        units = matrix.features // (16 if name == "residual" else 32)
        self._add(f"{name}_sums", units * rows // 16, THREADS, 0, argument)

    def _cache(self, layer: int) -> args.KvCache:
        keys, values = self._rows.k[layer], self._rows.v[layer]
        return args.KvCache(keys.data_ptr(), values.data_ptr(), keys.stride(0))

    def _add(self, name: str, grid: int, threads: int, shared_bytes: int, argument: c.Structure) -> None:
        self.launches.append(Launch(name, grid, threads, shared_bytes, argument))


def product_launch(
    name: str,
    argument: args.Linear,
    matrix: Matrix,
    row_tiles: int,
    shape: ModelConfig,
    multiprocessors: int,
    groups: int = 1,
) -> Launch:
    """One of the products of linear.h and packed.h, for row_tiles * 8 rows, or several groups of 64."""
    rows, kind = 8 * row_tiles, matrix.type
    if kind in FORMATS:
        tiles, kb = packed_tiling(name, rows, shape, multiprocessors)
        shared = packed_shared_bytes(rows, tiles, kb, FORMATS[kind])
    else:
        tiles, kb = product_tiling(name, rows, shape, multiprocessors, kind == "int8")
        shared = _linear_shared_bytes(row_tiles, tiles, kb, int8=kind == "int8")
    variant, grid = "groups" if groups > 1 else row_tiles, groups * (matrix.features // 16 // tiles)
    return Launch(f"{name}_{variant}_{kind}", grid, THREADS, shared, argument)


def attention_shared_bytes(head_dim: int) -> int:
    chunks = 2 * 2 * KEY_CHUNK * head_dim * 2  # two stages of keys and values
    return chunks + WARPS * 16 * (head_dim + 8 + 2) * 4 + 3 * MAX_ROWS * 4  # sums, and rows of the pass


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _query_scale(shape: ModelConfig) -> float:
    """With the factor that turns exp into exp2."""
    return (shape.attn_scale or shape.head_dim**-0.5) * math.log2(math.e)


def _linear_shared_bytes(row_tiles: int, tiles: int, kb: int, int8: bool) -> int:
    """As LinearShape in linear.h: the factors of the norm, then the rings, whose place the sums take."""
    rows = 8 * row_tiles
    short = rows * (1 + int8) > 32 or (rows == 32 and kb < WIDE_KB)
    pieces = 4 if short else 8  # of 16 bytes, in a weight's row
    stage = 16 * WARPS * (16 * pieces * tiles + rows * pieces * (2 if int8 else 1))
    stages = max(2, min(8, kb * 1024 // stage))
    sums = 4 * WARPS * tiles * 16 * (rows + 1)
    return 4 * MAX_ROWS + max(stage * stages, sums)


def packed_shared_bytes(rows: int, tiles: int, kb: int, format: PackedFormat) -> int:
    """As PackedProduct in packed.h."""
    stage = WARPS * (tiles * format.stage_bytes + rows * UNIT_INPUTS * 2)
    stages = max(2, min(8, kb * 1024 // stage))
    sums = 4 * WARPS * tiles * 16 * (rows + 1)
    return 4 * MAX_ROWS + max(stage * stages, sums)


def _features(parts: Sequence[Matrix]) -> int:
    return sum(part.features for part in parts)


def words_of(tensor: Tensor) -> "memoryview[int]":
    """Words of pinned memory. (Reading one takes a third of the time that numpy takes.)"""
    values: Any = tensor.numpy()
    return memoryview(values)


_LETTERS: Final[dict[Any, str]] = {
    c.c_int: "i", c.c_uint: "I", c.c_ulonglong: "Q", c.c_float: "f", c.c_double: "d"
}  # fmt: skip
_HEADER: Final = 4  # fields that are one word each
_BY_ROW: Final = ("token", "position", "path", "part", "sequence", "parent")
_PATH: Final = tuple(Struct(f"{count}i") for count in range(MAX_DEPTH + 1))
_UNUSED: Final = tuple((-1,) * count for count in range(MAX_ROWS + 1))  # slots of other rows
# seed, choice, shift of the index, inverse temperature, top-k, top-p, logit of min-p, history, penalties
_GREEDY: Final = (0, 0, 0, 0.0, 0, 1.0, -math.inf, -1, 1.0, 0.0, 0.0)


@cache
def _layout(rows: int, sequences: int, bucket: int) -> Struct:
    """PassInput without its paths, for so many rows and sequences; what lies beyond them becomes zero.

    Slots are those of the whole bucket.
    """
    parts, at = [f"@{_HEADER}i"], 4 * _HEADER
    fields: Any = args.PassInput._fields_[_HEADER:-1]
    for name, kind in fields:
        field, letter = getattr(args.PassInput, name), _LETTERS[kind._type_]
        count = bucket if name == "slot" else rows if name in _BY_ROW else sequences
        parts.append(f"{field.offset - at}x{count}{letter}")
        at = field.offset + count * c.sizeof(kind._type_)
    return Struct("".join(parts))


@cache
def _min_p_logit(min_p: float) -> float:
    return float(lowest(min_p)) if min_p > 0 else -math.inf


class _InputWriter:
    """Writes a PassInput in one go. (struct takes a fifth of the time that numpy or ctypes take.)"""

    def __init__(self, words: Tensor) -> None:
        self._memory = words_of(words).cast("B")
        self._paths = args.PassInput.path_slot.offset

    def fill(
        self, rows: PassRows, tables: Sequence[int], histories: Sequence[int], number: int, bucket: int
    ) -> None:
        count, sequences, paths = len(rows.tokens), rows.sequences, 0
        records = []
        for s, table, history in zip(sequences, tables, histories, strict=True):
            first_path, deepest = paths, s.last_position - s.length + 1
            for slots in s.paths:  # a short one repeats its last slot, which is masked
                whole = slots if len(slots) == deepest else (*slots, *[slots[-1]] * (deepest - len(slots)))
                _PATH[deepest].pack_into(self._memory, self._paths + 4 * MAX_DEPTH * paths, *whole)
                paths += 1
            begin = (s.first_row, s.row_count, s.length, s.last_position, first_path, len(s.paths), table)
            records.append(begin + (_GREEDY if s.sampler is None else _sampler(s, s.sampler, history)))
        columns = records[0] if len(records) == 1 else chain(*zip(*records, strict=True))

        _layout(count, len(sequences), bucket).pack_into(
            self._memory,
            0,
            *(number, count, len(sequences), paths),
            *rows.tokens,
            *rows.positions,
            *rows.slots,
            *_UNUSED[bucket - count],
            *rows.path,
            *rows.part,
            *rows.sequence,
            *rows.parents,
            *columns,
        )


def _sampler(s: SequenceRows, sampler: Sampler, history: int) -> tuple[float, ...]:
    """The fields of PassInput that say how a sequence's tokens are chosen, in their order."""
    return (
        sampler.seed,
        sampler.choice,
        s.index_shift & 0xFFFFFFFF,
        sampler.inverse_temperature,
        min(sampler.top_k, 2**31 - 1),
        sampler.top_p,
        _min_p_logit(sampler.min_p),
        history,
        sampler.repetition,
        sampler.presence,
        sampler.frequency,
    )
