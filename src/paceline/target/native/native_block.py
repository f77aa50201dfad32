"""The network that fills blocks in C++: see heads/block.py for what it is, block.cpp for how it runs."""

import ctypes as c
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from paceline.errors import ModelError
from paceline.heads.block import BlockNet, BlockShape
from paceline.heads.block_runner import (
    Before,
    BlockRunner,
    Filled,
    First,
    Floats,
    Place,
    Read,
    Rows,
    Said,
    places_of,
)
from paceline.target.native import library
from paceline.target.native.dense import DenseWeights, room_for
from paceline.target.native.library import GROUP, MOST_HEAD_DIM
from paceline.target.native.team import NativeTeam

_GROWTH: Final = 1024  # positions


def reason_against(net: BlockNet) -> str | None:
    """Why a network cannot run natively, or None."""
    shape = net.shape
    if net.embed.device.type != "cpu" or net.embed.dtype != torch.float32:
        return f"its pieces are {net.embed.dtype} on {net.embed.device.type}"
    for name in ("width", "head_dim", "markov_rank"):
        if getattr(shape, name) % GROUP:
            return f"{name} is {getattr(shape, name)}, no multiple of {GROUP}"
    return f"heads of {shape.head_dim}" if shape.head_dim > MOST_HEAD_DIM else None


class NativeBlock(BlockRunner):
    """A block's bits depend on its own text alone. Runs on the threads of its target."""

    def __init__(self, net: BlockNet, team: NativeTeam) -> None:
        lib = team.lib
        self.like = torch.empty(0, dtype=torch.float16)
        self._shape, self._team = net.shape, team
        self._embed, self._number = net.embed.contiguous(), net.number.tolist()
        self._embed_at = _at(self._embed)
        self._row_bytes = 2 * net.shape.layers * 2 * net.shape.kv_heads * net.shape.head_dim
        self._ids = net.draft_ids.tolist()
        self._turn = _Rotations(net.shape)
        weights = DenseWeights(lib, room_for([*net.parameters(), net.head]))
        layers = _layers(net, weights)
        model = _model(net, weights, layers)
        self._outputs: int = model.head.outputs
        self._held = (weights, layers)  # what the C++ side points at
        self._native = lib.paceline_block_run
        self._filler = lib.paceline_block_open(c.byref(model), team.handle)
        if not self._filler:
            raise ModelError("no memory for the native drafter")
        weakref.finalize(self, lib.paceline_block_close, self._filler).atexit = False
        self._call = _Call(net.shape)

    def read(self, parts: Sequence[Read]) -> None:
        with self._calling(len(parts)):
            self._reading(parts)
            self._run()

    def fill(self, texts: Sequence[Before], slots: int) -> list[Filled]:
        with self._calling(len(texts)):
            filled = self._filling(texts, slots)
            self._run()
            return filled

    def chains(self, places: Sequence[Place], sizes: Sequence[int]) -> Said:
        with self._calling(len(places)):
            self._chaining(places, sizes)
            self._run()
            return self._said(sizes)

    def guess(
        self,
        parts: Sequence[Read],
        texts: Sequence[Before],
        slots: int,
        firsts: Sequence[First],
        sizes: Sequence[int],
    ) -> tuple[list[Filled], Said]:
        with self._calling(max(len(parts), len(texts))):
            if parts:
                self._reading(parts)
            filled = self._filling(texts, slots)
            self._chaining(places_of(filled, firsts), sizes)
            self._run()
            return filled, self._said(sizes)

    def look(self, places: Sequence[Place]) -> tuple[Floats, list[float]]:
        logits = np.empty((len(places), self._outputs), np.float32)
        sizes = [1] * len(places)
        with self._calling(len(places)):
            self._chaining(places, sizes, logits.ctypes.data)
            self._run()
            _, sure = self._said(sizes)
        return logits[:, : self._shape.draft_vocab], [chances[0] for chances in sure]

    @contextmanager
    def _calling(self, many: int) -> Iterator[None]:
        with self._team.busy():
            self._call.need(many)
            try:
                yield
            finally:
                self._call.reset()

    def _reading(self, parts: Sequence[Read]) -> None:
        call = self._call
        held = [states for part in parts for states in self._states(part)]
        call.hidden[: len(held)] = list(map(_at, held))
        for to, part in zip(call.parts, parts, strict=False):
            to.context, to.start, to.rows = self._context(part.rows), part.start, part.rows.count
        call.held = held
        call.reading.parts = len(parts)
        last = max(part.start + part.rows.count for part in parts)
        call.reading.cosines, call.reading.sines = self._turn.up_to(last)

    def _states(self, part: Read) -> list[Tensor]:
        found = [part.hidden[tap] for tap in self._shape.taps]
        if found[0].dtype == torch.float32 and found[0].is_contiguous():  # then so are the others of the pass
            return found
        return [states.float().contiguous() for states in found]

    def _filling(self, texts: Sequence[Before], slots: int) -> list[Filled]:
        call, filled = self._call, [self._room(text.old, slots) for text in texts]
        for to, text, block in zip(call.texts, texts, filled, strict=False):
            if not 0 <= text.token < len(self._number):
                raise ValueError(f"token {text.token} is not one of the model's {len(self._number)}")
            to.anchor = self._embed_at + 4 * text.token * self._shape.width
            to.context, to.count, to.position = self._context(text.rows), text.rows.count, text.position
            to.hidden, to.base = _at(block.hidden), _at(block.base)
        call.filling.texts, call.filling.slots = len(texts), slots
        last = max(text.position for text in texts) + self._shape.block
        call.filling.cosines, call.filling.sines = self._turn.up_to(last)
        call.reading.cosines, call.reading.sines = call.filling.cosines, call.filling.sines
        return filled

    def _room(self, old: Filled | None, slots: int) -> Filled:
        """Memory that is used for the first time is slow: it is used again."""
        if old is not None:
            return Filled(slots, old.base, old.hidden)
        base = torch.empty(self._shape.block, self._outputs)[:, : self._shape.draft_vocab]
        return Filled(slots, base, torch.empty(self._shape.block, self._shape.width))

    def _chaining(self, places: Sequence[Place], sizes: Sequence[int], logits: int | None = None) -> None:
        call = self._call
        for to, place, size in zip(call.chains, places, sizes, strict=False):
            block = place.block
            if not 0 < size <= block.slots - place.slot:
                raise ValueError(f"{size} guesses from slot {place.slot} on are not in this block")
            to.base, to.hidden = _at(block.base), _at(block.hidden)
            to.place, to.previous, to.steps = place.slot, self._number[place.previous], size
        call.chaining.chains, call.chaining.steps = len(places), max(sizes)
        call.chaining.logits = logits

    def _said(self, sizes: Sequence[int]) -> Said:
        """Tokens and logits of confidence, as the last call left them."""
        call, steps, ids = self._call, max(sizes), self._ids
        starts = range(0, len(sizes) * steps, steps)
        tokens = [[ids[n] for n in call.numbers[at : at + steps]] for at in starts]
        return tokens, [call.sure[at : at + steps] for at in starts]

    def _context(self, rows: Rows) -> int:
        whole = rows.whole
        if whole.dtype != torch.float16 or not whole.is_contiguous():
            raise ValueError("these rows are not of this runner's type")
        return _at(whole) + rows.first * self._row_bytes

    def _run(self) -> None:
        if self._native(self._filler, self._call.given):
            raise ModelError("no memory for a pass of the drafter: give a smaller prefill_chunk or max_batch")
        self._team.held = self._held


class _Call:
    """What a call hands over. It is used again: to make it anew would take as long as some of the layers."""

    def __init__(self, shape: BlockShape) -> None:
        self._shape, self._many = shape, 0
        self._drafting = library.Drafting()
        self.given = c.byref(self._drafting)
        self.reading, self.filling = self._drafting.reading, self._drafting.filling
        self.chaining = self._drafting.chaining
        self.held: list[Tensor] = []  # what is read from
        self.need(1)

    def reset(self) -> None:
        self.reading.parts = self.filling.texts = self.chaining.chains = 0
        self.held = []

    def need(self, many: int) -> None:
        """Room for so many sequences; what was there is lost."""
        if many <= self._many:
            return
        taps = len(self._shape.taps)
        self._many, guesses = many, many * self._shape.block
        self.hidden = (c.c_void_p * (many * taps))()  # of each part, of each layer tapped
        self.parts, self.texts = (library.Part * many)(), (library.Text * many)()
        self.chains = (library.Chain * many)()
        self.numbers, self.sure = (c.c_int32 * guesses)(), (c.c_float * guesses)()
        for i, part in enumerate(self.parts):
            part.hidden = c.addressof(self.hidden) + i * taps * c.sizeof(c.c_void_p)
        self.reading.taps, self.reading.part = taps, c.addressof(self.parts)
        self.filling.text, self.chaining.chain = c.addressof(self.texts), c.addressof(self.chains)
        self.chaining.numbers, self.chaining.sure = c.addressof(self.numbers), c.addressof(self.sure)


def _at(tensor: Tensor) -> int:
    return tensor.data_ptr()


class _Rotations:
    """Cosines and sines by position; grows as positions are asked for."""

    def __init__(self, shape: BlockShape) -> None:
        dims = np.arange(0, shape.head_dim, 2, dtype=np.float32)
        self._frequencies = np.float32(shape.theta) ** (-dims / np.float32(shape.head_dim))
        self._cos = self._sin = np.empty((0, len(dims)), np.float32)
        self._at = (0, 0)

    def up_to(self, length: int) -> tuple[int, int]:
        """Where both start; good until more are asked for."""
        if length > len(self._cos):
            stop = -(-length // _GROWTH) * _GROWTH
            angles = (np.arange(stop, dtype=np.float32)[:, None] * self._frequencies).astype(np.float64)
            self._cos, self._sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
            self._at = (int(self._cos.ctypes.data), int(self._sin.ctypes.data))
        return self._at


def _layers(net: BlockNet, weights: DenseWeights) -> "c.Array[library.Layer]":
    layers = (library.Layer * net.shape.layers)()
    own = net.state_dict()
    for i in range(net.shape.layers):
        for name in ("q", "k", "v", "o", "down"):
            setattr(layers[i], name, weights.matrix(own[f"layers.{i}.{name}.weight"]))
        layers[i].gate, layers[i].up = weights.matrices(
            [own[f"layers.{i}.{name}.weight"] for name in ("gate", "up")]
        )
        for name in ("attn_norm", "ffn_norm", "q_norm", "k_norm"):
            setattr(layers[i], name, weights.floats(own[f"layers.{i}.{name}.weight"]))
    return layers


def _model(net: BlockNet, weights: DenseWeights, layers: Any) -> library.BlockModel:
    shape = net.shape
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
        embed_scale=net.embed_scale,
        sure_bias=float(net.sure.bias.detach()),
        layer=c.addressof(layers),
        fc=weights.matrix(net.fc.weight),
        head=weights.matrix(net.head),
        markov_out=weights.matrix(net.markov_out.weight),
        context_norm=weights.floats(net.context_norm.weight),
        norm=weights.floats(net.norm.weight),
        mask=weights.floats(net.mask),
        sure=weights.floats(net.sure.weight),
        weights=weights.start,
        weights_bytes=weights.used,
        markov_in=weights.floats(net.markov_in.weight),  # the last: of this only some rows are read
    )
