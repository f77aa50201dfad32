"""What is trained and how: settings, and for each kind of head a network and its loss."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from paceline.errors import SettingError
from paceline.heads.block import BlockNet, BlockShape
from paceline.heads.block_loss import BlockLoss, BlockLossWeights
from paceline.heads.eagle import EagleNet, EagleShape
from paceline.heads.eagle_loss import eagle_loss
from paceline.heads.kinds import KINDS as KINDS_OF_NETS
from paceline.heads.medusa import MedusaNet, MedusaShape, medusa_loss
from paceline.heads.net import Net, Pieces, Shape
from paceline.heads.teach import Loss
from paceline.target.shape import ModelShape
from paceline.train.dense import DenseModel

Kind = Literal["block", "eagle", "medusa"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
Optimizer = Literal["adamw", "muon"]
MOST_SEEDS: Final = 2**32
_SAMPLE: Final = 256  # tokens


@dataclass(frozen=True, slots=True)
class TrainConfig:
    kind: Kind = "block"
    steps: int = 0  # 0: as many as fit into the time
    minutes: float = 10.0  # taken where no steps are given
    tokens_per_batch: int = 65536
    max_len: int = 2048
    optimizer: Optimizer = "adamw"
    lr: float = 6e-4
    muon_lr: float = 1e-3  # of matrices, with muon
    weight_decay: float = 0.0
    warmup: float = 0.04  # share of the training
    last_lr: float = 0.1  # share of the rate that is left at the end
    clip: float = 1.0
    seed: int = 0
    checkpoint_seconds: float = 60.0
    look_steps: int = 300  # between two looks at held-out text
    taps: int = 5  # layers of the target that are read; medusa reads the last one only
    draft_vocab: int = 8192
    layers: int = 2
    ff_width: int = 0  # 0: the target's
    block: int = 8  # guesses in one draft
    markov_rank: int = 64
    window: int = 1024
    anchors: int = 128  # most places of each text that are guessed from in one step; medusa takes them all
    from_target: bool = True  # a new block begins with copies of the target's last layers

    def __post_init__(self) -> None:
        for name in ("kind", "optimizer"):
            known = get_args(Kind if name == "kind" else Optimizer)
            if getattr(self, name) not in known:
                raise _unusable(self, name, f"one of {', '.join(known)}")
        whole = ("tokens_per_batch", "max_len", "look_steps", "taps", "draft_vocab", "layers", "block")
        for name in (*whole, "markov_rank", "window", "anchors"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise _unusable(self, name, "a whole number, 1 or more")
        if self.block < 2:
            raise _unusable(self, "block", "2 or more")
        if not 0 <= self.seed < MOST_SEEDS:
            raise _unusable(self, "seed", f"0 to {MOST_SEEDS - 1}")
        if self.steps < 0 or (self.steps == 0 and not 0 < self.minutes < math.inf):
            raise SettingError(f"steps={self.steps}, minutes={self.minutes}: one of them must be above 0")
        for name in ("warmup", "last_lr"):
            if not 0 <= getattr(self, name) <= 1:
                raise _unusable(self, name, "0 to 1")
        for name in ("lr", "muon_lr", "clip", "checkpoint_seconds"):
            if not getattr(self, name) > 0:
                raise _unusable(self, name, "more than 0")


@dataclass(frozen=True, slots=True)
class Recipe:
    """One kind of head for one target: all that the trainer knows of it."""

    kind: Kind
    net: Net
    loss: Loss


def default_taps(layers: int, count: int) -> tuple[int, ...]:
    """Evenly from the second layer to the third from the end."""
    last = max(layers - 3, 0)
    first = min(1, last)
    step = (last - first) / max(count - 1, 1)
    return tuple(sorted({round(first + i * step) for i in range(count)}))


def pieces_of(model: DenseModel) -> Pieces:
    return Pieces(model.embed, model.head, model.norm, model.fingerprint, model.shape.embed_scale)


def recipe(
    config: TrainConfig, model: DenseModel, draft_ids: Tensor, weights: Mapping[str, Tensor] | None = None
) -> Recipe:
    """A new network for this target, with weights by the seed.

    draft_ids: what it may guess, ascending. weights: the target's own, for a block to begin from.
    """
    pieces = pieces_of(model)
    net = KINDS_OF_NETS[config.kind].net(_shape(config, model.shape, len(draft_ids)), pieces, draft_ids)
    generator = torch.Generator().manual_seed(config.seed)
    net.reset(pieces, generator)
    if isinstance(net, BlockNet):
        if weights is not None:
            net.begin_from(weights, model.shape.layers)
        net.level(_sizes(model, net.shape.taps, draft_ids, generator))
    return Recipe(config.kind, net, loss_of(net, model, config.anchors))


def loss_of(net: Net, model: DenseModel, anchors: int) -> Loss:
    """anchors: most places of each text that are guessed from in one step; medusa takes them all."""
    if isinstance(net, BlockNet):
        return BlockLoss(net, model.head, BlockLossWeights(anchors=anchors))
    if isinstance(net, EagleNet):
        return lambda lesson, progress, generator: eagle_loss(
            net, lesson, model.head, generator, net.shape.block, anchors
        )
    assert isinstance(net, MedusaNet)
    return lambda lesson, progress, generator: medusa_loss(net, lesson)


def _sizes(
    model: DenseModel, taps: Sequence[int], draft_ids: Tensor, generator: torch.Generator
) -> list[float]:
    """The root mean square of a row as each layer leaves it: the median over a text of random tokens."""
    drawn = torch.randint(len(draft_ids), (1, _SAMPLE), generator=generator)
    hidden, _ = model.features(draft_ids.cpu()[drawn].to(model.device), taps)
    return [float(hidden[tap].float().pow(2).mean(-1).sqrt().median()) for tap in taps]


def _shape(config: TrainConfig, of: ModelShape, draft_vocab: int) -> Shape:
    if config.kind == "medusa":
        return _medusa_shape(config, of, draft_vocab)
    decoder = _decoder(config, of, draft_vocab)
    if config.kind == "eagle":
        return EagleShape(**decoder)
    return BlockShape(**decoder, layers=config.layers, markov_rank=config.markov_rank)


def _decoder(config: TrainConfig, of: ModelShape, draft_vocab: int) -> dict[str, Any]:
    """What heads that are decoders of their own have in common."""
    return {
        "width": of.width,
        "heads": of.heads,
        "kv_heads": of.kv_heads,
        "head_dim": of.head_dim,
        "ff_width": config.ff_width or of.ff_width,
        "vocab": of.vocab_size,
        "draft_vocab": draft_vocab,
        "taps": default_taps(of.layers, config.taps),
        "block": config.block,
        "window": config.window,
        "norm_eps": of.norm_eps,
        "theta": of.rope.theta,
    }


def _medusa_shape(config: TrainConfig, of: ModelShape, draft_vocab: int) -> MedusaShape:
    return MedusaShape(
        width=of.width,
        vocab=of.vocab_size,
        draft_vocab=draft_vocab,
        taps=(of.layers - 1,),
        block=config.block,
        layers=config.layers,
        norm_eps=of.norm_eps,
    )


def _unusable(config: TrainConfig, name: str, expected: str) -> SettingError:
    return SettingError(f"{name}={getattr(config, name)!r} is not usable: expected {expected}")
