"""Packed matrices, small quantised models and block heads, and native targets made of them."""

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config import EngineConfig
from paceline.errors import NotCompiled
from paceline.heads.base import DenseTargetEmbeddings
from paceline.heads.block import BlockConfig, BlockHead
from paceline.heads.runner import AnchorContext, BlockOutput, BlockRunner, CacheRows, TapInput
from paceline.target import hardware
from paceline.target.load import load_target
from paceline.target.native import library
from paceline.target.native.block_head import NativeBlock
from paceline.target.native.embeddings import PackedEmbeddings, PackedTable
from paceline.target.native.int8_weights import Int8Weights, bytes_for
from paceline.target.native.library import (
    CODE_BYTES,
    FORMATS,
    GROUP,
    SCALE_BYTES,
    SCALE_GROUPS,
    TILE,
    UNIT,
    Linear,
)
from paceline.target.native.packing import TO_FOUR_BITS
from paceline.target.native.target import NativeTarget
from paceline.target.native.threads import ThreadPool
from paceline.target.weights.dequant import ENCODINGS
from paceline.target.weights.model_config import Weights
from paceline.train.data.dataset import Answers
from paceline.train.recipe import TrainConfig, new_recipe
from paceline.train.train_decoder import TrainDecoder
from paceline.train.trainer import train
from support import tiny_gguf
from support.models import VOCAB, random_weights
from support.tiny_gguf import Sizes

# Of this architecture; test_arm.py runs the others emulated. Tiles, where instructions are not only listed.
OTHERS = {path for path in library.NEEDS if path.startswith("avx" if hardware.on_arm() else "neon")}
OTHERS |= set() if library.usable(library.TILES) else {library.TILES}
PATHS = tuple(path for path in library.NEEDS if path not in OTHERS)
FROM_FLOATS = ("F32", TO_FOUR_BITS)
KINDS = tuple(kind for kind in library.ENCODINGS if kind not in FROM_FLOATS)
GUARD = 0xA5  # what must be left around a packed matrix

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


def every_path() -> list[Any]:
    """Parameters of a test: all paths, those that cannot run here skipped with the reason."""

    def marks(path: str) -> list[pytest.MarkDecorator]:
        reason = f"the CPU lists no {path.replace('_', '-')}"
        skipped = pytest.mark.skipif(not hardware.has(library.NEEDS[path]), reason=reason)
        return [skipped, pytest.mark.slow] if path == "portable" else [skipped]

    return [pytest.param(path, marks=marks(path)) for path in PATHS]


def runnable() -> list[str]:
    return [path for path in PATHS if hardware.has(library.NEEDS[path])]


def built(path: str) -> ctypes.CDLL:
    try:
        return library.load(path)
    except NotCompiled as error:
        pytest.skip(str(error))


def block_elements(kind: str) -> int:
    return ENCODINGS[kind].elements if kind not in FROM_FLOATS else GROUP


# Bytes of a block where a half-precision number starts.
HALVES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_K", "Q5_K", "Q4_1", "Q5_1"), (0, 2)),
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), (0,)),
    "Q6_K": (208,),
    "Q3_K": (108,),
    "MXFP4": (),
}


def random_blocks(
    kind: str, outputs: int, inputs: int, random: np.random.Generator, tame: bool = False
) -> Bytes:
    """[outputs, bytes]: any bytes, but finite half-precision numbers. tame: of about the same size."""
    encoding = ENCODINGS[kind]
    count = outputs * inputs // encoding.elements
    blocks = random.integers(0, 256, (count, encoding.nbytes), dtype=np.uint8)
    if kind == "MXFP4":  # powers of two that a half has
        blocks[:, 0] = random.integers(*((127, 130) if tame else (104, 144)), count)
    for at in HALVES[kind]:
        if tame:
            halves = (random.uniform(0.5, 2, count) * random.choice((-1, 1), count)).astype(np.float16)
        else:  # every finite number, denormal ones and zeros of both signs too
            halves = random.integers(0, 0x7C00, count).astype(np.uint16).view(np.float16)
            halves *= random.choice((-1, 1), count).astype(np.float16)
        blocks[:, at : at + 2] = halves[:, None].view(np.uint8)
    return blocks.reshape(outputs, -1)


def small_blocks(kind: str, outputs: int, inputs: int, random: np.random.Generator) -> Bytes:
    """Of weights whose standard deviation is about inputs ** -0.5, as those of a model."""
    blocks = random_blocks(kind, outputs, inputs, random, tame=True)
    factor = inputs**-0.5 / decoded(kind, blocks[:16]).std()
    flat = blocks.reshape(-1, ENCODINGS[kind].nbytes)
    if kind == "MXFP4":
        flat[:, 0] += np.uint8(np.rint(np.log2(factor)) % 256)
    for at in HALVES[kind]:
        halves = flat[:, at : at + 2].copy().view(np.float16)
        flat[:, at : at + 2] = (halves * factor).astype(np.float16).view(np.uint8)
    return flat.reshape(blocks.shape)


def decoded(kind: str, blocks: Bytes) -> Floats:
    """The weights as weights/dequant.py decodes them, [outputs, inputs]."""
    encoding = ENCODINGS[kind]
    flat = np.ascontiguousarray(blocks).reshape(-1, encoding.nbytes)
    out = np.empty((len(flat), encoding.elements), np.float32)
    encoding.decode(flat, out)
    return out.reshape(len(blocks), -1)


def without_base(kind: str, blocks: Bytes) -> Bytes:
    """The same blocks with their minima or bases zero."""
    flat = blocks.reshape(-1, ENCODINGS[kind].nbytes).copy()
    for at in HALVES[kind][1:]:
        flat[:, at : at + 2] = 0
    return flat.reshape(blocks.shape)


@dataclass
class Packed:
    linear: Linear
    memory: Bytes  # what the structure points at, with guards around codes and scales

    def unpacked(self, lib: ctypes.CDLL) -> Floats:
        found = np.full((self.linear.outputs, self.linear.inputs), np.nan, np.float32)
        rows = np.arange(len(found), dtype=np.int32)
        lib.paceline_unpack(ctypes.byref(self.linear), rows.ctypes.data, len(rows), found.ctypes.data)
        return found

    def times(self, lib: ctypes.CDLL, x: Floats) -> Floats:
        """x [rows, inputs] to [rows, outputs], padded ones too."""
        x = np.ascontiguousarray(x, np.float32)
        assert x.shape[1] == self.linear.inputs
        out = np.full((len(x) + 1, self.linear.outputs), np.nan, np.float32)
        assert not lib.paceline_multiply(ctypes.byref(self.linear), x.ctypes.data, len(x), out.ctypes.data)
        assert np.isnan(out[len(x)]).all(), "written past the last row"
        return out[: len(x)]


def up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def pack(
    lib: ctypes.CDLL, kind: str, *sources: Bytes, order: NDArray[np.int32] | None = None, pieces: int = 1
) -> list[Packed]:
    """Packs matrices of one shape; several of them are woven, pair of tiles by pair of tiles.

    A source holds encoded rows, or whole groups of floats as bytes where these are rounded. order: the
    source's row that each output shows. pieces: how many calls share the work.
    """
    shown = len(sources[0]) if order is None else len(order)
    outputs, inputs = up(shown, UNIT), sources[0].shape[1] // _block_bytes(kind) * block_elements(kind)
    form = library.ENCODINGS[kind]
    codes = inputs // GROUP * CODE_BYTES[form]  # of a tile
    scales = inputs // GROUP // SCALE_GROUPS[form] * SCALE_BYTES[form]
    tiles, woven = outputs // TILE, len(sources)
    sizes = [woven * tiles * codes, woven * tiles * scales]
    memory = np.full(sum(sizes) + 4 * 64, GUARD, np.uint8)
    first = -memory.ctypes.data % 64 + 64
    second = up(first + sizes[0] + 64, 64)
    rows = np.full(outputs, -1, np.int32)
    rows[:shown] = np.arange(shown) if order is None else order
    packed = []
    for i, source in enumerate(sources):
        linear = Linear(
            format=FORMATS.index(form),
            outputs=outputs,
            inputs=inputs,
            codes=memory.ctypes.data + first + 2 * i * codes,
            scales=memory.ctypes.data + second + 2 * i * scales,
            codes_pair=2 * woven * codes,
            scales_pair=2 * woven * scales,
        )
        bytes_ = np.ascontiguousarray(source)
        cuts = [tiles * p // pieces for p in range(pieces + 1)]
        for begin, end in pairwise(cuts):
            lib.paceline_pack(
                list(library.ENCODINGS).index(kind),
                *(bytes_.ctypes.data, bytes_.strides[0], inputs // GROUP, rows.ctypes.data),
                *(ctypes.byref(linear), begin, end),
            )
        packed.append(Packed(linear, memory))
    outside = np.ones(len(memory), bool)
    outside[first : first + sizes[0]] = outside[second : second + sizes[1]] = False
    assert (memory[outside] == GUARD).all(), "written outside of codes and scales"
    return packed


def _block_bytes(kind: str) -> int:
    return ENCODINGS[kind].nbytes if kind not in FROM_FLOATS else 4 * GROUP


def quantised(x: Floats) -> tuple[Floats, Floats]:
    """Codes and scales [.., groups, 1] of rows, as a pass takes them."""
    groups = np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, GROUP)
    most = np.abs(groups).max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(most > 0, np.float32(127) / most, np.float32(0)).astype(np.float32)
    return np.rint(groups * inverse), most / np.float32(127)


def as_taken(x: Floats) -> Doubles:
    """Rows after their way through eight bits."""
    codes, scales = quantised(x)
    return (codes.astype(np.float64) * scales.astype(np.float64)).reshape(x.shape)


# A vocabulary and a feed-forward width that are no multiple of a tile.
SIZES = Sizes(layers=2, width=256, heads=4, kv_heads=2, head_dim=64, ff=512, vocab=131, context=4096)
# Every encoding somewhere; gate and up are encoded alike in one layer, and so woven, and not in the other.
MIX: Mapping[str, tuple[str, str]] = {
    "attn_q": ("Q4_K", "Q3_K"),
    "attn_k": ("Q5_K", "Q5_0"),
    "attn_v": ("Q6_K", "Q5_1"),
    "attn_output": ("Q4_0", "Q8_0"),
    "ffn_gate": ("Q4_1", "Q4_K"),
    "ffn_up": ("Q4_1", "Q5_K"),
    "ffn_down": ("Q8_0", "Q6_K"),
    "ffn_gate_inp": ("F32", "F32"),
    "ffn_gate_exps": ("Q4_1", "Q4_K"),
    "ffn_up_exps": ("Q4_1", "Q5_K"),
    "ffn_down_exps": ("Q8_0", "Q6_K"),
}


def sized(head_dim: int, heads: int, kv_heads: int, ff: int = 512, vocab: int = 131) -> Sizes:
    return Sizes(2, 256, heads, kv_heads, head_dim, ff, vocab, 4096)


def mixed(name: str) -> str:
    """The encoding of a tensor in a file of every encoding."""
    if not name.startswith("blk."):
        return "Q6_K"
    _, layer, part, kind = name.split(".")
    return "F32" if kind == "bias" else MIX[part][int(layer) % 2]


def tiny_model(
    path: Path,
    family: str = "llama",
    kind: str | None = None,
    sizes: Sizes = SIZES,
    tied: bool = True,
    seed: int = 0,
    **text: Any,
) -> Path:
    """A model whose activations stay near one; matrices are all of one kind, or mixed; text: a tokenizer."""
    random = np.random.default_rng(seed + 1000)
    weights = tiny_gguf.tensors(family, seed, sizes)
    if not tied:
        weights["output.weight"] = random.standard_normal((sizes.vocab, sizes.width), dtype=np.float32)
    for name, values in weights.items():
        if name.endswith("norm.weight"):
            values *= 0.3
            values += 1
        elif values.ndim > 1:
            values *= 0.5 if name == "token_embd.weight" else values.shape[-1] ** -0.5
        else:
            values *= 0.3
    kinds = {name: kind or mixed(name) for name, values in weights.items() if values.ndim > 1}
    as_they_are = ("ffn_gate_inp.weight", "bias")  # by converters
    kinds |= {name: "F32" for name in kinds if name.endswith(as_they_are)}
    return tiny_gguf.write(path, family, weights, kinds, sizes.settings(family), **text)


def wanted_path() -> str:
    """The path that $PACELINE_CPU asks for, or the best one; a test is skipped where there is none."""
    path = library.best_path(library.chosen())
    if path is None or library.chosen() == "torch":
        pytest.skip(f"no native path here for {library.SETTING}={library.chosen()}")
    built(path)
    return path


@contextmanager
def every_core() -> Iterator[None]:
    """Threads that begin here may run on any core, though a worker of the tests has but one."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def native_target(
    model: Path,
    path: str | None = None,
    threads: int = 2,
    cache_mb: int = 16,
    dtype: str = "auto",
    home: Path | None = None,
    max_batch: int = 16,
) -> NativeTarget:
    """On one path, or on the wanted one. home: where packed weights go, if not beside the model."""
    path = path or wanted_path()
    built(path)  # before the folder changes, so that it is not built anew in each
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            library.SETTING, next(c for c in list(library.CHOICES)[1:] if path in library.CHOICES[c])
        )
        patch.setattr(library, "best_path", lambda _: path)  # a processor may have a better one
        patch.setenv("PACELINE_HOME", str(home or model.parent / "home"))
        patch.setattr("paceline.limits.cores", lambda: threads)  # a setting may not exceed them
        config = EngineConfig(device="cpu", dtype=dtype, cache_mb=cache_mb, max_batch=max_batch)
        with every_core():
            target = load_target(model, config)
    assert isinstance(target, NativeTarget)
    assert (target.path, target.threads) == (path, threads)
    return target


# Widths that are no multiple of a tile where that is allowed; one KV head, and several.
SHAPES = {
    "odd": BlockConfig(64, 4, 2, 32, 80, VOCAB, 50, (0, 3), 2, 5, 32),
    "one head": BlockConfig(96, 3, 1, 64, 96, VOCAB, VOCAB, (1,), 1, 8, 64),
    "large heads": BlockConfig(64, 6, 3, 96, 128, VOCAB, 33, (0, 1, 2), 3, 7, 32, theta=100.0),
}


def a_net(shape: BlockConfig, seed: int = 0) -> BlockHead:
    """Every weight matters."""
    generator = torch.Generator().manual_seed(seed)
    embed, head = (torch.randn(VOCAB, shape.width, generator=generator) for _ in range(2))
    pieces = DenseTargetEmbeddings(embed, head, torch.ones(shape.width), "random", embed_scale=1.5)
    ids = torch.randperm(VOCAB, generator=generator)[: shape.draft_vocab].sort().values
    net = BlockHead(shape, pieces, ids)
    net.init_weights(pieces, generator)
    with torch.no_grad():
        for weight in net.parameters():
            scale = 0.3 if weight.dim() == 1 else weight.shape[1] ** -0.5
            weight.add_(scale * torch.randn(weight.shape, generator=generator))
    return net.eval()


def a_pool(path: str | None = None, threads: int = 2) -> ThreadPool:
    path = path or wanted_path()
    built(path)
    with every_core():
        return ThreadPool(path, threads)


def native(net: BlockHead, path: str | None = None, threads: int = 2) -> NativeBlock:
    return beside(net, a_pool(path, threads))


def beside(net: BlockHead, pool: ThreadPool) -> NativeBlock:
    """With what a target would lend it whose pieces are the net's, in 8 bits."""
    assert isinstance(net.embed, Tensor)
    size = len(net.embed), net.shape.width
    weights = Int8Weights(pool.lib, bytes_for([size, size]))
    whole = torch.zeros(size)
    whole[net.draft_ids] = net.head
    embed, head = (PackedTable(pool.lib, weights.matrix(of), size, weights) for of in (net.embed, whole))
    lent = PackedEmbeddings(embed, head, torch.ones(net.shape.width), "random", net.embed_scale)
    return NativeBlock(net.shape, net.draft_ids, net.state_dict(), lent, pool)


def some_hidden(shape: BlockConfig, count: int, seed: int = 0) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {tap: 3 * torch.randn(count, shape.width, generator=generator) for tap in shape.taps}


def rows_of(runner: BlockRunner, shape: BlockConfig, hidden: dict[int, Tensor], start: int = 0) -> Tensor:
    count = len(next(iter(hidden.values())))
    rows = runner.like.new_empty(count, shape.layers, 2, shape.kv_heads, shape.head_dim)
    runner.read([TapInput(start, hidden, all_of(rows))])
    return rows


def all_of(rows: Tensor) -> CacheRows:
    return CacheRows(rows, 0, len(rows))


def a_text(runner: BlockRunner, shape: BlockConfig, count: int, seed: int = 0) -> AnchorContext:
    rows = rows_of(runner, shape, some_hidden(shape, count, seed))
    return AnchorContext(7 + seed, count, range(count), all_of(rows))


def as_float32(block: BlockOutput) -> BlockOutput:
    return BlockOutput(block.slots, block.base[: block.slots].clone(), block.hidden[: block.slots].clone())


@cache
def a_target() -> Weights:
    weights = random_weights(0, width=64, layers=5, head_dim=32)
    head = torch.randn(VOCAB, 64, generator=torch.Generator().manual_seed(100))
    return Weights(weights.shape, {**weights.tensors, "head": head}, weights.fingerprint)


@cache
def a_dense() -> TrainDecoder:
    return TrainDecoder(a_target(), "cpu", torch.float32)


@cache
def its_words(count: int = 16, length: int = 40, prompt: int = 3) -> list[list[int]]:
    """Greedy text after random prompts."""
    model = a_dense()
    tokens = torch.randint(0, VOCAB, (count, prompt), generator=torch.Generator().manual_seed(1))
    while tokens.shape[1] < length:
        _, final = model.features(tokens)
        tokens = torch.cat((tokens, model.logits(final[:, -1]).argmax(-1)[:, None]), 1)
    return tokens.tolist()


@cache
def a_trained_net(steps: int = 120) -> BlockHead:
    """Right often enough, wrong often enough."""
    rows, no = its_words(), [False] * len(its_words())
    told = {"sampled": no, "held_out": no, "constrained": no, "always": (), "tokenizer": "none"}
    model = a_dense()
    answers = Answers.of(
        [row[:3] for row in rows],
        [row[3:] for row in rows],
        vocab_size=VOCAB,
        target=model.fingerprint,
        **told,  # type: ignore[arg-type]
    )
    config = TrainConfig(
        steps=steps, taps=2, draft_vocab=VOCAB, layers=1, block=4, markov_rank=32, anchors=16, lr=8e-3
    )
    made = new_recipe(config, model, torch.arange(VOCAB))
    train(made, model, lambda seed: answers.batches(seed, 8 * 40, 40), config)
    assert isinstance(made.net, BlockHead)
    return made.net.eval()
