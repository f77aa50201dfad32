"""The network that fills blocks in C++: see heads/block.py for what it is, block.cpp for how it runs."""

import ctypes as c
import struct
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from paceline.errors import ModelError
from paceline.heads.block import BlockConfig
from paceline.heads.registry import parameter_shapes
from paceline.heads.runner import (
    AnchorContext,
    BlockOutput,
    BlockRunner,
    CacheRows,
    Chains,
    ChainStart,
    Floats,
    SampleCall,
    SampleCalls,
    SlotStart,
    TapInput,
    chain_starts,
)
from paceline.target.native import library
from paceline.target.native.embeddings import PackedEmbeddings
from paceline.target.native.int8_weights import Int8Weights, bytes_for
from paceline.target.native.library import GROUP, MAX_HEAD_DIM
from paceline.target.native.threads import ThreadPool
from paceline.target.weights.model_config import ModelConfig

_GROWTH: Final = 1024  # positions
_PART: Final = struct.Struct("@2P2i")
_TEXT: Final = struct.Struct("@3P4i")
_CHAIN: Final = struct.Struct("@2P4i3P")
_KEY: Final = struct.Struct("@2I")
_DRAFTING: Final = struct.Struct("@2i3P2i3P2i4P")
_STRUCTS: Final = (
    (_PART, library.Part),
    (_TEXT, library.Text),
    (_CHAIN, library.Chain),
    (_DRAFTING, library.DraftCall),
)
assert all(ours.size == c.sizeof(theirs) for ours, theirs in _STRUCTS)


def unsupported_reason(shape: BlockConfig, target: ModelConfig) -> str | None:
    """Why a network cannot run natively beside a target, or None."""
    if shape.width != target.width:
        return f"its width is {shape.width}, and the target's is {target.width}"
    for name in ("width", "head_dim", "markov_rank"):
        if getattr(shape, name) % GROUP:
            return f"{name} is {getattr(shape, name)}, no multiple of {GROUP}"
    return f"heads of {shape.head_dim}" if shape.head_dim > MAX_HEAD_DIM else None


class NativeBlock(BlockRunner):
    """A block's bits depend on its own text and its size alone. Runs on the threads of its target."""

    samples = True
    prefers_batched_lookup = False

    def __init__(
        self,
        shape: BlockConfig,
        draft_ids: Tensor,
        own: Mapping[str, Tensor],
        embeddings: PackedEmbeddings,
        pool: ThreadPool,
    ) -> None:
        """own: the network's weights, each read once."""
        lib = pool.lib
        self.like = torch.empty(0, dtype=torch.float16)
        self.shape, self.draft_ids = shape, draft_ids.to("cpu", torch.int64).contiguous()
        self._taps, self._pool = shape.taps, pool
        self._ids = self.draft_ids.tolist()
        self._number = [shape.draft_vocab] * len(embeddings.embed)
        for number, token in enumerate(self._ids):
            self._number[token] = number
        self._row_bytes = 2 * shape.layers * 2 * shape.kv_heads * shape.head_dim
        self._rotations = _Rotations(shape)
        parts = (*parameter_shapes("block", shape).values(), (shape.draft_vocab, shape.width))
        weights = Int8Weights(lib, bytes_for(parts))
        layers = _layers(shape, own, weights)
        model = _model(shape, own, embeddings, weights, layers, self.draft_ids)
        self._outputs: int = model.head.outputs
        self._held = (weights, layers, self.draft_ids, embeddings)  # referenced by C++
        self._native = lib.paceline_block_run
        self._filler = lib.paceline_block_open(c.byref(model), pool.handle)
        if not self._filler:
            raise ModelError("no memory for the native drafter")
        weakref.finalize(self, lib.paceline_block_close, self._filler).atexit = False
        self._call = _Call(shape)

    def read(self, parts: Sequence[TapInput]) -> None:
        with self._pool.busy():
            self._call.need(len(parts))
            held = self._reading(parts)
            self._run(_last_of(parts), parts=len(held))

    def fill(self, texts: Sequence[AnchorContext], slots: int) -> list[BlockOutput]:
        with self._pool.busy():
            self._call.need(len(texts))
            filled = self._filling(texts, slots)
            self._run(self._end_of(texts), texts=len(texts), slots=slots)
            return filled

    def chains(self, starts: Sequence[ChainStart], sizes: Sequence[int], samples: SampleCalls = ()) -> Chains:
        with self._pool.busy():
            self._call.need(len(starts))
            self._chaining(starts, sizes, samples)
            self._run(chains=len(starts), steps=max(sizes))
            return self._results(sizes)

    def draft_chains(
        self,
        parts: Sequence[TapInput],
        texts: Sequence[AnchorContext],
        slots: int,
        firsts: Sequence[SlotStart],
        sizes: Sequence[int],
        samples: SampleCalls = (),
    ) -> tuple[list[BlockOutput], Chains]:
        with self._pool.busy():
            self._call.need(max(len(parts), len(texts)))
            held = self._reading(parts)
            filled = self._filling(texts, slots)
            self._chaining(chain_starts(filled, firsts), sizes, samples)
            last = max(_last_of(parts), self._end_of(texts))
            self._run(last, len(held), len(texts), slots, len(texts), max(sizes))
            return filled, self._results(sizes)

    def logits_at(self, starts: Sequence[ChainStart]) -> tuple[Floats, list[float]]:
        logits = np.empty((len(starts), self._outputs), np.float32)
        sizes = [1] * len(starts)
        with self._pool.busy():
            self._call.need(len(starts))
            self._chaining(starts, sizes)
            self._run(chains=len(starts), steps=1, logits=logits.ctypes.data)
            _, sure = self._results(sizes)
        return logits[:, : self.shape.draft_vocab], [chances[0] for chances in sure]

    def _reading(self, parts: Sequence[TapInput]) -> list[list[Tensor]]:
        """Returns the tensors that must stay alive until the call ends."""
        held = []
        for i, part in enumerate(parts):
            states, first = self._states(part)
            at = [_at(one) + 4 * self.shape.width * first for one in states]
            self._call.add_part(i, at, self._context(part.rows), part.start, part.rows.count)
            held.append(states)
        return held

    def _states(self, part: TapInput) -> tuple[list[Tensor], int]:
        """Hidden states of each tapped layer, contiguous float32, and the index of the first row."""
        hidden = [part.hidden[tap] for tap in self._taps]
        first = hidden[0]  # the others of the pass are like it
        if first.dtype == torch.float32 and first.is_contiguous():
            return hidden, part.first
        return [part.of(tap).float().contiguous() for tap in self._taps], 0

    def _filling(self, texts: Sequence[AnchorContext], slots: int) -> list[BlockOutput]:
        filled = [self._room(text.old, slots) for text in texts]
        for i, (text, block) in enumerate(zip(texts, filled, strict=True)):
            if not 0 <= text.token < len(self._number):
                raise ValueError(f"token {text.token} is not one of the model's {len(self._number)}")
            at = self._context(text.rows), _at(block.hidden), _at(block.base)
            self._call.add_text(i, *at, text.rows.count, text.position, text.token)
        return filled

    def _room(self, old: BlockOutput | None, slots: int) -> BlockOutput:
        """Memory that is used for the first time is slow: it is used again."""
        if old is not None:
            return old if old.slots == slots else BlockOutput(slots, old.base, old.hidden)
        base = torch.empty(self.shape.block, self._outputs)[:, : self.shape.draft_vocab]
        return BlockOutput(slots, base, torch.empty(self.shape.block, self.shape.width))

    def _chaining(
        self, starts: Sequence[ChainStart], sizes: Sequence[int], samples: SampleCalls = ()
    ) -> None:
        for i, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            block, draw = start.block, samples[i] if samples else None
            if not 0 < size <= block.slots - start.slot:
                raise ValueError(f"{size} tokens from slot {start.slot} on are not in this block")
            previous = self._number[start.previous]
            self._call.add_chain(i, _at(block.base), _at(block.hidden), start.slot, previous, size, draw)

    def _results(self, sizes: Sequence[int]) -> Chains:
        """Tokens and logits of confidence, as the last call left them."""
        call, steps, ids = self._call, max(sizes), self._ids
        starts = range(0, len(sizes) * steps, steps)
        tokens = [[ids[n] for n in call.numbers[at : at + steps]] for at in starts]
        return tokens, [call.sure[at : at + steps] for at in starts]

    def _context(self, rows: CacheRows) -> int:
        whole = rows.whole
        if whole.dtype != torch.float16 or not whole.is_contiguous():
            raise ValueError("these rows are not of this runner's type")
        return _at(whole) + rows.first * self._row_bytes

    def _end_of(self, texts: Sequence[AnchorContext]) -> int:
        return max(text.position for text in texts) + self.shape.block

    def _run(
        self,
        last: int = 0,
        parts: int = 0,
        texts: int = 0,
        slots: int = 0,
        chains: int = 0,
        steps: int = 0,
        logits: int = 0,
    ) -> None:
        """last: the position before which all lies that is computed."""
        call = self._call.whole(self._rotations.up_to(last), parts, texts, slots, chains, steps, logits)
        self._pool.held = self._held, self._pool.held  # both: threads may still fetch the old ones
        if self._native(self._filler, call):
            raise ModelError("no memory for a pass of the drafter: give a smaller prefill_chunk or max_batch")
        self._pool.held = self._held


def _last_of(parts: Sequence[TapInput]) -> int:
    return max((part.start + part.rows.count for part in parts), default=0)


def _at(tensor: Tensor) -> int:
    return tensor.data_ptr()


class _Call:
    """The arguments of one native call (see block_model.h).

    Reused: building the ctypes structures, or setting their fields one by one, costs as much as one layer.
    """

    def __init__(self, shape: BlockConfig) -> None:
        self._taps, self._block, self._many = len(shape.taps), shape.block, 0
        self._hidden_of = struct.Struct(f"@{self._taps}P")
        self._drafting = library.DraftCall()
        self._given = c.byref(self._drafting)
        self.need(1)

    def need(self, many: int) -> None:
        """Room for so many sequences; what was there is lost."""
        if many <= self._many:
            return
        self._many, tokens = many, many * self._block
        self._hidden = (c.c_void_p * (many * self._taps))()  # of each part, of each layer tapped
        self._hidden_at = c.addressof(self._hidden)
        self._parts, self._texts = (library.Part * many)(), (library.Text * many)()
        self._chains = (library.Chain * many)()
        self._keys = (c.c_uint32 * (2 * tokens))()
        self._keys_at = c.addressof(self._keys)
        self.numbers, self.sure = (c.c_int32 * tokens)(), (c.c_float * tokens)()
        lists = self._parts, self._texts, self._chains, self.numbers, self.sure
        self._at = tuple(c.addressof(one) for one in lists)

    def add_part(self, i: int, hidden: Sequence[int], context: int, start: int, rows: int) -> None:
        offset = i * self._hidden_of.size
        self._hidden_of.pack_into(self._hidden, offset, *hidden)
        _PART.pack_into(self._parts, i * _PART.size, self._hidden_at + offset, context, start, rows)

    def add_text(
        self, i: int, context: int, hidden: int, base: int, count: int, position: int, anchor: int
    ) -> None:
        _TEXT.pack_into(self._texts, i * _TEXT.size, context, hidden, base, count, position, anchor, 0)

    def add_chain(
        self, i: int, base: int, hidden: int, slot: int, previous: int, steps: int, draw: SampleCall | None
    ) -> None:
        how = (0, 0, 0) if draw is None else self._draw(i * self._block * _KEY.size, draw)
        _CHAIN.pack_into(self._chains, i * _CHAIN.size, base, hidden, slot, previous, steps, 0, *how)

    def _draw(self, offset: int, draw: SampleCall) -> tuple[int, int, int]:
        for step, key in enumerate(draw.keys):
            _KEY.pack_into(self._keys, offset + step * _KEY.size, *key)
        return draw.choose, draw.settings, self._keys_at + offset

    def whole(
        self,
        rotations: tuple[int, int],
        parts: int,
        texts: int,
        slots: int,
        chains: int,
        steps: int,
        logits: int,
    ) -> Any:
        """To be given to paceline_block_run. rotations: addresses of cosines and sines."""
        part, text, chain, numbers, sure = self._at
        reading = parts, self._taps, part, *rotations
        filling = texts, slots, text, *rotations
        chaining = chains, steps, chain, numbers, sure, logits
        _DRAFTING.pack_into(self._drafting, 0, *reading, *filling, *chaining)
        return self._given


class _Rotations:
    """Cosines and sines by position; grows with the highest position used."""

    def __init__(self, shape: BlockConfig) -> None:
        dims = np.arange(0, shape.head_dim, 2, dtype=np.float32)
        self._frequencies = np.float32(shape.theta) ** (-dims / np.float32(shape.head_dim))
        self._cos = self._sin = np.empty((0, len(dims)), np.float32)
        self._at = (0, 0)

    def up_to(self, length: int) -> tuple[int, int]:
        """Addresses of both, valid until a higher position is used."""
        if length > len(self._cos):
            stop = -(-length // _GROWTH) * _GROWTH
            angles = (np.arange(stop, dtype=np.float32)[:, None] * self._frequencies).astype(np.float64)
            self._cos, self._sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
            self._at = (int(self._cos.ctypes.data), int(self._sin.ctypes.data))
        return self._at


def _layers(shape: BlockConfig, own: Mapping[str, Tensor], weights: Int8Weights) -> "c.Array[library.Layer]":
    layers = (library.Layer * shape.layers)()
    for i in range(shape.layers):
        for name in ("q", "k", "v", "o", "down"):
            setattr(layers[i], name, weights.matrix(own[f"layers.{i}.{name}.weight"]))
        layers[i].gate, layers[i].up = weights.matrices(
            [own[f"layers.{i}.{name}.weight"] for name in ("gate", "up")]
        )
        for name in ("attn_norm", "ffn_norm", "q_norm", "k_norm"):
            setattr(layers[i], name, weights.floats(own[f"layers.{i}.{name}.weight"]))
    return layers


def _model(
    shape: BlockConfig,
    own: Mapping[str, Tensor],
    embeddings: PackedEmbeddings,
    weights: Int8Weights,
    layers: Any,
    ids: Tensor,
) -> library.BlockModel:
    return library.BlockModel(
        layers=shape.layers,
        width=shape.width,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        draft_vocab=shape.draft_vocab,
        block=shape.block,
        rank=shape.markov_rank,
        norm_eps=shape.norm_eps,
        attn_scale=shape.head_dim**-0.5,
        embed_scale=embeddings.embed_scale,
        sure_bias=float(own["sure.bias"]),
        layer=c.addressof(layers),
        embed=embeddings.embed.linear,
        fc=weights.matrix(own["fc.weight"]),
        head=weights.matrix(embeddings.head[ids]),
        markov_out=weights.matrix(own["markov_out.weight"]),
        context_norm=weights.floats(own["context_norm.weight"]),
        norm=weights.floats(own["norm.weight"]),
        mask=weights.floats(own["mask"]),
        sure=weights.floats(own["sure.weight"]),
        ids=_at(ids),
        weights=weights.start,
        weights_bytes=weights.used,
        markov_in=weights.floats(own["markov_in.weight"]),  # the last: of this only some rows are read
    )
