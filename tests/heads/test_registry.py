"""Every kind of head comes back from its folder as it was."""

from pathlib import Path

import pytest
import torch

from paceline.heads.base import DraftHead
from paceline.heads.head_checkpoint import Card, load, save
from paceline.heads.registry import HEAD_TYPES
from paceline.train.recipe import pieces_of
from support.heads import MODEL, eagle_net, medusa_net


@pytest.mark.parametrize(("kind", "net"), [("medusa", medusa_net(60)), ("eagle", eagle_net(60))])
def test_a_head_comes_back_from_its_folder(tmp_path: Path, kind: str, net: DraftHead) -> None:
    pieces = pieces_of(MODEL)
    card = Card(kind, net.shape, "tiny", pieces.fingerprint, "float32")
    save(tmp_path, card, net)
    back = load(tmp_path, pieces)
    assert back.card == card
    assert type(back.net) is HEAD_TYPES[kind].net
    assert torch.equal(back.net.draft_ids, net.draft_ids)
    stored = back.net.state_dict()
    assert all(torch.equal(stored[name], weight) for name, weight in net.state_dict().items())
