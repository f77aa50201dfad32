"""Measured through the code that serves, a head is as good as its training says; and only then."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.drafters.heads.block import BlockDrafter
from paceline.heads.block import BlockHead
from paceline.heads.runner import TorchBlock
from paceline.train import evaluate
from paceline.train.evaluate import DraftOutcome, RecordedText, acceptance, by_text_kind, replay
from paceline.train.evaluate import held_out_texts as recorded_answers
from paceline.train.losses.base import TrainBatch
from paceline.train.losses.block import draft_logits
from paceline.train.publish import calibrate
from paceline.types import HiddenRows
from support.heads import answers, own, recorded, target_text, tiny_model, trained_net

pytestmark = pytest.mark.slow

MODEL = tiny_model()
TEXTS = recorded(target_text())


@pytest.fixture
def net() -> BlockHead:
    return trained_net()


def in_training(net: BlockHead) -> float:
    """Tokens per pass at every anchor of the texts, as a training step counts them."""
    tokens = target_text()
    hidden, final = MODEL.features(tokens, net.shape.taps)
    anchors = torch.tensor([text.anchors() for text in TEXTS])
    with torch.no_grad():
        logits, _ = draft_logits(net, TrainBatch(tokens, own(tokens), hidden, final), anchors)
    said_next = net.draft_ids[logits.argmax(-1)]
    kept = 0
    for i, row in enumerate(anchors.tolist()):
        for j, anchor in enumerate(row):
            rest = TEXTS[i].rest(anchor, net.shape.block)
            right = [int(said_next[i, j, k]) == token for k, token in enumerate(rest)]
            kept += right.index(False) if False in right else len(right)
    return 1 + kept / anchors.numel()


def in_service(drafter: BlockDrafter) -> float:
    found = replay(drafter, MODEL, TEXTS, drafter.runner.shape.block, batch=7)
    assert len(found) == sum(len(text.anchors()) for text in TEXTS)
    return 1 + sum(guess.right for guess in found) / len(found)


class OneLate(BlockDrafter):
    """Wrong: takes every row for that of the position after it."""

    def on_hidden(self, hidden_rows: list[HiddenRows]) -> None:  # type: ignore[override]
        super().on_hidden([replace(s, start=s.start + 1) for s in hidden_rows])

    def _ready(self, ask: object) -> bool:
        return True


def test_training_overfits_and_the_drafter_serves_what_was_learnt(net: BlockHead) -> None:
    learnt, served = in_training(net), in_service(BlockDrafter(TorchBlock(net)))
    assert learnt > 2.2
    assert served == pytest.approx(learnt, abs=0.01 * net.shape.block)


def test_positions_off_by_one_are_caught(net: BlockHead) -> None:
    assert in_service(OneLate(TorchBlock(net))) < in_training(net) - 0.1


def test_shuffled_weights_fall_below_the_floor(net: BlockHead) -> None:
    """The floor of the block drafter, which is above, falls without what it has learnt."""
    kept = net.fc.weight.clone()
    with torch.no_grad():
        net.fc.weight.copy_(kept[torch.randperm(len(kept), generator=torch.Generator().manual_seed(0))])
        shuffled = in_service(BlockDrafter(TorchBlock(net)))
        net.fc.weight.copy_(kept)
    assert shuffled < 1.5


def test_confidence_becomes_a_chance(net: BlockHead) -> None:
    found = replay(BlockDrafter(TorchBlock(net)), MODEL, TEXTS, net.shape.block)
    fit = calibrate(found, net.shape.block)
    assert fit.after < fit.before
    mended = replay(BlockDrafter(TorchBlock(net), fit.calibration), MODEL, TEXTS, net.shape.block)
    again = calibrate(mended, net.shape.block)
    assert again.before == pytest.approx(fit.after, abs=1e-6)


TEXT = RecordedText([ord(c) for c in "..abcdef.."], [c.isalpha() for c in "..abcdef.."])


def test_anchors_are_words_that_words_follow() -> None:
    assert TEXT.anchors() == [2, 3, 4, 5, 6]
    assert TEXT.rest(2, 3) == [*b"bcd"]
    assert TEXT.rest(5, 9) == [*b"ef"]


def test_held_out_greedy_answers_are_played_back() -> None:
    of = replace(answers(), held_out=np.arange(16) < 6, sampled=np.arange(16) % 2 == 0)
    found = recorded_answers(of, 30)
    assert [text.tokens for text in found] == target_text()[[1, 3, 5], :30].tolist()
    assert all(text.anchors() == list(range(3, 29)) for text in found)
    assert len(recorded_answers(of, 30, max_texts=2)) == 2


def test_rates_count_passes_as_speculation_takes_them() -> None:
    right = {2: 2, 3: 0, 4: 0, 5: 1, 6: 1}
    found = [DraftOutcome(0, a, n, len(TEXT.rest(a, 2)), ()) for a, n in right.items()]
    of = acceptance(found, [TEXT], 2)
    assert of.by_position == (3 / 5, 1 / 2)  # the second place was reached three times, once past the end
    assert of.tokens_per_pass == (5 / 3, 5 / 2)  # bc d ef; bcd ef
    assert of.accepted == 3 / 4  # b c, then e and not f
    buckets = by_text_kind(found, [TEXT], 2, lambda _, at: "vowel" if TEXT.tokens[at] in b"ae" else "other")
    assert buckets["vowel"].anchors == 1
    assert sum(bucket.anchors for bucket in buckets.values()) == of.anchors


def test_on_a_cpu_few_rows_are_computed_at_once_and_nothing_else_changes(
    net: BlockHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short texts beside a long one are as long as it is."""
    texts = [*TEXTS[:6], replace(TEXTS[6], tokens=list(TEXTS[6].tokens) * 3, own=list(TEXTS[6].own) * 3)]
    whole, passes = MODEL.features, list[int]()

    def counted(
        tokens: torch.Tensor, taps: Sequence[int] = ()
    ) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        passes.append(tokens.numel())
        return whole(tokens, taps)

    monkeypatch.setattr(MODEL, "features", counted)
    together = replay(BlockDrafter(TorchBlock(net)), MODEL, texts, net.shape.block, batch=48)
    length = len(TEXTS[0].tokens)
    assert passes == [7 * 3 * length]
    passes.clear()
    monkeypatch.setattr(evaluate, "CPU_ROWS", 4 * length)
    apart = replay(BlockDrafter(TorchBlock(net)), MODEL, texts, net.shape.block, batch=48)
    assert passes == [4 * length, 2 * length, 3 * length]
    assert {(g.text, g.anchor, g.right) for g in apart} == {(g.text, g.anchor, g.right) for g in together}
    assert len(apart) == len(together)
