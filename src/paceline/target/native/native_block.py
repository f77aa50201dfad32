"""The network that fills blocks in C++: see heads/block.py for what it is, block.cpp for how it runs."""

import ctypes as c
import weakref
from collections.abc import Sequence
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
        self._shape, self._team, self._lib = net.shape, team, team.lib
        self._embed, self._number = net.embed.contiguous(), net.number.tolist()
        self._ids = net.draft_ids.tolist()
        self._turn = _Rotations(net.shape)
        weights = DenseWeights(self._lib, room_for([*net.parameters(), net.head]))
        layers = _layers(net, weights)
        model = _model(net, weights, layers)
        self._outputs: int = model.head.outputs
        self._held = (weights, layers)  # what the C++ side points at
        self._filler = self._lib.paceline_block_open(c.byref(model), team.handle)
        if not self._filler:
            raise ModelError("no memory for the native drafter")
        weakref.finalize(self, self._lib.paceline_block_close, self._filler).atexit = False

    def read(self, parts: Sequence[Read]) -> list[Tensor]:
        shape, taps = self._shape, self._shape.taps
        each = [torch.cat([part.hidden[tap] for tap in taps], -1) for part in parts]
        features = each[0] if len(each) == 1 else torch.cat(each)
        sizes = [len(rows) for rows in each]
        ends = [part.start + size for part, size in zip(parts, sizes, strict=True)]
        positions = np.concatenate(
            [np.arange(part.start, end, dtype=np.int32) for part, end in zip(parts, ends, strict=True)]
        )
        head = (shape.layers, 2, shape.kv_heads, shape.head_dim)
        context = torch.empty(len(features), *head, dtype=torch.float16)
        cosines, sines = self._turn.up_to(max(ends))
        self._run(
            self._lib.paceline_block_read,
            library.Reading(
                rows=len(features),
                features=_at(features.float().contiguous()),
                positions=positions.ctypes.data,
                cosines=cosines,
                sines=sines,
                context=_at(context),
            ),
        )
        return list(torch.split(context, sizes)) if len(sizes) > 1 else [context]

    def fill(self, texts: Sequence[Before], slots: int) -> list[Filled]:
        shape = self._shape
        hidden = torch.empty(len(texts), shape.block, shape.width)
        base = torch.empty(len(texts), slots, self._outputs)
        given = (library.Text * len(texts))(*(self._text(text) for text in texts))
        cosines, sines = self._turn.up_to(max(text.position for text in texts) + shape.block)
        self._run(
            self._lib.paceline_block_fill,
            library.Filling(
                texts=len(texts),
                slots=slots,
                text=c.addressof(given),
                cosines=cosines,
                sines=sines,
                hidden=_at(hidden),
                base=_at(base),
            ),
        )
        return [Filled(*both) for both in zip(base[:, :, : shape.draft_vocab], hidden, strict=True)]

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
            if not 0 < size <= len(block.base) - place.slot or block.base.stride(0) != self._outputs:
                raise ValueError(f"{size} guesses from slot {place.slot} on are not in this block")
            chain.base, chain.hidden = _at(block.base), _at(block.hidden)
            chain.place, chain.previous, chain.steps = place.slot, self._number[place.previous], size
        self._run(
            self._lib.paceline_block_chain,
            library.Chaining(
                chains=len(places),
                steps=steps,
                chain=c.addressof(chains),
                numbers=numbers.ctypes.data,
                sure=sure.ctypes.data,
                logits=None if logits is None else logits.ctypes.data,
            ),
        )
        return numbers, sure

    def _text(self, text: Before) -> library.Text:
        rows = text.rows
        if rows.dtype != torch.float16 or not rows.is_contiguous():
            raise ValueError("these rows were made by another runner")
        if not 0 <= text.token < len(self._embed):
            raise ValueError(f"token {text.token} is not one of the model's {len(self._embed)}")
        anchor = _at(self._embed) + 4 * text.token * self._shape.width
        return library.Text(anchor=anchor, context=_at(rows), count=len(rows), position=text.position)

    def _run(self, function: Any, given: c.Structure) -> None:
        with self._team.busy():
            failed = function(self._filler, c.byref(given))
        if failed:
            raise ModelError("no memory for a pass of the drafter: give a smaller prefill_chunk or max_batch")


def _at(tensor: Tensor) -> int:
    return tensor.data_ptr()


class _Rotations:
    """Cosines and sines by position; grows as positions are asked for."""

    def __init__(self, shape: BlockShape) -> None:
        dims = np.arange(0, shape.head_dim, 2, dtype=np.float32)
        self._frequencies = np.float32(shape.theta) ** (-dims / np.float32(shape.head_dim))
        self._cos = self._sin = np.empty((0, len(dims)), np.float32)

    def up_to(self, length: int) -> tuple[int, int]:
        """Where both start; good until more are asked for."""
        if length > len(self._cos):
            stop = -(-length // _GROWTH) * _GROWTH
            angles = (np.arange(stop, dtype=np.float32)[:, None] * self._frequencies).astype(np.float64)
            self._cos, self._sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        return self._cos.ctypes.data, self._sin.ctypes.data


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
