"""Other tokens to guess for a network that is trained already."""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from paceline.heads.base import DraftHead, Pieces
from paceline.heads.registry import KINDS


@torch.no_grad()
def with_words(kind: str, net: DraftHead, pieces: Pieces, ids: Tensor) -> DraftHead:
    """The same network for the tokens `ids`, ascending. Of those it could guess before it forgets nothing."""
    shape = replace(cast(Any, net.shape), draft_vocab=len(ids))
    new = KINDS[kind].net(shape, pieces, ids)
    new.reset(pieces, torch.Generator().manual_seed(0))
    others = net.shape.draft_vocab
    before = net.number[ids.to(net.number.device)]  # `others` for a token that it could not guess
    for name, weight in new.named_parameters():
        theirs = net.get_parameter(name)
        if not name.startswith(net.by_token):
            weight.copy_(theirs)
        elif len(theirs) > others:  # with a row for every other token
            weight.copy_(theirs[torch.cat((before, before.new_full((1,), others)))])
        else:
            weight[before < others] = theirs[before[before < others]]
    return new
