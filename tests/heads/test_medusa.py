"""Medusa heads: what they begin with, and that they can learn."""

import torch

from paceline.train.losses.medusa import medusa_loss
from support.head_cases import MODEL, a_lesson, largest_kept, medusa_net


def test_new_heads_say_what_the_target_would_say_next() -> None:
    net, lesson = medusa_net(), a_lesson((4,))
    logits = net(lesson.hidden[4])
    assert logits.shape == (*lesson.tokens.shape, net.shape.block, net.shape.draft_vocab)
    for head in range(net.shape.block):
        assert torch.allclose(logits[:, :, head], MODEL.logits(lesson.final)[..., net.draft_ids], atol=1e-4)


def test_only_its_own_weights_are_stored() -> None:
    assert set(medusa_net().state_dict()) == {f"blocks.{i}.{n}" for i in range(3) for n in ("weight", "bias")}


def test_it_learns_a_text_by_heart() -> None:
    net, lesson = medusa_net(), a_lesson((4,), 1)
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    before = medusa_loss(net, lesson)[1]
    for _ in range(40):
        optimizer.zero_grad()
        loss, _ = medusa_loss(net, lesson)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    after = medusa_loss(net, lesson)[1]
    assert float(before["tokens_per_pass"]) < 1.5
    assert float(after["first"]) > 0.95
    assert float(after["tokens_per_pass"]) > 3.5


def test_only_the_targets_own_words_that_can_be_guessed_are_taught() -> None:
    lesson = a_lesson((4,), 1)
    nothing = lesson.mask & False
    loss, _ = medusa_loss(medusa_net(), type(lesson)(lesson.tokens, nothing, lesson.hidden, lesson.final))
    assert float(loss) == 0
    few = medusa_net(draft_vocab=20)
    loss, said = medusa_loss(few, lesson)
    assert torch.isfinite(loss)
    known = torch.isin(lesson.tokens[:, 3:], few.draft_ids).float().mean()
    assert float(said["first"]) <= float(known)


def test_rows_that_nothing_is_learned_from_are_not_computed() -> None:
    net, lesson = medusa_net(), a_lesson((4,))
    useless = ~torch.cat((lesson.mask[:, 2:], lesson.mask[:, :2] & False), 1)
    assert useless[:, :-2].any()
    lesson.hidden[4][useless] = torch.nan
    loss, _ = medusa_loss(net, lesson)
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in net.parameters())


def test_no_logits_are_kept_for_the_gradients() -> None:
    net, lesson = medusa_net(), a_lesson((4,), 16)
    kept = largest_kept(lambda: medusa_loss(net, lesson)[0])
    assert kept <= lesson.hidden[4].numel() < lesson.tokens.numel() * net.shape.draft_vocab
