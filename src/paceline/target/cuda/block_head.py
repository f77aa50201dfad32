"""A block head in CUDA graphs: heads/block.py says what it is, csrc/block_head.h how it runs.

One graph reads hidden states, fills blocks and chooses the tokens of chains, as far as a call asks for it.
Products and attention are the target's kernels, so a block has the same bits whatever is drafted beside it.
"""

import ctypes as c
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise, product, starmap
from struct import Struct, calcsize
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.heads.base import EmbeddingTable
from paceline.heads.block import BlockConfig
from paceline.heads.runner import (
    AnchorContext,
    BlockOutput,
    BlockRunner,
    Chains,
    ChainStart,
    Floats,
    SampleCall,
    SampleCalls,
    SlotStart,
    TapInput,
    chain_starts,
)
from paceline.target.cuda import arguments as args
from paceline.target.cuda.arguments import (
    KEY_CHUNK,
    MAX_BLOCK,
    MAX_ROWS,
    MAX_TEXTS,
    PAGE,
    THREADS,
    WARPS,
)
from paceline.target.cuda.driver import Launcher
from paceline.target.cuda.graphs import (
    BUCKETS,
    COMBINE_WARPS,
    GraphSet,
    Launch,
    address,
    attention_shared_bytes,
    product_launch,
    wait_for,
    words_of,
)
from paceline.target.cuda.weights import HEAD_DIMS, VOCAB_TILE, Matrix
from paceline.target.weights.model_config import ModelConfig

RANK_GROUP: Final = 64  # elements of a Markov row that eight lanes take at a time
STEPS: Final = (1, 2, 4, 8, 16)  # tokens of the longest chain that graphs are captured for


def unsupported_reason(shape: BlockConfig, target: ModelConfig) -> str | None:
    """Why the kernels cannot run this head beside the target; None: they can."""
    if shape.width != target.width:
        return f"its width is {shape.width}, and the target's is {target.width}"
    if shape.head_dim not in HEAD_DIMS:
        return f"attention heads of {shape.head_dim}, the kernels know {HEAD_DIMS}"
    sizes = {"ff_width": shape.ff_width, "markov_rank": shape.markov_rank}
    for name, size in {**sizes, "heads * head_dim": shape.heads * shape.head_dim}.items():
        if size % RANK_GROUP:
            return f"{name} is {size}, no multiple of {RANK_GROUP}"
    return f"it drafts {shape.block} tokens, the kernels {MAX_BLOCK}" if shape.block > MAX_BLOCK else None


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix
    attn_norm: Tensor  # float32, as every vector
    ffn_norm: Tensor
    q_norm: Tensor
    k_norm: Tensor


class _Weights:
    """own: the head's weights by their names in heads/block.py, each read once."""

    def __init__(
        self, shape: BlockConfig, own: Mapping[str, Tensor], head: Tensor, ids: Tensor, device: torch.device
    ) -> None:
        """head: the target's output rows of the draft vocabulary."""

        def matrix(*names: str) -> Matrix:
            parts = [own[f"{name}.weight"].to(device, torch.bfloat16) for name in names]
            return Matrix(parts[0].contiguous() if len(parts) == 1 else torch.cat(parts))

        def vector(name: str) -> Tensor:
            return own[name].to(device, torch.float32).flatten().contiguous()

        def layer(name: str) -> _Layer:
            norms = [vector(f"{name}{part}_norm.weight") for part in ("attn", "ffn", "q", "k")]
            qkv, gate_up = matrix(*(name + part for part in "qkv")), matrix(name + "gate", name + "up")
            return _Layer(qkv, matrix(name + "o"), gate_up, matrix(name + "down"), *norms)

        names = [f"layers.{i}." for i in range(shape.layers)]
        self.layers = [layer(name) for name in names]
        self.fc, self.context_norm = matrix("fc"), vector("context_norm.weight")
        self.context = matrix(*(name + part for name in names for part in "kv"))  # of all layers
        self.key_norms = torch.stack([one.k_norm for one in self.layers])
        self.norm, self.mask = vector("norm.weight"), vector("mask")
        missing = -len(head) % VOCAB_TILE
        self.head = Matrix(F.pad(head.to(device, torch.bfloat16), (0, 0, 0, missing)).contiguous())
        self.markov_in, self.markov_out = matrix("markov_in").weight, matrix("markov_out").weight
        sure = vector("sure.weight")
        self.sure_hidden, self.sure_pair = sure[: shape.width].contiguous(), sure[shape.width :].contiguous()
        self.sure_bias = float(own["sure.bias"])
        self.ids = ids.to(device, torch.int32)

    @property
    def columns(self) -> int:
        """Of a row of logits: the draft vocabulary, padded."""
        return self.head.features


class _Buffers:
    """Every buffer that a draft touches besides weights, cache rows and its results."""

    def __init__(self, shape: BlockConfig, positions: int, device: torch.device) -> None:
        def new(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        rows, width, attended = MAX_ROWS, shape.width, shape.heads * shape.head_dim
        half, kv = torch.bfloat16, shape.kv_heads * shape.head_dim
        self.features = new(rows, len(shape.taps) * width, dtype=half)
        self.fused = new(rows, width)
        self.fused_squares = new(rows, dtype=torch.int64)
        self.x_context = new(rows, width, dtype=half)
        self.context = new(rows, shape.layers * 2 * kv)
        self.residual = new(rows, width)
        self.x_attn, self.x_ffn = new(rows, width, dtype=half), new(rows, width, dtype=half)
        self.qkv = new(rows, attended + 2 * kv)
        self.queries, self.attended = new(rows, attended, dtype=half), new(rows, attended, dtype=half)
        self.own = new(2 * shape.kv_heads, rows, shape.head_dim, dtype=half)
        self.gated = new(rows, shape.ff_width, dtype=half)
        self.square_sums = new(2 * shape.layers + 1, rows, dtype=torch.int64)
        chunks = (shape.window + shape.block) // KEY_CHUNK + 1
        self.max_pages, self.max_parts = 2 * chunks * (KEY_CHUNK // PAGE), rows * chunks
        self.tables = new(self.max_pages, dtype=torch.int32)  # attention fetches pages, and uses none
        self.partial = new(shape.heads, self.max_parts, shape.head_dim)
        self.part_weight = new(shape.heads, self.max_parts, 2)
        self.input = new(c.sizeof(args.DraftInput) // 4, dtype=torch.int32)
        self.pass_input = new(c.sizeof(args.PassInput) // 4, dtype=torch.int32)
        self.rows = new(rows, dtype=torch.int64)
        self.best = new(MAX_TEXTS, MAX_BLOCK, dtype=torch.int64)
        self.sure = new(MAX_TEXTS, MAX_BLOCK)
        self.arrived = new(1, dtype=torch.int32)
        self.cos, self.sin = _rope_tables(shape, positions, device)
        pinned = device.type == "cuda"
        self.host_input, self.host_result = (
            torch.zeros(c.sizeof(structure) // 4, dtype=torch.int32, pin_memory=pinned)
            for structure in (args.DraftInput, args.DraftResult)
        )
        self.host_taken = torch.zeros(1, dtype=torch.int32, pin_memory=pinned)


def _rope_tables(shape: BlockConfig, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [position, head_dim / 2], of heads/base.py's angles."""
    dims = torch.arange(0, shape.head_dim, 2, dtype=torch.float32)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * shape.theta ** (-dims / shape.head_dim)
    return tuple(f(angles.double()).float().to(device) for f in (torch.cos, torch.sin))  # type: ignore[return-value]


class DraftKind(NamedTuple):
    """What a graph is captured for. 0: no such part."""

    read: int = 0  # bucket of rows that are read
    fill: int = 0  # bucket of rows of all blocks
    steps: int = 0  # of chains


class _Kernels:
    """The launches of one kind of draft, in order."""

    def __init__(self, runner: "CudaBlock", kind: DraftKind) -> None:
        self._b, self._w, self._shape, self._kind = runner.buffers, runner.weights, runner.shape, kind
        self._embed, self._target, self._multiprocessors = runner.embed, runner.target, runner.multiprocessors
        self._row_tiles = 0
        self._has_product = False
        self.launches: list[Launch] = []
        self._take()
        if kind.read:
            self._read()
        if kind.fill:
            self._fill()
        for step in range(kind.steps):
            self._chain(step)

    def _take(self) -> None:
        b = self._b
        take = args.TakeDraft(
            host=address(b.host_input),
            input=address(b.input),
            pass_input=address(b.pass_input),
            rows=address(b.rows),
            best=address(b.best),
            host_taken=address(b.host_taken),
            columns=self._w.columns,
        )
        self._add("take_block", 1, THREADS, c.sizeof(args.DraftInput), take)

    def _read(self) -> None:
        b, w, shape = self._b, self._w, self._shape
        self._row_tiles = self._kind.read // 8
        taps = args.GatherTaps(
            input=address(b.input),
            out=address(b.features),
            residual=address(b.fused),
            square_sum=address(b.fused_squares),
            taps=len(shape.taps),
            width=shape.width,
        )
        self._add("taps", self._kind.read, THREADS, 0, taps)
        self._residual(w.fc, b.features, b.fused, w.context_norm, b.fused_squares, b.x_context)
        self._store(w.context, b.x_context, b.fused_squares, b.context)
        keys = args.ContextKeys(
            products=address(b.context),
            key_norm=address(w.key_norms),
            cos=address(b.cos),
            sin=address(b.sin),
            input=address(b.input),
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            norm_eps=shape.norm_eps,
        )
        heads = self._kind.read * shape.layers * 2 * shape.kv_heads
        self._add(f"context_keys_{shape.head_dim}", heads // 4, 128, 0, keys)

    def _fill(self) -> None:
        b, w, shape = self._b, self._w, self._shape
        self._row_tiles = self._kind.fill // 8
        embed = args.EmbedBlock(
            input=address(b.input),
            embeddings=address(self._embed),
            mask=address(w.mask),
            norm=address(w.layers[0].attn_norm),
            residual=address(b.residual),
            square_sums=address(b.square_sums),
            out=address(b.x_attn),
            width=shape.width,
            norms=len(b.square_sums),
        )
        self._add("embed_slots", self._kind.fill, THREADS, 4 * WARPS, embed)
        for i in range(shape.layers):
            self._layer(i)
        last = b.square_sums[2 * shape.layers]
        sure = args.BlockSure(
            input=address(b.input),
            residual=address(b.residual),
            norm=address(w.norm),
            weight=address(w.sure_hidden),
            square_sum=address(last),
            width=shape.width,
            bias=w.sure_bias,
            inverse_width=1 / shape.width,
            norm_eps=shape.norm_eps,
        )
        self._add("sure", self._kind.fill // WARPS, THREADS, 0, sure)
        head = self._linear(w.head, b.x_attn, last, out_rows=address(b.rows), columns=w.columns)
        self._product("store_rows", head, w.head)

    def _layer(self, i: int) -> None:
        b, shape, layer = self._b, self._shape, self._w.layers[i]
        before, between, after = (b.square_sums[2 * i + n] for n in range(3))
        next_norm = self._w.layers[i + 1].attn_norm if i + 1 < shape.layers else self._w.norm
        self._store(layer.qkv, b.x_attn, before, b.qkv)
        heads = args.BlockHeads(
            qkv=address(b.qkv),
            query_norm=address(layer.q_norm),
            key_norm=address(layer.k_norm),
            cos=address(b.cos),
            sin=address(b.sin),
            input=address(b.input),
            queries=address(b.queries),
            own=address(b.own),
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            norm_eps=shape.norm_eps,
            query_scale=shape.head_dim**-0.5 * math.log2(math.e),
        )
        count = self._kind.fill * (shape.heads + 2 * shape.kv_heads)
        self._add(f"block_heads_{shape.head_dim}", -(-count // 4), 128, 0, heads)
        self._attention(i)
        self._residual(layer.o, b.attended, b.residual, layer.ffn_norm, between, b.x_ffn)
        gated = self._linear(layer.gate_up, b.x_ffn, between, out=address(b.gated), columns=shape.ff_width)
        self._product("gated", gated, layer.gate_up)
        self._residual(layer.down, b.gated, b.residual, next_norm, after, b.x_attn)

    def _attention(self, layer: int) -> None:
        b, shape, d = self._b, self._shape, self._shape.head_dim
        attention = args.Attention(
            queries=address(b.queries),
            tables=address(b.tables),
            input=address(b.pass_input),
            partial=address(b.partial),
            weight=address(b.part_weight),
            out=address(b.attended),
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            max_pages=b.max_pages,
            max_parts=b.max_parts,
        )
        row_size = shape.layers * 2 * shape.kv_heads * d
        attend = args.BlockAttention(attention, address(b.input), address(b.own), layer, row_size)
        grid = self._multiprocessors * (128 // d)
        self._add(f"block_attend_{d}", grid, THREADS, attention_shared_bytes(d), attend)
        shared = COMBINE_WARPS * (d + 1) * 4
        self._add(f"combine_{d}", self._kind.fill * shape.heads, 32 * COMBINE_WARPS, shared, attention)

    def _chain(self, step: int) -> None:
        b, w, shape = self._b, self._w, self._shape
        argument = args.ChainStep(
            input=address(b.input),
            markov_in=address(w.markov_in),
            markov_out=address(w.markov_out),
            weight=address(w.sure_pair),
            ids=address(w.ids),
            best=address(b.best),
            sure=address(b.sure),
            arrived=address(b.arrived),
            host=address(b.host_result),
            draft_vocab=shape.draft_vocab,
            columns=w.columns,
            rank=shape.markov_rank,
            step=step,
            steps=self._kind.steps,
        )
        shared = 4 * MAX_TEXTS * shape.markov_rank + 8 * WARPS + 8
        self._add("chain", self._multiprocessors, THREADS, shared, argument)

    def _store(self, matrix: Matrix, x: Tensor, squares: Tensor, out: Tensor) -> None:
        argument = self._linear(matrix, x, squares, out_f32=address(out), columns=matrix.features)
        self._product("store", argument, matrix)

    def _residual(
        self, matrix: Matrix, x: Tensor, residual: Tensor, norm: Tensor, squares: Tensor, out: Tensor
    ) -> None:
        argument = self._linear(
            matrix,
            x,
            None,
            residual=address(residual),
            next_norm=address(norm),
            next_square_sum=address(squares),
            out=address(out),
            columns=self._shape.width,
        )
        self._product("residual", argument, matrix)

    def _linear(self, matrix: Matrix, x: Tensor, squares: Tensor | None, **more: object) -> args.Linear:
        return args.Linear(
            weight=address(matrix.weight),
            x=address(x),
            square_sum=address(squares),
            inputs=matrix.inputs,
            inverse_width=1 / self._shape.width,
            norm_eps=self._shape.norm_eps,
            **more,
        )

    def _product(self, name: str, argument: args.Linear, matrix: Matrix) -> None:
        """The first lets its successor start late, so that everything after it may read the input early."""
        argument.starts_next_late = not self._has_product
        self._has_product = True
        row_tiles, processors = self._row_tiles, self._multiprocessors
        launch = product_launch(name, argument, matrix, row_tiles, self._target, processors)
        self.launches.append(launch)

    def _add(self, name: str, grid: int, threads: int, shared_bytes: int, argument: c.Structure) -> None:
        self.launches.append(Launch(name, grid, threads, shared_bytes, argument))


class CudaBlock(BlockRunner):
    """A block's bits depend on its own text and its size alone.

    Sampled chains use the target's noise at its temperature; top-k, top-p and min-p are left to the target,
    which chooses its own token anyway.
    """

    samples = True

    def __init__(
        self,
        shape: BlockConfig,
        draft_ids: Tensor,
        own: Mapping[str, Tensor],
        embed: Tensor,
        head: EmbeddingTable,
        target: ModelConfig,
        launcher: Launcher,
        max_context: int,
    ) -> None:
        """embed: of the target, [vocab or more, width] bf16. head: its output rows, [vocab, width]."""
        device = launcher.device
        ids = draft_ids.to(device, torch.int64)
        self.shape, self.draft_ids, self.embed, self.target = shape, ids, embed, target
        self.like = torch.empty(0, dtype=torch.bfloat16, device=device)
        self.multiprocessors = launcher.multiprocessors
        self.weights = _Weights(shape, own, head[ids], ids, device)
        self.buffers = _Buffers(shape, max_context + shape.block, device)
        self._graphs = GraphSet[DraftKind](launcher)
        self._numbers = [shape.draft_vocab] * shape.vocab  # of tokens, in the draft vocabulary
        for number, token in enumerate(draft_ids.tolist()):
            self._numbers[token] = number
        self._row_bytes = 2 * shape.layers * 2 * shape.kv_heads * shape.head_dim
        self._input = _InputWriter(self.buffers.host_input)
        self._taken = words_of(self.buffers.host_taken)
        self._result = words_of(self.buffers.host_result)
        floats: memoryview[float] = self._result.cast("B").cast("f")
        self._sure = floats[args.DraftResult.sure.offset // 4 :]
        self._number = 0
        self._last = DraftKind()

    def read(self, parts: Sequence[TapInput]) -> None:
        for reads in self._reads(parts).groups():
            self._run(DraftKind(read=_bucket(len(reads))), reads)

    def fill(self, texts: Sequence[AnchorContext], slots: int) -> list[BlockOutput]:
        filled = [self._room(text.old, slots) for text in texts]
        for group in _groups(len(texts), _texts_at_once(slots)):
            self._write_texts(texts[group], filled[group], slots)
            self._run(DraftKind(fill=_bucket(len(texts[group]) * slots)))
        return filled

    def chains(self, starts: Sequence[ChainStart], sizes: Sequence[int], samples: SampleCalls = ()) -> Chains:
        tokens: list[list[int]] = []
        sure: list[list[float]] = []
        for group in _groups(len(starts), MAX_TEXTS):
            self._write_chains(starts[group], sizes[group], samples[group] if samples else ())
            self._run(DraftKind(steps=_steps(sizes[group])))
            self._add_results(len(starts[group]), tokens, sure)
        return tokens, sure

    def draft_chains(
        self,
        parts: Sequence[TapInput],
        texts: Sequence[AnchorContext],
        slots: int,
        firsts: Sequence[SlotStart],
        sizes: Sequence[int],
        samples: SampleCalls = (),
    ) -> tuple[list[BlockOutput], Chains]:
        *before, last = self._reads(parts).groups() or [_Reads()]
        for reads in before:
            self._run(DraftKind(read=_bucket(len(reads))), reads)
        filled = [self._room(text.old, slots) for text in texts]
        starts = chain_starts(filled, firsts)
        tokens: list[list[int]] = []
        sure: list[list[float]] = []
        for group in _groups(len(texts), _texts_at_once(slots)):
            self._write_texts(texts[group], filled[group], slots)
            self._write_chains(starts[group], sizes[group], samples[group] if samples else ())
            fill = _bucket(len(texts[group]) * slots)
            self._run(DraftKind(_bucket(len(last)), fill, _steps(sizes[group])), last)
            self._add_results(len(texts[group]), tokens, sure)
            last = _Reads()
        return filled, (tokens, sure)

    @torch.inference_mode()
    def logits_at(self, starts: Sequence[ChainStart]) -> tuple[Floats, list[float]]:
        w, device = self.weights, self.like.device
        numbers = torch.tensor([self._numbers[start.previous] for start in starts], device=device)
        pairs = w.markov_in[numbers].float()
        base = torch.stack([start.block.base[start.slot] for start in starts])
        sure = torch.stack([start.block.hidden[start.slot] for start in starts])
        logits: Floats = (base + pairs @ w.markov_out.float().T).numpy(force=True)
        return logits, (sure + pairs @ w.sure_pair).tolist()

    def capture_usual(self) -> None:
        """Captures the graphs of usual drafts ahead of the first one. With an empty input they do nothing."""
        reads, fill = (0, *BUCKETS[:2]), _bucket(self.shape.block)
        steps = [count for count in STEPS if count <= self.shape.block]
        for kind in (*starmap(DraftKind, product(reads, [fill], steps)), *map(DraftKind, BUCKETS)):
            self._run(kind)

    def replay_last_draft(self) -> None:
        """The kernels of the last draft alone, for benchmarks."""
        self._graphs.run(self._last, self._kernels)

    def _run(self, kind: DraftKind, reads: "_Reads | None" = None) -> None:
        """Texts and chains are written already, which waited for the input to be free."""
        self._free_input()
        self._number = self._number % 2**30 + 1
        if reads is not None:
            self._input.write_reads(reads)
        self._input.begin(self._number, len(reads) if reads is not None else 0, kind)
        self._last = kind
        self._graphs.run(kind, self._kernels)

    def _kernels(self, kind: DraftKind) -> list[Launch]:
        return _Kernels(self, kind).launches

    def _free_input(self) -> None:
        """Waits until the last draft has taken its input."""
        wait_for(self._taken, self._number)

    def _write_texts(self, texts: Sequence[AnchorContext], filled: Sequence[BlockOutput], slots: int) -> None:
        for text in texts:
            if not 0 <= text.token < self.shape.vocab:
                raise ValueError(f"token {text.token} is not one of the model's {self.shape.vocab}")
        self._free_input()
        self._input.write_texts(
            [self._cache_address(text.rows.whole, text.rows.first) for text in texts],
            filled,
            texts,
            slots,
        )

    def _write_chains(self, starts: Sequence[ChainStart], sizes: Sequence[int], samples: SampleCalls) -> None:
        for start, size in zip(starts, sizes, strict=True):
            if not 0 < size <= start.block.slots - start.slot:
                raise ValueError(f"{size} tokens from slot {start.slot} on are not in this block")
        self._free_input()
        self._input.write_chains(starts, [self._numbers[start.previous] for start in starts], sizes, samples)

    def _add_results(self, count: int, tokens: list[list[int]], sure: list[list[float]]) -> None:
        wait_for(self._result, self._number)
        for i in range(count):
            own = slice(i * MAX_BLOCK, (i + 1) * MAX_BLOCK)
            tokens.append(self._result[1:][own].tolist())
            sure.append(list(self._sure[own]))

    def _room(self, old: BlockOutput | None, slots: int) -> BlockOutput:
        if old is not None:
            return old if old.slots == slots else BlockOutput(slots, old.base, old.hidden)
        block, device = self.shape.block, self.like.device
        base = torch.empty(block, self.weights.columns, device=device)[:, : self.shape.draft_vocab]
        return BlockOutput(slots, base, torch.empty(block, device=device))

    def _reads(self, parts: Sequence[TapInput]) -> "_Reads":
        reads, width_bytes = _Reads(), 4 * self.shape.width
        for part in parts:
            first, stride, copy = self._states(part)
            cache_row, count = self._cache_address(part.rows.whole, part.rows.first), part.rows.count
            reads.hidden += range(first, first + width_bytes * count, width_bytes)
            reads.strides += [stride] * count
            reads.cache_rows += range(cache_row, cache_row + self._row_bytes * count, self._row_bytes)
            reads.positions += range(part.start, part.start + count)
            reads.held.append(copy)
        return reads

    def _states(self, part: TapInput) -> tuple[int, int, Tensor | None]:
        """Address of the first row at the first tap, floats from tap to tap, and the copy that has both."""
        hidden, device = [part.hidden[tap] for tap in self.shape.taps], self.like.device
        if all(h.device == device and h.dtype == torch.float32 and h.is_contiguous() for h in hidden):
            at = [h.data_ptr() for h in hidden]
            steps = {b - a for a, b in pairwise(at)} or {4}
            if len(steps) == 1 and not (step := steps.pop()) % 4:
                return at[0] + 4 * self.shape.width * part.first, step // 4, None
        copy = torch.stack([part.of(tap).to(device, torch.float32) for tap in self.shape.taps])
        return copy.data_ptr(), part.rows.count * self.shape.width, copy

    def _cache_address(self, whole: Tensor, first: int) -> int:
        if whole.dtype != self.like.dtype or whole.device != self.like.device or not whole.is_contiguous():
            raise ValueError("these rows are not of this runner's type")
        return whole.data_ptr() + first * self._row_bytes


class _Reads:
    """Rows to be read: where their states are, where their cache rows go."""

    def __init__(self) -> None:
        self.hidden: list[int] = []
        self.strides: list[int] = []
        self.cache_rows: list[int] = []
        self.positions: list[int] = []
        self.held: list[Tensor | None] = []  # copies, alive until they are read

    def __len__(self) -> int:
        return len(self.hidden)

    def groups(self) -> "list[_Reads]":
        """As many rows as a graph takes."""
        return [self._cut(group) for group in _groups(len(self), MAX_ROWS)]

    def _cut(self, group: slice) -> "_Reads":
        if len(self) <= MAX_ROWS:
            return self
        cut = _Reads()
        cut.hidden, cut.strides = self.hidden[group], self.strides[group]
        cut.cache_rows, cut.positions, cut.held = self.cache_rows[group], self.positions[group], self.held
        return cut


def _groups(count: int, size: int) -> Iterator[slice]:
    return (slice(i, i + size) for i in range(0, count, size))


def _texts_at_once(slots: int) -> int:
    return min(MAX_TEXTS, MAX_ROWS // slots)


@cache
def _bucket(rows: int) -> int:
    """0 for no rows."""
    return next(size for size in (0, *BUCKETS) if size >= rows)


def _steps(sizes: Sequence[int]) -> int:
    longest = max(sizes)
    return next(steps for steps in STEPS if steps >= longest)


Fields = tuple[tuple[str, str], ...]  # names in DraftInput, in its order, and their letters for struct
_HEADER: Final = Struct("5i")
_READS: Final[Fields] = (("hidden", "Q"), ("tap_stride", "q"), ("cache_row", "Q"), ("read_position", "i"))
_TEXTS: Final[Fields] = (
    ("context", "Q"), ("logits", "Q"), ("sure", "Q"), ("token", "i"), ("position", "i"), ("length", "i"),
)  # fmt: skip
_CHAINS: Final[Fields] = (
    ("chain_logits", "Q"), ("chain_sure", "Q"), ("slot", "i"), ("previous", "i"), ("size", "i"),
    ("inverse_temperature", "f"),
)  # fmt: skip
_KEYS: Final[Fields] = (("key", "I"),)
_GREEDY: Final = (0, 0) * MAX_BLOCK


@cache
def _layout(names: Fields, count: int) -> tuple[Struct, int]:
    """Writes `count` values of each field; the offset of the first."""
    start = at = getattr(args.DraftInput, names[0][0]).offset
    parts = ["="]
    for name, letter in names:
        offset = getattr(args.DraftInput, name).offset
        parts.append(f"{offset - at}x{count}{letter}")
        at = offset + count * calcsize("=" + letter)
    return Struct("".join(parts)), start


class _InputWriter:
    """Writes a DraftInput. (struct takes a fifth of the time that numpy or ctypes take.)"""

    def __init__(self, words: Tensor) -> None:
        self._memory = words_of(words).cast("B")
        self._texts = self._chains = 0
        self._slots = 1

    def begin(self, number: int, rows: int, kind: DraftKind) -> None:
        texts, chains = (self._texts if kind.fill else 0), (self._chains if kind.steps else 0)
        _HEADER.pack_into(self._memory, 0, number, rows, texts, self._slots, chains)

    def write_reads(self, reads: _Reads) -> None:
        values = (*reads.hidden, *reads.strides, *reads.cache_rows, *reads.positions)
        self._write(_READS, len(reads), values)

    def write_texts(
        self,
        context: Sequence[int],
        filled: Sequence[BlockOutput],
        texts: Sequence[AnchorContext],
        slots: int,
    ) -> None:
        self._texts, self._slots = len(texts), slots
        values = (
            *context,
            *[block.base.data_ptr() for block in filled],
            *[block.hidden.data_ptr() for block in filled],
            *[text.token for text in texts],
            *[text.position for text in texts],
            *[text.rows.count for text in texts],
        )
        self._write(_TEXTS, len(texts), values)

    def write_chains(
        self,
        starts: Sequence[ChainStart],
        previous: Sequence[int],
        sizes: Sequence[int],
        samples: SampleCalls,
    ) -> None:
        self._chains = len(starts)
        calls = samples or [None] * len(starts)
        values = (
            *[start.block.base.data_ptr() for start in starts],
            *[start.block.hidden.data_ptr() for start in starts],
            *[start.slot for start in starts],
            *previous,
            *sizes,
            *[0.0 if call is None else 1 / call.temperature for call in calls],
        )
        self._write(_CHAINS, len(starts), values)
        if samples:
            keys = tuple(word for call in calls for word in _keys(call))
            self._write(_KEYS, len(keys), keys)

    def _write(self, names: Fields, count: int, values: tuple[float, ...]) -> None:
        layout, offset = _layout(names, count)
        layout.pack_into(self._memory, offset, *values)


def _keys(call: SampleCall | None) -> Sequence[int]:
    """Of MAX_BLOCK tokens, two words each."""
    if call is None:
        return _GREEDY
    return (*chain(*call.keys), *_GREEDY[2 * len(call.keys) :])
