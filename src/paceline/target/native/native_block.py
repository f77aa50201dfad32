"""The network that fills blocks in C++: see heads/block.py for what it is, block.cpp for how it runs."""

import ctypes as c
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from paceline.errors import ModelError
from paceline.heads.block import BlockNet, BlockShape
from paceline.heads.block_runner import Before, BlockRunner, Filled, Floats, Place, Read
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
        self._read, self._fill = lib.paceline_block_read, lib.paceline_block_fill
        self._chain = lib.paceline_block_chain
        self._embed, self._number = net.embed.contiguous(), net.number.tolist()
        self._ids = net.draft_ids.tolist()
        self._turn = _Rotations(net.shape)
        weights = DenseWeights(lib, room_for([*net.parameters(), net.head]))
        layers = _layers(net, weights)
        model = _model(net, weights, layers)
        self._outputs: int = model.head.outputs
        self._held = (weights, layers)  # what the C++ side points at
        self._filler = lib.paceline_block_open(c.byref(model), team.handle)
        if not self._filler:
            raise ModelError("no memory for the native drafter")
        weakref.finalize(self, lib.paceline_block_close, self._filler).atexit = False

    def read(self, parts: Sequence[Read]) -> None:
        taps = self._shape.taps
        hidden = [_rows(part.hidden[tap]) for part in parts for tap in taps]
        pointers = (c.c_void_p * len(hidden))(*map(_at, hidden))
        given, at = (library.Part * len(parts))(), c.addressof(pointers)
        for to, part in zip(given, parts, strict=True):
            to.hidden, to.context, to.start, to.rows = (
                at,
                self._context(part.rows),
                part.start,
                len(part.rows),
            )
            at += c.sizeof(c.c_void_p) * len(taps)
        turn = self._turn.up_to(max(part.start + len(part.rows) for part in parts))
        self._run(self._read, library.Reading(len(parts), len(taps), c.addressof(given), *turn))

    def fill(self, texts: Sequence[Before], slots: int) -> list[Filled]:
        filled = [self._room(text.old, slots) for text in texts]
        given = (library.Text * len(texts))()
        for to, text, block in zip(given, texts, filled, strict=True):
            if not 0 <= text.token < len(self._number):
                raise ValueError(f"token {text.token} is not one of the model's {len(self._number)}")
            to.anchor = _at(self._embed) + 4 * text.token * self._shape.width
            to.context, to.count, to.position = self._context(text.rows), len(text.rows), text.position
            to.hidden, to.base = _at(block.hidden), _at(block.base)
        turn = self._turn.up_to(max(text.position for text in texts) + self._shape.block)
        self._run(self._fill, library.Filling(len(texts), slots, c.addressof(given), *turn))
        return filled

    def _room(self, old: Filled | None, slots: int) -> Filled:
        """Memory that is used for the first time is slow: it is used again."""
        if old is not None:
            return replace(old, slots=slots)
        base = torch.empty(self._shape.block, self._outputs)[:, : self._shape.draft_vocab]
        return Filled(slots, base, torch.empty(self._shape.block, self._shape.width))

    def chains(
        self, places: Sequence[Place], sizes: Sequence[int]
    ) -> tuple[list[list[int]], list[list[float]]]:
        numbers, sure = self._chained(places, sizes, None)
        return [[self._ids[n] for n in chain] for chain in numbers.tolist()], sure.tolist()

    def look(self, places: Sequence[Place]) -> tuple[Floats, list[float]]:
        logits = np.empty((len(places), self._outputs), np.float32)
        _, sure = self._chained(places, [1] * len(places), logits)
        return logits[:, : self._shape.draft_vocab], sure[:, 0].tolist()

    def _chained(
        self, places: Sequence[Place], sizes: Sequence[int], logits: Floats | None
    ) -> tuple[Any, Floats]:
        """Numbers of the likeliest tokens and the logits of confidence, each [places, steps]."""
        steps = max(sizes)
        numbers, sure = np.zeros((len(places), steps), np.int32), np.zeros((len(places), steps), np.float32)
        chains = (library.Chain * len(places))()
        for chain, place, size in zip(chains, places, sizes, strict=True):
            block = place.block
            if not 0 < size <= block.slots - place.slot:
                raise ValueError(f"{size} guesses from slot {place.slot} on are not in this block")
            chain.base, chain.hidden = _at(block.base), _at(block.hidden)
            chain.place, chain.previous, chain.steps = place.slot, self._number[place.previous], size
        given = library.Chaining(
            len(places), steps, c.addressof(chains), _start(numbers), _start(sure), _start(logits)
        )
        self._run(self._chain, given)
        return numbers, sure

    def _context(self, rows: Tensor) -> int:
        if rows.dtype != torch.float16 or not rows.is_contiguous():
            raise ValueError("these rows are not of this runner's type")
        return _at(rows)

    def _run(self, function: Any, given: c.Structure) -> None:
        with self._team.busy():
            failed = function(self._filler, c.byref(given))
        if failed:
            raise ModelError("no memory for a pass of the drafter: give a smaller prefill_chunk or max_batch")


def _at(tensor: Tensor) -> int:
    return tensor.data_ptr()


def _start(array: Any) -> int | None:
    return None if array is None else int(array.ctypes.data)


def _rows(hidden: Tensor) -> Tensor:
    return hidden if hidden.dtype == torch.float32 and hidden.is_contiguous() else hidden.float().contiguous()


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
        markov_in=weights.floats(net.markov_in.weight),
        sure=weights.floats(net.sure.weight),
    )
