"""Medusa checkpoints (arXiv 2401.10774) as published: residual blocks and an lm_head for each head."""

import re
from typing import Final

import torch
from torch import Tensor

from paceline.convert.foreign_checkpoint import ImportedHead, SourceCheckpoint, TargetModel, require_target
from paceline.convert.speculators import unusable
from paceline.errors import CorruptModel
from paceline.heads.medusa import MedusaConfig

HEADS: Final = "medusa_num_heads"
LAYERS: Final = "medusa_num_layers"
_PREFIX: Final = re.compile(r"^(model\.)?medusa_head\.")


def from_checkpoint(source: SourceCheckpoint, target: TargetModel) -> ImportedHead:
    tensors = {_PREFIX.sub("", name): tensor for name, tensor in source.tensors.items()}
    source = SourceCheckpoint(
        source.name, source.config, {n: t for n, t in tensors.items() if n[:1].isdigit()}
    )
    heads = source.config.integer(HEADS, 5, 100)
    layers = source.config.integer(LAYERS, 1, 100)
    vocab, own = _sizes(source, layers, target)
    shape = MedusaConfig(
        width=own.shape[1],
        vocab=len(own),
        draft_vocab=vocab,
        taps=(target.shape.layers - 1,),
        block=heads,
        layers=layers,
        norm_eps=target.shape.norm_eps,
        own_heads=True,
    )
    weights, used = {}, set()
    width, block = shape.width, {"weight": (shape.width, shape.width), "bias": (shape.width,)}
    for i in range(heads):
        for j in range(layers):
            for leaf, sizes in block.items():
                weights[f"blocks.{i * layers + j}.{leaf}"] = source.weight(f"{i}.{j}.linear.{leaf}", *sizes)
                used.add(f"{i}.{j}.linear.{leaf}")
        weights[f"heads.{i}.weight"] = source.weight(f"{i}.{layers}.weight", vocab, width)
        used.add(f"{i}.{layers}.weight")
    surplus = sorted(set(source.tensors) - used)
    if surplus:
        raise unusable(source, f"a tensor {surplus[0][:80]}", f"{heads} heads of {layers} blocks")
    return ImportedHead("medusa", shape, torch.arange(vocab), weights)


def _sizes(source: SourceCheckpoint, layers: int, target: TargetModel) -> tuple[int, Tensor]:
    """Size of the heads' vocabulary, a prefix of the target's; and the target's embedding."""
    first, own = source.weight(f"0.{layers}.weight", None, None), target.embeddings.embed
    require_target(source, target, first.shape[1], max(len(first), len(own)))
    if not len(first):
        raise CorruptModel(f"{source.name}: 0.{layers}.weight is empty: fetch the checkpoint again")
    return len(first), own
