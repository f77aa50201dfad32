"""Lessons from traffic: only of conversations that are not held out, and only where they are wanted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.trace.online import OnlineTrainingConfig, TrainingSample
from paceline.train.data.held_out import is_held_out
from paceline.train.losses.base import TrainBatch
from paceline.train.losses.block import sample_anchors
from paceline.train.losses.medusa import medusa_loss
from paceline.train.online.online_batches import OnlineBatch, batches, split, train_online
from paceline.train.recipe import loss_of
from support.heads import PROMPT, medusa_net, own, random_net, target_text, tiny_model, train_batch

MODEL = tiny_model()
ROWS = [tuple(row) for row in target_text().tolist()]


def text(row: int, opening: str = "", rejected: tuple[int, ...] = ()) -> TrainingSample:
    return TrainingSample(ROWS[row], PROMPT, {"block": rejected}, opening or str(row))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(4, 40)), max_size=30), st.integers(1, 300))
def test_no_conversation_is_on_both_sides(turns: list[tuple[int, int]], most: int) -> None:
    texts = [TrainingSample(ROWS[0][:length], PROMPT, {}, f"talk {n}") for n, length in turns]
    config = OnlineTrainingConfig(held_out=0.5, train_tokens=most, eval_tokens=most)
    found = split(texts, config)
    assert all(is_held_out(t.opening, 0.5) for t in found.held_out)
    assert not any(is_held_out(t.opening, 0.5) for t in found.training)
    for side, out in ((found.training, False), (found.held_out, True)):
        assert sum(len(t.tokens) for t in side) <= most
        latest = [t for t in reversed(texts) if is_held_out(t.opening, 0.5) == out and len(t.tokens) > 4]
        assert not latest or len(latest[0].tokens) > most or side[0] == latest[0]


def test_long_texts_are_cut_and_those_without_an_answer_left_out() -> None:
    config = OnlineTrainingConfig(held_out=1e-9, max_len=PROMPT + 5)
    (cut,) = split([text(0, rejected=(4, 9))], config).training
    assert (cut.tokens, cut.rejected) == (ROWS[0][: PROMPT + 5], {"block": (4,)})
    assert split([text(0)], OnlineTrainingConfig(held_out=1e-9, max_len=PROMPT + 1)).training == []


def test_batches_know_whose_words_they_are_and_where_it_went_wrong() -> None:
    short = TrainingSample(ROWS[1][:20], PROMPT, {"block": (7, 9), "eagle": (8,)}, "b")
    config = OnlineTrainingConfig(batch_tokens=80)
    made = batches("block", (0, 3), MODEL, [text(0, rejected=(5,)), short, text(2)], config)
    assert [tuple(batch.tokens.shape) for batch in made] == [(2, 40), (1, 40)]
    first = made[0]
    assert first.rejected.nonzero().tolist() == [[0, 7], [0, 9], [1, 5]]
    assert first.mask[0].tolist() == [PROMPT <= i < 20 for i in range(40)]
    alone, final = MODEL.features(torch.tensor([short.tokens]), (0, 3))
    assert torch.allclose(first.hidden[3][0, :20], alone[3][0], atol=1e-4)
    assert torch.allclose(first.final[0, :20], final[0], atol=1e-4)


@given(st.lists(st.booleans(), min_size=3, max_size=20), st.integers(0, 9))
def test_anchors_are_sampled_only_where_they_may_be(among: list[bool], seed: int) -> None:
    mask = torch.ones(1, len(among), dtype=torch.bool)
    found = sample_anchors(mask, 30, 2, torch.Generator().manual_seed(seed), torch.tensor([among]))
    used = {int(a) for a, real in zip(found.at[0], found.real[0], strict=True) if real[0]}
    assert used == {i for i in range(len(among) - 1) if among[i]}


def test_chained_heads_learn_from_the_row_before_the_position() -> None:
    whole, net = train_batch((4,), 1), medusa_net()
    starts = torch.zeros_like(whole.mask)
    starts[0, 10] = True
    hidden = whole.hidden[4].clone().requires_grad_()
    loss, _ = medusa_loss(net, TrainBatch(whole.tokens, whole.mask, {4: hidden}, whole.final, starts=starts))
    loss.backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert hidden.grad[0].abs().sum(-1).nonzero().flatten().tolist() == [9]


@pytest.mark.parametrize("accepted_share", [0.0, 0.3])
def test_a_batch_samples_the_rejected_positions_and_some_others(accepted_share: float) -> None:
    tokens = target_text()
    rejected = torch.zeros_like(tokens, dtype=torch.bool)
    rejected[:, 7] = True
    batch = OnlineBatch(tokens, own(tokens), rejected, rejected[:, 7], {}, torch.empty(0))
    starts = batch.sample(accepted_share, torch.Generator().manual_seed(0)).starts
    assert starts is not None
    assert starts[:, 7].all()
    share = float(starts.float().mean())
    assert share == pytest.approx(1 / 40 + accepted_share * 39 / 40, abs=0.05)


def test_learning_is_the_same_every_time() -> None:
    def weights() -> list[torch.Tensor]:
        net = random_net()
        config = OnlineTrainingConfig(steps=3, lr=1e-3)
        lessons = batches("block", net.shape.taps, MODEL, [text(i, rejected=(9,)) for i in range(3)], config)
        told: list[dict[str, int]] = []
        train_online(
            net,
            loss_of("block", net, MODEL, config.anchors),
            lessons,
            config,
            torch.Generator().manual_seed(1),
            told.append,
        )
        assert sum(one["steps"] for one in told) == 3
        return [weight.detach().clone() for weight in net.parameters()]

    first, second = weights(), weights()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, random_net().parameters(), strict=True))
