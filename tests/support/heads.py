"""A tiny target that writes varied text, what it says, and heads of every kind for it."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.heads.base import DraftHead
from paceline.heads.block import BlockConfig, BlockHead
from paceline.heads.eagle import EagleConfig, EagleHead
from paceline.heads.head_checkpoint import Card, save
from paceline.heads.medusa import MedusaConfig, MedusaHead
from paceline.heads.registry import HEAD_TYPES
from paceline.target.weights.model_config import ModelConfig, Weights
from paceline.target.weights.reader import load_embeddings, open_checkpoint
from paceline.train.data.dataset import Answers, Batch
from paceline.train.evaluate import RecordedText
from paceline.train.losses.base import TrainBatch
from paceline.train.recipe import TrainConfig, new_recipe, pieces_of
from paceline.train.train_decoder import TrainDecoder
from paceline.train.trainer import train
from support.models import VOCAB, random_weights

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
def target_text(count: int = 16, length: int = 40) -> Tensor:
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
    return answers().batches(seed, 8 * target_text().shape[1], target_text().shape[1])


@cache
def answers() -> Answers:
    rows = target_text().tolist()
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


N = TypeVar("N", bound=DraftHead)
MODEL = tiny_model()
WIDTH = MODEL.shape.width


def train_batch(taps: tuple[int, ...], count: int = 4) -> TrainBatch:
    tokens = target_text()[:count]
    hidden, final = MODEL.features(tokens, taps)
    return TrainBatch(tokens, own(tokens), hidden, final)


def every_position(batch: TrainBatch) -> Tensor:
    return torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)


def largest_kept(loss: Callable[[], Tensor]) -> int:
    """How many numbers the largest tensor has that is kept for the gradients."""
    sizes = [0]

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss()
    return max(sizes)


def some_ids(count: int) -> Tensor:
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:count].sort().values


def medusa_net(draft_vocab: int = VOCAB, block: int = 3) -> MedusaHead:
    shape = MedusaConfig(WIDTH, VOCAB, draft_vocab, (4,), block, norm_eps=MODEL.shape.norm_eps)
    return _reset(MedusaHead(shape, pieces_of(MODEL), some_ids(draft_vocab)))


def eagle_net(draft_vocab: int = VOCAB, block: int = 4, window: int = 1024, seed: int = 0) -> EagleHead:
    shape = EagleConfig(WIDTH, 4, 2, 16, 64, VOCAB, draft_vocab, (0, 2, 4), block, window)
    return _reset(EagleHead(shape, pieces_of(MODEL), some_ids(draft_vocab)), seed)


def _reset(net: N, seed: int = 0) -> N:
    net.init_weights(pieces_of(MODEL), torch.Generator().manual_seed(seed))
    return net


TOKENS = 2048  # that it can guess


def save_untrained(folder: Path, model: Path, kind: str = "block", tokens: int = TOKENS) -> Path:
    """Its guesses are poor: the text must not care. tokens: that it can guess."""
    pieces = load_embeddings(model)
    shape = _shape(kind, open_checkpoint(model).shape, tokens)
    net = HEAD_TYPES[kind].net(shape, pieces, torch.arange(tokens))
    net.init_weights(pieces, torch.Generator().manual_seed(0))
    card = Card(
        kind, net.shape, model.name, pieces.fingerprint, acceptance=(0.5, 0.25), tokens_per_pass=(1.5, 1.6)
    )
    save(folder, card, net)
    return folder


def _shape(kind: str, of: ModelConfig, tokens: int) -> Any:
    taps = tuple(sorted({of.layers // 2, 1}))
    if kind == "medusa":
        return MedusaConfig(of.width, of.vocab_size, tokens, (of.layers - 1,), 4)
    cls = BlockConfig if kind == "block" else EagleConfig
    return cls(of.width, 1, 1, 32, 64, of.vocab_size, tokens, taps)
