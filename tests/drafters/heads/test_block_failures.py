"""A pass of the drafter that fails leaves nothing behind that would be taken for what it read."""

from collections.abc import Sequence

import pytest

from paceline.drafters.heads import block
from paceline.drafters.heads.block import BlockDrafter
from paceline.heads.runner import TapInput, TorchBlock
from paceline.types import NO_DRAFT, Ask, HiddenRows, Seq
from support.heads import random_net, target_text, tiny_model


class Broken(Exception):
    pass


def begun(drafter: BlockDrafter, name: str, length: int = 10) -> Seq:
    seq = Seq(name, target_text()[0, :length].tolist(), length)
    drafter.begin(seq)
    show(drafter, seq, 0)
    return seq


def show(drafter: BlockDrafter, seq: Seq, start: int) -> None:
    hidden, _ = tiny_model().features(target_text()[:1, : len(seq.tokens)], drafter.taps)
    rows = {tap: states[0, start : len(seq.tokens) - 1] for tap, states in hidden.items()}
    drafter.on_hidden([HiddenRows(seq, start, rows)])


@pytest.mark.parametrize("call", ["read", "fill", "draft_chains"])
def test_a_text_whose_rows_were_never_filled_is_drafted_no_more(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = BlockDrafter(TorchBlock(random_net()))
    seq, tree = begun(drafter, "one"), call == "fill"
    with monkeypatch.context() as patch:
        patch.setattr(drafter.runner, call, fail)
        if call == "read":
            patch.setattr(block, "MAX_PENDING", 16)
            seq.tokens.extend(target_text()[0, 10:40].tolist())
            with pytest.raises(Broken):
                show(drafter, seq, 9)  # too many to wait for the next draft
        else:
            with pytest.raises(Broken):
                drafter.draft([Ask(seq, 4, after=(3,)) if tree else Ask(seq, 4)])
    assert drafter.draft([Ask(seq, 4)]) == [NO_DRAFT]
    show(drafter, seq, len(seq.tokens) - 1)
    drafter.end(seq)
    again = Seq("two", list(seq.tokens), len(seq.tokens), computed=len(seq.tokens) - 1)
    drafter.begin(again)
    assert drafter.draft([Ask(again, 4)]) == [NO_DRAFT]  # nothing was kept of it


@pytest.mark.parametrize("drafted", [True, False])
def test_an_answer_without_drafts_is_not_read_at_its_end(
    drafted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt is, since others may begin with it."""
    drafter = BlockDrafter(TorchBlock(random_net()))
    seq, read = begun(drafter, "one"), list[int]()
    runner_read = drafter.runner.read
    drafter._cache_pending([seq.id])
    seq.tokens.extend(target_text()[0, 10:16].tolist())
    show(drafter, seq, 9)
    assert drafter.ready(seq)
    if drafted:
        drafter.draft([Ask(seq, 4)])
        seq.tokens.extend(target_text()[0, 16:18].tolist())
        assert not drafter.ready(seq)
        show(drafter, seq, 15)

    def noted(parts: Sequence[TapInput]) -> None:
        read.extend(part.start for part in parts)
        runner_read(parts)

    monkeypatch.setattr(drafter.runner, "read", noted)
    seq.prompt_len = 9
    drafter.end(seq)
    assert read == ([15] if drafted else [])
    drafter.end(begun(drafter, "prompt"))
    assert read[-1:] == [0]
    assert not drafter._pending


def fail(*_: object) -> None:
    raise Broken
