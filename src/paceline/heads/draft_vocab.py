"""Changes the draft vocabulary of a trained head."""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from paceline.heads.base import DenseTargetEmbeddings, DraftHead
from paceline.heads.registry import HEAD_TYPES


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
