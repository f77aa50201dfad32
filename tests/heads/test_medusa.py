"""Medusa heads: what they begin with, and that they can learn."""

import torch

from paceline.train.losses.medusa import medusa_loss
from support.heads import MODEL, largest_kept, medusa_net, train_batch


def test_new_heads_say_what_the_target_would_say_next() -> None:
    net, batch = medusa_net(), train_batch((4,))
    logits = net(batch.hidden[4])
    assert logits.shape == (*batch.tokens.shape, net.shape.block, net.shape.draft_vocab)
    for head in range(net.shape.block):
        assert torch.allclose(logits[:, :, head], MODEL.logits(batch.final)[..., net.draft_ids], atol=1e-4)


def test_only_its_own_weights_are_stored() -> None:
    assert set(medusa_net().state_dict()) == {f"blocks.{i}.{n}" for i in range(3) for n in ("weight", "bias")}


def test_it_learns_a_text_by_heart() -> None:
    net, batch = medusa_net(), train_batch((4,), 1)
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    before = medusa_loss(net, batch)[1]
    for _ in range(40):
        optimizer.zero_grad()
        loss, _ = medusa_loss(net, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    after = medusa_loss(net, batch)[1]
    assert float(before["tokens_per_pass"]) < 1.5
    assert float(after["first"]) > 0.95
    assert float(after["tokens_per_pass"]) > 3.5


def test_only_the_targets_own_draftable_tokens_are_trained_on() -> None:
    batch = train_batch((4,), 1)
    nothing = batch.mask & False
    loss, _ = medusa_loss(medusa_net(), type(batch)(batch.tokens, nothing, batch.hidden, batch.final))
    assert float(loss) == 0
    few = medusa_net(draft_vocab=20)
    loss, metrics = medusa_loss(few, batch)
    assert torch.isfinite(loss)
    known = torch.isin(batch.tokens[:, 3:], few.draft_ids).float().mean()
    assert float(metrics["first"]) <= float(known)


def test_rows_that_nothing_is_learned_from_are_not_computed() -> None:
    net, batch = medusa_net(), train_batch((4,))
    useless = ~torch.cat((batch.mask[:, 2:], batch.mask[:, :2] & False), 1)
    assert useless[:, :-2].any()
    batch.hidden[4][useless] = torch.nan
    loss, _ = medusa_loss(net, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in net.parameters())


def test_no_logits_are_kept_for_the_gradients() -> None:
    net, batch = medusa_net(), train_batch((4,), 16)
    kept = largest_kept(lambda: medusa_loss(net, batch)[0])
    assert kept <= batch.hidden[4].numel() < batch.tokens.numel() * net.shape.draft_vocab
