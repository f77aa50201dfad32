"""Networks that fill blocks, of shapes that the C++ takes, and teams for them."""

from functools import cache

import torch
from torch import Tensor

from paceline.heads.base import DenseTargetEmbeddings
from paceline.heads.block import BlockConfig, BlockHead
from paceline.heads.runner import AnchorContext, BlockOutput, BlockRunner, CacheRows, TapInput
from paceline.target.native.block_head import NativeBlock
from paceline.target.native.embeddings import PackedEmbeddings, PackedTable
from paceline.target.native.int8_weights import Int8Weights, bytes_for
from paceline.target.native.threads import ThreadPool
from paceline.target.weights.model_config import Weights
from paceline.train.data.dataset import Answers
from paceline.train.recipe import TrainConfig, new_recipe
from paceline.train.train_decoder import TrainDecoder
from paceline.train.trainer import train
from support.native_cases import wanted_path
from support.packed_cases import built
from support.torch_cases import VOCAB, random_weights

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
