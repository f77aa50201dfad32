"""Where memory ends within the C++, an error tells so, and what comes after it is right."""

import ctypes
from pathlib import Path

import pytest
from torch import Tensor

from paceline.errors import ModelError
from paceline.heads.runner import ChainStart, SampleCall
from paceline.target.native import library
from paceline.types import Feed
from support.memory import FLAGS, Scarce
from support.models import open_with, some_tokens
from support.native_targets import SHAPES, a_net, a_pool, a_text, built, native, native_target, tiny_model

pytestmark = pytest.mark.slow

PATH = "portable"  # every path allocates alike
SHAPE = SHAPES["odd"]


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> Scarce:
    built(PATH)
    found = library.load(PATH, FLAGS)
    monkeypatch.setattr(library, "load", lambda path, extra=(): found)
    return Scarce(found)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3moe"])
def test_a_pass_that_had_no_memory_can_be_run_again(scarce: Scarce, tmp_path: Path, family: str) -> None:
    model = tiny_model(tmp_path / "model.gguf", family)
    plenty, target = (native_target(model, PATH) for _ in range(2))

    def scored() -> Tensor:
        return target.forward([Feed("s", some_tokens(40, 1))], taps=(0,)).logits

    for one in (plenty, target):
        open_with(one, "s", [1, 2, 3])
    expected = plenty.forward([Feed("s", some_tokens(40, 1))], taps=(0,)).logits
    failed, found = scarce.failures(scored, "no memory for a pass of 40 rows")
    assert failed > 8
    assert found.equal(expected)


def test_a_draft_that_had_no_memory_can_be_made_again(scarce: Scarce) -> None:
    net = a_net(SHAPE)
    plenty, runner = (native(net, PATH) for _ in range(2))

    def read_and_filled() -> tuple[Tensor, list[list[int]]]:
        (block,) = runner.fill([a_text(runner, SHAPE, 30)], SHAPE.block)
        return block.base, runner.chains([ChainStart(block, 0, 3)], [SHAPE.block])[0]

    runner.fill([a_text(runner, SHAPE, 2)], 1)
    (expected,) = plenty.fill([a_text(plenty, SHAPE, 30)], SHAPE.block)
    failed, (base, said) = scarce.failures(read_and_filled, "no memory for a pass of the drafter")
    assert failed > 8
    assert base.equal(expected.base)
    assert said == plenty.chains([ChainStart(expected, 0, 3)], [SHAPE.block])[0]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_draft_that_cannot_be_sampled_is_reported(threads: int) -> None:
    number, word, pointer = ctypes.c_int64, ctypes.c_uint32, ctypes.c_void_p
    drawn: list[int] = []

    def second_fails(*_: object) -> int:
        drawn.append(len(drawn))
        return 1 if len(drawn) != 2 else -2

    runner = native(a_net(SHAPE), threads=threads)
    blocks = runner.fill([a_text(runner, SHAPE, 9, seed) for seed in range(2)], SHAPE.block)
    places = [ChainStart(block, 0, 5) for block in blocks]
    choose = ctypes.CFUNCTYPE(number, pointer, pointer, number, pointer, word, word)(second_fails)
    where = ctypes.cast(choose, pointer).value
    assert where is not None
    draw = SampleCall(where, 0, [(0, 0)] * SHAPE.block, None)
    with pytest.raises(ModelError, match="no memory for a pass of the drafter"):
        runner.chains(places, [SHAPE.block] * 2, [draw, None])
    said, _ = runner.chains(places, [SHAPE.block] * 2, [draw, None])
    assert set(said[0]) == {int(a_net(SHAPE).draft_ids[1])}


def test_nothing_is_made_without_memory(scarce: Scarce, tmp_path: Path) -> None:
    net = a_net(SHAPE)
    model = tiny_model(tmp_path / "model.gguf")
    assert scarce.failures(lambda: a_pool(PATH), "could not start its threads")[0] > 0
    assert scarce.failures(lambda: native(net, PATH), "")[0] > 10
    assert scarce.failures(lambda: native_target(model, PATH), "")[0] > 1
