"""The eagle net: what a place sees when it is taught, and that it can learn."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.heads.eagle import EagleHead
from paceline.train.losses.base import TrainBatch
from paceline.train.losses.eagle import eagle_loss, unrolled
from support.heads import MODEL, eagle_net, every_position, largest_kept, train_batch

TAPS = (0, 2, 4)


def changed(batch: TrainBatch, place: int) -> TrainBatch:
    """Another token at this place, and other hidden states there."""
    tokens = batch.tokens.clone()
    tokens[:, place] = (tokens[:, place] + 1) % 100
    hidden = {tap: rows.clone() for tap, rows in batch.hidden.items()}
    for rows in hidden.values():
        rows[:, place] += 1
    return TrainBatch(tokens, batch.mask, hidden, batch.final)


def taught(net: EagleHead, batch: TrainBatch, anchors: int = 128) -> tuple[Tensor, dict[str, Tensor]]:
    return eagle_loss(net, batch, MODEL.head, torch.Generator().manual_seed(0), 4, anchors)


def test_a_position_sees_the_text_before_it_and_its_input_tokens() -> None:
    net, batch, place = eagle_net(), train_batch(TAPS, 2), 20
    before, after = (unrolled(net, one, every_position(one), 4) for one in (batch, changed(batch, place)))
    for step, (one, other) in enumerate(zip(before, after, strict=True)):
        told = (one != other).any(-1).any(0).nonzero().flatten().tolist()
        assert told == list(range(place - 1 - step, batch.tokens.shape[1])), step


def test_a_window_ends_what_is_seen() -> None:
    net, batch = eagle_net(window=5), train_batch(TAPS, 2)
    before, after = (unrolled(net, one, every_position(one), 2) for one in (batch, changed(batch, 10)))
    told = (before[0] != after[0]).any(-1).any(0).nonzero().flatten().tolist()
    assert told == list(range(9, 15))


@pytest.mark.slow
def test_it_learns_a_text_by_heart() -> None:
    net, batch = eagle_net(), train_batch(TAPS, 1)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    before = taught(net, batch)[1]
    for _ in range(90):
        optimizer.zero_grad()
        loss, _ = taught(net, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    after = taught(net, batch)[1]
    assert float(before["tokens_per_pass"]) < 2
    assert float(after["first"]) > 0.95
    assert float(after["tokens_per_pass"]) > 4.5


def test_tokens_outside_the_draft_vocabulary_are_not_trained_on() -> None:
    net, batch = eagle_net(draft_vocab=20), train_batch(TAPS, 4)
    loss, metrics = taught(net, batch)
    assert torch.isfinite(loss)
    known = torch.isin(batch.tokens[:, 4:], net.draft_ids).float().mean()
    assert float(metrics["first"]) <= float(known) + 0.05
    loss, _ = taught(net, replace(batch, mask=batch.mask & False))
    assert float(loss) == 0


def test_a_chain_is_the_same_whatever_other_anchors_there_are() -> None:
    net, batch = eagle_net(window=9), train_batch(TAPS, 2)
    few = torch.tensor([[20, 3, 11], [0, 30, 7]])
    whole, some = (unrolled(net, batch, at, 4) for at in (every_position(batch), few))
    for one, other in zip(whole, some, strict=True):
        wanted = torch.stack([rows[at] for rows, at in zip(one, few, strict=True)])
        assert torch.allclose(other, wanted, atol=1e-5)


def test_with_few_anchors_only_so_many_positions_of_each_text_count() -> None:
    net, batch = eagle_net(), train_batch(TAPS, 4)
    first = batch.mask.int().argmax(1)
    one = torch.zeros_like(batch.mask)
    one[torch.arange(4), first + 5] = True
    there, _ = taught(net, replace(batch, starts=one), anchors=1)
    wanted, _ = taught(net, replace(batch, starts=one))
    assert torch.allclose(there, wanted)
    losses = {round(taught(net, batch, few)[0].item(), 4) for few in (1, 2, 128)}
    assert len(losses) == 3


def test_neither_attention_nor_logits_are_kept_for_the_gradients() -> None:
    net, batch = eagle_net(), train_batch(TAPS, 16)
    length, shape = batch.tokens.shape[1], net.shape
    most = max(weight.numel() for weight in net.parameters())
    features = batch.tokens.numel() * len(TAPS) * shape.width
    attention = int(batch.mask.sum()) * shape.heads * length
    kept = largest_kept(lambda: taught(net, batch)[0])
    assert kept <= max(most, features) < attention
