"""The eagle net: what a place sees when it is taught, and that it can learn."""

import torch
from head_cases import MODEL, a_lesson, eagle_net

from paceline.heads.eagle_loss import eagle_loss, unrolled
from paceline.heads.teach import Lesson

TAPS = (0, 2, 4)


def changed(lesson: Lesson, place: int) -> Lesson:
    """Another token at this place, and other hidden states there."""
    tokens = lesson.tokens.clone()
    tokens[:, place] = (tokens[:, place] + 1) % 100
    hidden = {tap: rows.clone() for tap, rows in lesson.hidden.items()}
    for rows in hidden.values():
        rows[:, place] += 1
    return Lesson(tokens, lesson.mask, hidden, lesson.final)


def test_a_place_sees_the_text_before_it_and_the_tokens_it_was_told() -> None:
    net, lesson, place = eagle_net(), a_lesson(TAPS, 2), 20
    before, after = (unrolled(net, one, 4) for one in (lesson, changed(lesson, place)))
    for step, (one, other) in enumerate(zip(before, after, strict=True)):
        told = (one != other).any(-1).any(0).nonzero().flatten().tolist()
        assert told == list(range(place - 1 - step, lesson.tokens.shape[1])), step


def test_a_window_ends_what_is_seen() -> None:
    net, lesson = eagle_net(window=5), a_lesson(TAPS, 2)
    before, after = (unrolled(net, one, 2) for one in (lesson, changed(lesson, 10)))
    told = (before[0] != after[0]).any(-1).any(0).nonzero().flatten().tolist()
    assert told == list(range(9, 15))


def test_it_learns_a_text_by_heart() -> None:
    net, lesson = eagle_net(), a_lesson(TAPS, 1)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    before = eagle_loss(net, lesson, MODEL.head)[1]
    for _ in range(90):
        optimizer.zero_grad()
        loss, _ = eagle_loss(net, lesson, MODEL.head)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    after = eagle_loss(net, lesson, MODEL.head)[1]
    assert float(before["tokens_per_pass"]) < 2
    assert float(after["first"]) > 0.95
    assert float(after["tokens_per_pass"]) > 4.5


def test_tokens_that_cannot_be_guessed_are_not_taught() -> None:
    net, lesson = eagle_net(draft_vocab=20), a_lesson(TAPS, 4)
    loss, said = eagle_loss(net, lesson, MODEL.head)
    assert torch.isfinite(loss)
    known = torch.isin(lesson.tokens[:, 4:], net.draft_ids).float().mean()
    assert float(said["first"]) <= float(known) + 0.05
    loss, _ = eagle_loss(
        net, Lesson(lesson.tokens, lesson.mask & False, lesson.hidden, lesson.final), MODEL.head
    )
    assert float(loss) == 0
