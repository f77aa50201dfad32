"""The target makes up requests where users made theirs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.target.weights.reader import load
from paceline.text import Tokenizer
from paceline.train.data.prompts import collect
from paceline.train.data.rollout import Rollout
from paceline.train.data.synthetic import make_up
from paceline.train.train_decoder import TrainDecoder
from support.talk import called, record, user, write

pytestmark = pytest.mark.model
HOW = Rollout(slots=4)


def test_new_requests_for_the_same_tools(smollm2_path: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_path)
    model = TrainDecoder(load(smollm2_path, torch.float32), "cpu", torch.float32)
    source = write(tmp_path / "a.jsonl", [record(user("Rain in Oslo?"), called("Oslo"))])
    (prompt,) = collect(tokenizer, [source], 1024, share=0.0).prompts
    made = make_up(model, tokenizer, [prompt], lambda _: 4, HOW, 1024)
    assert 1 <= len(made) <= 4
    for new in made:
        assert new.tools == prompt.tools
        assert new.called
        assert not new.held_out
        assert new.messages[-1]["role"] == "user"
        assert new.messages != prompt.messages
        assert new.tokens == tuple(tokenizer.encode_chat(new.messages, list(new.tools)))
    assert len({new.tokens for new in made}) == len(made)
    assert make_up(model, tokenizer, [prompt], lambda _: 4, HOW, 1024) == made
    assert make_up(model, tokenizer, [replace(prompt, held_out=True)], lambda _: 4, HOW, 1024) == []
    assert (
        make_up(model, tokenizer, [prompt], lambda _: 4, HOW, max(len(new.tokens) for new in made) - 1)
        != made
    )


def test_every_second_one_begins_as_the_recorded_one_and_no_two_chats_are_the_same(
    smollm2_path: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(smollm2_path)
    model = TrainDecoder(load(smollm2_path, torch.float32), "cpu", torch.float32)
    asked = ["Name a river in France and say where it ends.", "Write a line about the sea at night, please."]
    talks = [{"messages": [user(text)], "group": text} for text in asked]
    chats = collect(tokenizer, [write(tmp_path / "a.jsonl", talks)], 1024, share=0.0).prompts
    made = make_up(model, tokenizer, chats, lambda prompt: 3, HOW, 1024)
    new = [str(prompt.messages[-1]["content"]) for prompt in made]
    assert len(new) == len(set(new))
    assert len(new) >= 4  # from nothing, too, the two go different ways
    begins = [text.split()[0] for text in new]
    assert {"Name", "Write"} & set(begins)
