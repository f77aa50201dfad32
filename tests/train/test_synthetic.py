"""The target makes up requests where users made theirs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, EngineConfig
from paceline.train.data import synthetic
from paceline.train.data.prompts import collect
from paceline.train.data.rollout import Job, Rollout, roll_out
from paceline.train.data.synthetic import synthesize
from support.training import called, record, user, write

pytestmark = [pytest.mark.model, pytest.mark.slow]
HOW = Rollout()


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return LLM(str(smollm2_path), config=EngineConfig("cpu", cache_mb=64))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short requests, each rolled out once: rollouts of a job are the same every time (test_rollout)."""
    known: dict[str, list[list[int]]] = {}

    def once(llm: LLM, jobs: Sequence[Job], *other: Any) -> list[list[int]]:
        if repr(jobs) not in known:
            known[repr(jobs)] = roll_out(llm, jobs, *other)
        return known[repr(jobs)]

    monkeypatch.setattr(synthetic, "LONGEST", 96)
    monkeypatch.setattr(synthetic, "roll_out", once)


def test_new_requests_for_the_same_tools(llm: LLM, tmp_path: Path) -> None:
    tokenizer = llm.tokenizer
    source = write(tmp_path / "a.jsonl", [record(user("Rain in Oslo?"), called("Oslo"))])
    (prompt,) = collect(tokenizer, [source], 1024, share=0.0).prompts
    made = synthesize(llm, [prompt], lambda _: 4, HOW, 1024)
    assert 1 <= len(made) <= 4
    for new in made:
        assert new.tools == prompt.tools
        assert new.called
        assert not new.held_out
        assert new.messages[-1]["role"] == "user"
        assert new.messages != prompt.messages
        assert new.tokens == tuple(tokenizer.encode_chat(new.messages, list(new.tools)))
    assert len({new.tokens for new in made}) == len(made)
    assert synthesize(llm, [prompt], lambda _: 4, HOW, 1024) == made
    assert synthesize(llm, [replace(prompt, held_out=True)], lambda _: 4, HOW, 1024) == []
    assert synthesize(llm, [prompt], lambda _: 4, HOW, max(len(new.tokens) for new in made) - 1) != made


def test_every_second_one_begins_as_the_recorded_one_and_no_two_chats_are_the_same(
    llm: LLM, tmp_path: Path
) -> None:
    tokenizer = llm.tokenizer
    asked = ["Name a river in France and say where it ends.", "Write a line about the sea at night, please."]
    talks = [{"messages": [user(text)], "group": text} for text in asked]
    chats = collect(tokenizer, [write(tmp_path / "a.jsonl", talks)], 1024, share=0.0).prompts
    made = synthesize(llm, chats, lambda prompt: 4, HOW, 1024)
    new = [str(prompt.messages[-1]["content"]) for prompt in made]
    assert len(new) == len(set(new))
    assert len(new) >= 4  # from nothing, too, the two go different ways
    begins = [text.split()[0] for text in new]
    assert {"Name", "Write"} & set(begins)
