"""Where a block network is taught, and what it is taught there."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.train.losses.base import TrainBatch, soft_targets
from paceline.train.losses.block import Anchors, BlockLoss, BlockLossWeights, prefix_weights, sample_anchors
from support.heads import own, random_net, target_text, tiny_model

MODEL = tiny_model()


def train_batch(taps: tuple[int, ...], count: int = 4) -> TrainBatch:
    tokens = target_text()[:count]
    hidden, final = MODEL.features(tokens, taps)
    return TrainBatch(tokens, own(tokens), hidden, final)


@given(st.lists(st.booleans(), min_size=2, max_size=20), st.integers(1, 30), st.integers(1, 6))
def test_anchors_stand_in_the_targets_words(mask: list[bool], most: int, block: int) -> None:
    found = sample_anchors(torch.tensor([mask]), most, block, torch.Generator().manual_seed(0))
    fit = [i for i in range(len(mask) - 1) if mask[i] and mask[i + 1]]
    used = [int(a) for a, real in zip(found.at[0], found.real[0], strict=True) if real[0]]
    assert len(set(used)) == len(used) == min(most, len(fit))
    assert set(used) <= set(fit)
    for anchor, real in zip(found.at[0].tolist(), found.real[0].tolist(), strict=True):
        if real[0]:
            run = mask[anchor + 1 : anchor + 1 + block]
            want = [all(run[: k + 1]) and k < len(run) for k in range(block)]
            assert real == want


def test_positions_weigh_what_depends_on_them() -> None:
    chance = torch.tensor([[0.9, 0.2, 0.5], [0.3, 0.6, 0.0]])
    real = torch.tensor([[True, True, True], [True, True, False]])
    got = prefix_weights(chance[real], real, 0.5)
    want = []
    for row, exists in zip(chance.tolist(), real.tolist(), strict=True):
        smooth = [0.5 * c + 0.5 for c, e in zip(row, exists, strict=True) if e]
        reached = [torch.tensor(smooth[: m + 1]).prod().item() for m in range(len(smooth))]
        want += [sum(reached[j:]) for j in range(len(smooth))]
    assert got.tolist() == pytest.approx(want)


def test_soft_targets_are_the_targets_distribution() -> None:
    batch, ids = train_batch(()), torch.tensor([3, 7, 11])
    found = soft_targets(batch, MODEL.head, ids)
    logits = MODEL.logits(batch.final)
    asked = found.index >= 0
    assert torch.equal(found.index[asked], torch.arange(len(found.best)))
    assert torch.equal(asked[:, :-1], batch.mask[:, 1:])
    assert torch.equal(found.best, logits.argmax(-1)[asked])
    assert torch.allclose(found.probs, logits.softmax(-1)[asked][:, ids])
    following = torch.cat((batch.tokens[:, 1:], batch.tokens[:, :1]), 1)
    assert torch.equal(found.best, following[asked])  # which is how the text was made


def test_under_a_grammar_the_written_token_is_the_target() -> None:
    batch, ids = train_batch(()), torch.arange(40)
    other = (batch.tokens + 1) % 97  # nothing the target would have said
    bound = replace(batch, tokens=other, constrained=torch.tensor([False, True, False, True]))
    found, free = soft_targets(bound, MODEL.head, ids), soft_targets(batch, MODEL.head, ids)
    for text in range(4):
        mine = found.index[text][found.index[text] >= 0]
        if text in (0, 2):
            assert torch.equal(found.probs[mine], free.probs[mine])
            continue
        written = other[text, 1:][found.index[text, :-1] >= 0]
        assert torch.equal(found.best[mine], written)
        assert torch.equal(found.probs[mine].argmax(-1)[written < 40], written[written < 40])
        assert torch.equal(found.probs[mine].sum(-1), (written < 40).float())


def test_the_targets_own_distribution_has_the_least_loss() -> None:
    net = random_net()
    batch, loss = train_batch(net.shape.taps), BlockLoss(net, MODEL.head)
    at = torch.tensor([[5, 20]] * 4)
    anchors = Anchors(at, torch.ones(4, 2, net.shape.block, dtype=torch.bool))
    rows = torch.stack([batch.final[i, a : a + net.shape.block] for i in range(4) for a in (5, 20)])
    exact = net.base_logits(rows).flatten(0, 1)
    right, tie = torch.full(exact.shape[:-1], 20.0), torch.zeros_like(exact)
    best, figures = loss.weighted(batch, anchors, (exact, tie), right, use_kl=False)
    assert float(figures["tokens_per_pass"]) == 1 + net.shape.block
    for use_kl in (False, True):
        blurred, _ = loss.weighted(batch, anchors, (exact, exact * -0.2), right, use_kl)
        doubting, _ = loss.weighted(batch, anchors, (exact, tie), right - 18, use_kl)
        assert best < blurred
        assert best < doubting


def test_tokens_outside_the_draft_vocabulary_count_as_rejections() -> None:
    net = random_net(draft_vocab=40)
    batch = train_batch(net.shape.taps)
    only_confidence = BlockLossWeights(cross_entropy=0, total_variation=0, kl_share=0)
    loss = BlockLoss(net, MODEL.head, only_confidence)
    anchors = sample_anchors(batch.mask, 8, net.shape.block, torch.Generator().manual_seed(0))
    count = int(anchors.real.sum())
    logits, sure = torch.zeros(count, 40), torch.full((count,), 6.0)
    high, _ = loss.weighted(batch, anchors, (logits, logits), sure, use_kl=False)
    low, _ = loss.weighted(batch, anchors, (logits, logits), -sure, use_kl=False)
    assert low < high / 4  # a head that could say nothing useful must not be sure
    whole = BlockLoss(net, MODEL.head)(batch, 0.5, torch.Generator().manual_seed(0))[0]
    assert torch.isfinite(whole)


def test_a_step_follows_from_its_generator() -> None:
    net = random_net()
    batch, loss = train_batch(net.shape.taps), BlockLoss(net, MODEL.head, BlockLossWeights(anchors=6))
    sample_positions = [
        float(loss(batch, 0.5, torch.Generator().manual_seed(seed))[0].detach()) for seed in (1, 1, 2)
    ]
    assert sample_positions[0] == sample_positions[1] != sample_positions[2]


def test_every_weight_is_taught() -> None:
    net = random_net()
    loss = BlockLoss(net, MODEL.head)(train_batch(net.shape.taps), 0.5, torch.Generator().manual_seed(0))[0]
    grads = torch.autograd.grad(loss, list(net.parameters()))
    assert not [name for (name, _), g in zip(net.named_parameters(), grads, strict=True) if not g.any()]
