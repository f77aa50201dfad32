"""A held-out conversation never enters training."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.text import Tokenizer
from paceline.train.data.conversations import Conversation
from paceline.train.data.held_out import held_out, is_held_out
from paceline.train.data.prompts import collect
from support.training import assistant, called, record, result, user, write

OPENINGS = st.sampled_from("abcdefgh")
SHARE = 0.4
GROUPS = st.sampled_from(["", "", *"PQRSTU"])


def talk(opening: str, group: str) -> Conversation:
    return Conversation((user(opening), assistant("ok")), group=group)


@given(st.lists(st.tuples(OPENINGS, GROUPS)))
def test_a_conversation_is_on_one_side(pairs: list[tuple[str, str]]) -> None:
    talks = [talk(*pair) for pair in pairs]
    sides = held_out(talks, SHARE)
    by_group: dict[str, set[bool]] = {}
    by_opening: dict[str, set[bool]] = {}
    for conversation, side in zip(talks, sides, strict=True):
        if conversation.group:
            by_group.setdefault(conversation.group, set()).add(side)
            assert side == is_held_out(conversation.group, SHARE)
        else:
            by_opening.setdefault(conversation.opening, set()).add(side)
    assert all(len(found) == 1 for found in (*by_group.values(), *by_opening.values()))
    for conversation, side in zip(talks, sides, strict=True):
        if conversation.group and side and conversation.opening in by_opening:
            assert by_opening[conversation.opening] == {True}


def test_groups_of_both_sides_are_tried() -> None:
    assert {is_held_out(group, SHARE) for group in "PQRSTU"} == {True, False}


def test_a_tenth_is_held_out_and_always_the_same() -> None:
    keys = [f"conversation {i}" for i in range(5000)]
    chosen = [key for key in keys if is_held_out(key)]
    assert 420 < len(chosen) < 580
    assert chosen[:3] == ["conversation 0", "conversation 4", "conversation 7"]
    assert not any(is_held_out(key, 0.0) for key in keys)
    assert all(is_held_out(key, 1.0) for key in keys)


@pytest.mark.model
def test_no_turn_of_a_held_out_conversation_is_trained_on(smollm2_path: Path, tmp_path: Path) -> None:
    """Turns of one, the same one twice, and one with and without its group."""
    tokenizer = Tokenizer.load(smollm2_path)
    records = []
    for i in range(40):
        turns = (user(f"Rain in town {i}?"), called(f"{i}"), result("wet"), assistant("Yes."), user("Sure?"))
        records.append(record(*turns, group=f"town {i}"))
        records.append(record(*turns, assistant("Yes, I am."), user("Really?")))
        records.append(record(*turns[:1], group=f"town {i}"))
    found = collect(tokenizer, [write(tmp_path / "a.jsonl", records)], 2048, 0.3).prompts
    sides: dict[str, set[bool]] = {}
    for prompt in found:
        sides.setdefault(prompt.messages[0]["content"], set()).add(prompt.held_out)
    assert len(sides) == 40
    assert all(len(side) == 1 for side in sides.values())
    expected = {f"Rain in town {i}?": {is_held_out(f"town {i}", 0.3)} for i in range(40)}
    assert sides == expected
    assert len({prompt.tokens for prompt in found}) == len(found)


@pytest.mark.model
def test_a_prompt_that_is_held_out_once_is_held_out(smollm2_path: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_path)
    out = next(f"g{i}" for i in range(100) if is_held_out(f"g{i}"))
    kept = next(f"g{i}" for i in range(100) if not is_held_out(f"g{i}"))
    for order in ((out, kept), (kept, out)):
        path = write(tmp_path / "a.jsonl", [record(user("Hello?"), group=group) for group in order])
        (prompt,) = collect(tokenizer, [path], 2048).prompts
        assert prompt.held_out
