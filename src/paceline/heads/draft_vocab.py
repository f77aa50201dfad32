"""Other tokens to guess for a network that is trained already."""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from paceline.heads.base import DenseTargetEmbeddings, DraftHead
from paceline.heads.registry import HEAD_TYPES


@torch.no_grad()
def with_draft_vocab(kind: str, net: DraftHead, pieces: DenseTargetEmbeddings, ids: Tensor) -> DraftHead:
    """The same network for the tokens `ids`, ascending. Of those it could guess before it forgets nothing."""
    shape = replace(cast(Any, net.shape), draft_vocab=len(ids))
    new = HEAD_TYPES[kind].net(shape, pieces, ids)
    new.init_weights(pieces, torch.Generator().manual_seed(0))
    others = net.shape.draft_vocab
    before = net.number[ids.to(net.number.device)]  # `others` for a token that it could not guess
    for name, weight in new.named_parameters():
        theirs = net.get_parameter(name)
        if not name.startswith(net.vocab_parameters):
            weight.copy_(theirs)
        elif len(theirs) > others:  # with a row for every other token
            weight.copy_(theirs[torch.cat((before, before.new_full((1,), others)))])
        else:
            weight[before < others] = theirs[before[before < others]]
    return new
