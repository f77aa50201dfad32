"""A tiny target that writes varied text, what it says, and heads for it."""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from paceline.heads.block import BlockConfig, BlockHead
from paceline.target.weights.model_config import Weights
from paceline.train.data.dataset import Answers, Batch
from paceline.train.evaluate import RecordedText
from paceline.train.recipe import TrainConfig, new_recipe, pieces_of
from paceline.train.train_decoder import TrainDecoder
from paceline.train.trainer import train
from support.torch_cases import VOCAB, random_weights

PROMPT = 3  # tokens


def tiny_weights(seed: int = 0) -> Weights:
    """Its head is not its embedding, or it would repeat one token."""
    weights = random_weights(seed, width=48, layers=5)
    head = torch.randn(VOCAB, 48, generator=torch.Generator().manual_seed(seed + 100))
    return Weights(weights.shape, {**weights.tensors, "head": head}, weights.fingerprint)


@cache
def tiny_model() -> TrainDecoder:
    return TrainDecoder(tiny_weights(), "cpu", torch.float32)


@cache
def said(count: int = 16, length: int = 40) -> Tensor:
    """[count, length]: greedy text after prompts of PROMPT tokens."""
    model = tiny_model()
    tokens = torch.randint(0, VOCAB, (count, PROMPT), generator=torch.Generator().manual_seed(1))
    while tokens.shape[1] < length:
        _, final = model.features(tokens)
        tokens = torch.cat((tokens, model.logits(final[:, -1]).argmax(-1)[:, None]), 1)
    return tokens


def own(tokens: Tensor) -> Tensor:
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, :PROMPT] = False
    return mask


def recorded(tokens: Tensor) -> list[RecordedText]:
    mask = own(tokens)
    return [RecordedText(row.tolist(), of.tolist()) for row, of in zip(tokens, mask, strict=True)]


def batches(seed: int) -> Iterator[Batch]:
    return answers().batches(seed, 8 * said().shape[1], said().shape[1])


@cache
def answers() -> Answers:
    rows = said().tolist()
    no = [False] * len(rows)
    return Answers.of(
        [row[:PROMPT] for row in rows],
        [row[PROMPT:] for row in rows],
        sampled=no,
        held_out=no,
        constrained=no,
        always=(),
        vocab_size=VOCAB,
        target=tiny_model().fingerprint,
        tokenizer="none",
    )


def tiny_config(steps: int, **other: object) -> TrainConfig:
    values: dict[str, object] = {
        "steps": steps,
        "taps": 2,
        "draft_vocab": VOCAB,
        "layers": 1,
        "block": 4,
        "markov_rank": 16,
        "anchors": 16,
        "lr": 8e-3,
    }
    return TrainConfig(**(values | other))  # type: ignore[arg-type]


@cache
def trained_net(steps: int = 90) -> BlockHead:
    """Right often enough, wrong often enough."""
    config = tiny_config(steps)
    made = new_recipe(config, tiny_model(), torch.arange(VOCAB))
    train(made, tiny_model(), batches, config)
    assert isinstance(made.net, BlockHead)
    return made.net.eval()


def random_net(seed: int = 0, draft_vocab: int = VOCAB, block: int = 5, window: int = 1024) -> BlockHead:
    """Every weight matters, the tables of pairs and confidences too."""
    shape = BlockConfig(48, 4, 2, 16, 64, VOCAB, draft_vocab, (0, 3), 2, block, 8, window)
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:draft_vocab].sort().values
    pieces = pieces_of(tiny_model())
    net = BlockHead(shape, pieces, ids)
    generator = torch.Generator().manual_seed(seed)
    net.init_weights(pieces, generator)
    with torch.no_grad():
        for weight in net.parameters():
            scale = 0.3 if weight.dim() == 1 else weight.shape[1] ** -0.5
            weight.add_(scale * torch.randn(weight.shape, generator=generator))
    return net
