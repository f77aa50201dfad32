"""A trained drafter of the real model in C++ is right as often as in torch."""

from pathlib import Path

import pytest
import torch

from paceline.config import EngineConfig, SpecConfig
from paceline.drafters.heads.block import BlockDrafter
from paceline.heads.block import BlockHead
from paceline.heads.head_checkpoint import load as load_head
from paceline.heads.local_heads import drafter_path
from paceline.heads.runner import TorchBlock
from paceline.llm import LLM
from paceline.target.native.block_head import NativeBlock
from paceline.target.weights.reader import load, load_embeddings
from paceline.train.evaluate import RecordedText, acceptance, replay
from paceline.train.train_decoder import TrainDecoder

pytestmark = [pytest.mark.model, pytest.mark.slow]
ASKED = (
    "Write a Python function that reads a CSV file and returns the sum of each column.",
    "List the planets of the solar system as a JSON array of objects with name and moons.",
    "Explain in a few sentences how a compiler turns source code into a program.",
    "Book a flight from Oslo to Rome on Friday and tell me what it costs.",
)


@pytest.fixture(scope="module")
def net(smollm2_path: Path) -> BlockHead:
    loaded = load_head(drafter_path("smollm2-135m-block"), load_embeddings(smollm2_path))
    assert isinstance(loaded.net, BlockHead)
    return loaded.net.eval()


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2-135m", trained=["smollm2-135m-block"], config=EngineConfig(device="cpu"))


@pytest.fixture(scope="module")
def runner(llm: LLM) -> NativeBlock:
    drafter = llm.drafters["block"]
    assert isinstance(drafter, BlockDrafter)
    assert isinstance(drafter.runner, NativeBlock)
    return drafter.runner


def test_drafts_are_right_as_often_as_in_torch(
    net: BlockHead, llm: LLM, runner: NativeBlock, smollm2_path: Path
) -> None:
    texts = []
    for asked in ASKED:
        prompt = llm.tokenizer.encode_chat([{"role": "user", "content": asked}])
        answer = llm.generate(prompt, max_tokens=128, temperature=0, seed=0).token_ids
        texts.append(RecordedText([*prompt, *answer], [False] * len(prompt) + [True] * len(answer)))
    model = TrainDecoder(load(smollm2_path, torch.float32), "cpu", torch.float32)
    native, reference = (
        acceptance(replay(BlockDrafter(one), model, texts, 8), texts, 8) for one in (runner, TorchBlock(net))
    )
    assert reference.by_position[0] > 0.25
    assert native.by_position[0] == pytest.approx(reference.by_position[0], abs=0.02)
    assert native.tokens_per_pass[-1] == pytest.approx(reference.tokens_per_pass[-1], rel=0.02)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_the_targets_own(llm: LLM, temperature: float) -> None:
    chats = [[{"role": "user", "content": asked}] for asked in ASKED]
    said = []
    for spec in ("none", "block"):
        results = llm.batch(
            chats, spec=SpecConfig((spec,), adaptive=False), max_tokens=48, temperature=temperature, seed=4
        )
        said.append([result.token_ids for result in results])
    assert said[0] == said[1]
    assert sum(result.accepted.get("block", 0) for result in results) > 20
