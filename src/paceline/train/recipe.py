"""What is trained and how: settings, and for each kind of head a network and its loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from paceline.heads.base import DenseTargetEmbeddings, DraftHead, HeadConfig
from paceline.heads.block import BlockConfig, BlockHead
from paceline.heads.calibration import Calibration
from paceline.heads.eagle import EagleConfig, EagleHead
from paceline.heads.medusa import MedusaConfig, MedusaHead
from paceline.heads.registry import HEAD_TYPES
from paceline.target.weights.model_config import ModelConfig
from paceline.train.config import Schedule
from paceline.train.losses.base import Loss
from paceline.train.losses.block import BlockLoss, BlockLossWeights
from paceline.train.losses.eagle import eagle_loss
from paceline.train.losses.medusa import medusa_loss
from paceline.train.train_decoder import TrainDecoder

Kind = Literal["block", "eagle", "medusa"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
Optimizer = Literal["adamw", "muon"]
_SAMPLE: Final = 256  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(Schedule):
    kind: Kind = "block"
    optimizer: Optimizer = "adamw"
    lr: float = 6e-4
    muon_lr: float = 1e-3  # of matrices, with muon
    eval_steps: int = 300  # between two looks at held-out text
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
        Schedule.__post_init__(self)
        for name in ("kind", "optimizer"):
            known = get_args(Kind if name == "kind" else Optimizer)
            if getattr(self, name) not in known:
                raise self.unusable(name, f"one of {', '.join(known)}")
        self.require_whole(eval_steps=1, taps=1, draft_vocab=1, layers=1, block=2)
        self.require_whole(markov_rank=1, window=1, anchors=1)
        self.require_positive("lr", "muon_lr")


@dataclass(frozen=True, slots=True)
class Recipe:
    """One kind of head for one target: all that the trainer knows of it."""

    kind: Kind
    net: DraftHead
    loss: Loss
    calibration: Calibration | None = None  # of the drafter it goes on from
    began_from: str = ""  # and a digest of that one's weights


def default_taps(layers: int, count: int) -> tuple[int, ...]:
    """Evenly from the second layer to the third from the end."""
    last = max(layers - 3, 0)
    first = min(1, last)
    step = (last - first) / max(count - 1, 1)
    return tuple(sorted({round(first + i * step) for i in range(count)}))


def pieces_of(model: TrainDecoder) -> DenseTargetEmbeddings:
    return DenseTargetEmbeddings(
        model.embed, model.head, model.norm, model.fingerprint, model.shape.embed_scale
    )


def new_recipe(
    config: TrainConfig, model: TrainDecoder, draft_ids: Tensor, weights: Mapping[str, Tensor] | None = None
) -> Recipe:
    """A new network for this target, with weights by the seed.

    draft_ids: what it may guess, ascending. weights: the target's own, for a block to begin from.
    """
    pieces = pieces_of(model)
    net = HEAD_TYPES[config.kind].net(_shape(config, model.shape, len(draft_ids)), pieces, draft_ids)
    generator = torch.Generator().manual_seed(config.seed)
    net.init_weights(pieces, generator)
    if isinstance(net, BlockHead):
        if weights is not None:
            net.init_from_target(weights, model.shape.layers)
        net.normalize_taps(_sizes(model, net.shape.taps, draft_ids, generator))
    return Recipe(config.kind, net, loss_of(net, model, config.anchors))


def loss_of(net: DraftHead, model: TrainDecoder, anchors: int) -> Loss:
    """anchors: most places of each text that are guessed from in one step; medusa takes them all."""
    if isinstance(net, BlockHead):
        return BlockLoss(net, model.head, BlockLossWeights(anchors=anchors))
    if isinstance(net, EagleHead):
        return lambda lesson, progress, generator: eagle_loss(
            net, lesson, model.head, generator, net.shape.block, anchors
        )
    assert isinstance(net, MedusaHead)
    return lambda lesson, progress, generator: medusa_loss(net, lesson)


def _sizes(
    model: TrainDecoder, taps: Sequence[int], draft_ids: Tensor, generator: torch.Generator
) -> list[float]:
    """The root mean square of a row as each layer leaves it: the median over a text of random tokens."""
    drawn = torch.randint(len(draft_ids), (1, _SAMPLE), generator=generator)
    hidden, _ = model.features(draft_ids.cpu()[drawn].to(model.device), taps)
    return [float(hidden[tap].float().pow(2).mean(-1).sqrt().median()) for tap in taps]


def _shape(config: TrainConfig, of: ModelConfig, draft_vocab: int) -> HeadConfig:
    if config.kind == "medusa":
        return _medusa_shape(config, of, draft_vocab)
    decoder = _decoder(config, of, draft_vocab)
    if config.kind == "eagle":
        return EagleConfig(**decoder)
    return BlockConfig(**decoder, layers=config.layers, markov_rank=config.markov_rank)


def _decoder(config: TrainConfig, of: ModelConfig, draft_vocab: int) -> dict[str, Any]:
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


def _medusa_shape(config: TrainConfig, of: ModelConfig, draft_vocab: int) -> MedusaConfig:
    return MedusaConfig(
        width=of.width,
        vocab=of.vocab_size,
        draft_vocab=draft_vocab,
        taps=(of.layers - 1,),
        block=config.block,
        layers=config.layers,
        norm_eps=of.norm_eps,
    )
