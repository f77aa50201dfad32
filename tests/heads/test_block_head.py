"""The keys that a block of drafted positions sees, and those that it does not."""

import pytest
import torch
from torch import Tensor

from paceline.heads.block import BlockHead
from paceline.train.losses.base import TrainBatch
from paceline.train.losses.block import draft_logits
from support.heads import own, random_net, target_text, tiny_model
from support.models import VOCAB

WINDOW = 12


@pytest.fixture(scope="module")
def net() -> BlockHead:
    return random_net(window=WINDOW).eval()


def batch(net: BlockHead, count: int = 2) -> TrainBatch:
    tokens = target_text()[:count]
    hidden, final = tiny_model().features(tokens, net.shape.taps)
    return TrainBatch(tokens, own(tokens), hidden, final)


def outcome(net: BlockHead, of: TrainBatch, at: int) -> Tensor:
    with torch.no_grad():
        return draft_logits(net, of, torch.full((len(of.tokens), 1), at))[0]


@pytest.mark.parametrize(("row", "seen"), [(19, True), (8, True), (7, False), (20, False), (21, False)])
def test_a_block_sees_the_window_before_its_anchor(net: BlockHead, row: int, seen: bool) -> None:
    of = batch(net)
    before = outcome(net, of, 20)
    for states in of.hidden.values():
        states[:, row] += torch.randn(states.shape[-1], generator=torch.Generator().manual_seed(3))
    assert torch.equal(before, outcome(net, of, 20)) != seen


def test_all_slots_see_one_another(net: BlockHead) -> None:
    of = batch(net)
    before = outcome(net, of, 20)
    with torch.no_grad():
        net.mask.add_(1)
        after = outcome(net, of, 20)
        net.mask.sub_(1)
    assert (before != after).any(-1).all()


def test_an_anchor_knows_nothing_of_the_others(net: BlockHead) -> None:
    of = batch(net)
    places = [5, 9, 10, 30]
    with torch.no_grad():
        together, sure = draft_logits(net, of, torch.tensor([places] * 2))
    for i, place in enumerate(places):
        assert torch.allclose(together[:, i : i + 1], outcome(net, of, place), atol=1e-4)
    assert sure.shape == (2, 4, net.shape.block)


def test_positions_count_only_by_their_distance(net: BlockHead) -> None:
    of = batch(net, 1)
    features = net.features(of.hidden)[:, :8]
    hidden = []
    for shift in (0, 1000):
        positions = torch.arange(shift, shift + 8)[None]
        anchor = torch.tensor([[shift + 8]])
        with torch.no_grad():
            context = net.context(features, positions)
            hidden.append(net.block(of.tokens[:, 8:9], anchor, context, net.visible(anchor, positions)))
    assert torch.allclose(hidden[0], hidden[1], atol=1e-3)


def test_context_can_be_made_piece_by_piece(net: BlockHead) -> None:
    features, at = net.features(batch(net).hidden), torch.arange(40).expand(2, -1)
    with torch.no_grad():
        whole = net.context(features, at)
        parts = [net.context(features[:, part], at[:, part]) for part in (slice(0, 7), slice(7, 40))]
    for layer, (keys, values) in enumerate(whole):
        assert torch.allclose(keys, torch.cat([part[layer][0] for part in parts], 2), atol=1e-5)
        assert torch.allclose(values, torch.cat([part[layer][1] for part in parts], 2), atol=1e-5)


def test_tokens_outside_the_draft_vocabulary_share_one_markov_row() -> None:
    net = random_net(draft_vocab=50)
    known = set(net.draft_ids.tolist())
    others = [token for token in range(VOCAB) if token not in known]
    pairs = net.markov(torch.tensor([*others[:2], int(net.draft_ids[0])]))
    assert torch.equal(pairs[0], pairs[1])
    assert not torch.equal(pairs[0], pairs[2])


def test_only_its_own_weights_are_stored() -> None:
    names = set(random_net().state_dict())
    assert names.isdisjoint({"embed", "head", "draft_ids", "draft_index"})
    assert {"fc.weight", "mask", "markov_in.weight", "layers.0.q.weight"} <= names
