"""The target makes up requests where users made theirs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from talk import called, record, user, write

from paceline.target.load import load
from paceline.text import Tokenizer
from paceline.train.dense import DenseModel
from paceline.train.made_up import make_up
from paceline.train.prompts import collect
from paceline.train.rollout import Rollout

pytestmark = pytest.mark.model
HOW = Rollout(slots=4)


def test_new_requests_for_the_same_tools(smollm2_path: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_path)
    model = DenseModel(load(smollm2_path, torch.float32), "cpu", torch.float32)
    source = write(tmp_path / "a.jsonl", [record(user("Rain in Oslo?"), called("Oslo"))])
    (prompt,) = collect(tokenizer, [source], 1024, share=0.0).prompts
    made = make_up(model, tokenizer, [prompt], 4, HOW)
    assert 1 <= len(made) <= 4
    for new in made:
        assert new.tools == prompt.tools
        assert new.called
        assert not new.held_out
        assert new.messages[-1]["role"] == "user"
        assert new.messages != prompt.messages
        assert new.tokens == tuple(tokenizer.encode_chat(new.messages, list(new.tools)))
    assert len({new.tokens for new in made}) == len(made)
    assert make_up(model, tokenizer, [prompt], 4, HOW) == made
    assert make_up(model, tokenizer, [replace(prompt, held_out=True)], 4, HOW) == []
