"""Settings of head training, and a recipe for each kind of head: a network and its loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, cast, get_args

import torch
from torch import Tensor

from paceline.config import require, require_min, require_positive, require_whole
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
_RMS_TOKENS: Final = 256  # random ones, to measure the scale of the taps


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(Schedule):
    kind: Kind = "block"
    optimizer: Optimizer = "adamw"
    lr: float = 6e-4
    muon_lr: float = 1e-3  # of matrices, with Muon
    eval_steps: int = 300  # between two evaluations on held-out text
    taps: int = 5  # layers of the target that are read; Medusa reads the last one only
    draft_vocab: int = 8192
    layers: int = 2
    ff_width: int = 0  # 0: the target's
    block: int = 8  # tokens of a draft
    markov_rank: int = 64
    window: int = 1024
    anchors: int = 128  # positions of each text to draft from in one step, at most; Medusa takes all
    from_target: bool = True  # a new block head starts with copies of the target's last layers

    def __post_init__(self) -> None:
        Schedule.__post_init__(self)
        for name in ("kind", "optimizer"):
            known = get_args(Kind if name == "kind" else Optimizer)
            require(known.__contains__, name, getattr(self, name), f"one of {', '.join(known)}")
        counts = {"eval_steps": 1, "taps": 1, "draft_vocab": 1, "layers": 1, "block": 2}
        counts |= {"markov_rank": 1, "window": 1, "anchors": 1}
        require_whole(self, *counts)
        require_min(self, **counts)
        require_positive(self, "lr", "muon_lr")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A head for one target, and its loss."""

    kind: Kind
    net: DraftHead
    loss: Loss
    calibration: Calibration | None = None  # of the drafter that it continues
    began_from: str = ""  # digest of that drafter's weights


def default_taps(layers: int, count: int) -> tuple[int, ...]:
    """Evenly spaced, from the second layer to the third from the end."""
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
    """A new network for this target, initialised by the seed.

    draft_ids: the draft vocabulary, ascending. weights: the target's own, to start from.
    """
    embeddings = pieces_of(model)
    net = HEAD_TYPES[config.kind].net(_shape(config, model.shape, len(draft_ids)), embeddings, draft_ids)
    generator = torch.Generator().manual_seed(config.seed)
    net.init_weights(embeddings, generator)
    if weights is not None:
        net.init_from_target(weights, model.shape.layers)
    net.normalize_taps(_tap_rms(model, net.shape.taps, draft_ids, generator))
    return Recipe(config.kind, net, loss_of(config.kind, net, model, config.anchors))


@torch.no_grad()
def with_draft_vocab(kind: str, net: DraftHead, embeddings: DenseTargetEmbeddings, ids: Tensor) -> DraftHead:
    """The same network for the tokens `ids`, ascending. Rows of tokens that it had before are kept."""
    shape = replace(cast(Any, net.shape), draft_vocab=len(ids))
    new = HEAD_TYPES[kind].net(shape, embeddings, ids)
    new.init_weights(embeddings, torch.Generator().manual_seed(0))
    others = net.shape.draft_vocab
    before = net.draft_index[ids.to(net.draft_index.device)]  # `others` for a token that is new
    for name, weight in new.named_parameters():
        theirs = net.get_parameter(name)
        if not name.startswith(net.vocab_parameters):
            weight.copy_(theirs)
        elif len(theirs) > others:  # with a last row for all other tokens
            weight.copy_(theirs[torch.cat((before, before.new_full((1,), others)))])
        else:
            weight[before < others] = theirs[before[before < others]]
    return new


def loss_of(kind: str, net: Any, model: TrainDecoder, anchors: int) -> Loss:
    """net: a head of this kind. anchors: positions of each text to draft from; Medusa takes all."""
    return _LOSSES[kind](net, model, anchors)


def _block_loss(net: BlockHead, model: TrainDecoder, anchors: int) -> Loss:
    return BlockLoss(net, model.head, BlockLossWeights(anchors=anchors))


def _eagle_loss(net: EagleHead, model: TrainDecoder, anchors: int) -> Loss:
    return lambda batch, progress, generator: eagle_loss(
        net, batch, model.head, generator, net.shape.block, anchors
    )


def _medusa_loss(net: MedusaHead, model: TrainDecoder, anchors: int) -> Loss:
    return lambda batch, progress, generator: medusa_loss(net, batch)


_LOSSES: Final[dict[str, Callable[[Any, TrainDecoder, int], Loss]]] = {
    "block": _block_loss,
    "eagle": _eagle_loss,
    "medusa": _medusa_loss,
}


def _tap_rms(
    model: TrainDecoder, taps: Sequence[int], draft_ids: Tensor, generator: torch.Generator
) -> list[float]:
    """Root mean square of a row after each tap: the median over random tokens."""
    sampled = torch.randint(len(draft_ids), (1, _RMS_TOKENS), generator=generator)
    hidden, _ = model.features(draft_ids.cpu()[sampled].to(model.device), taps)
    return [float(hidden[tap].float().pow(2).mean(-1).sqrt().median()) for tap in taps]


def _shape(config: TrainConfig, of: ModelConfig, draft_vocab: int) -> HeadConfig:
    if config.kind == "medusa":
        return _medusa_shape(config, of, draft_vocab)
    decoder = _decoder(config, of, draft_vocab)
    if config.kind == "eagle":
        return EagleConfig(**decoder)
    return BlockConfig(**decoder, layers=config.layers, markov_rank=config.markov_rank)


def _decoder(config: TrainConfig, of: ModelConfig, draft_vocab: int) -> dict[str, Any]:
    """Common fields of heads with decoder layers."""
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
