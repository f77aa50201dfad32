"""The forward pass against transformers on the same weights.

Errors are relative to the scale of the logits: max |ours - theirs| / max |theirs|.
"""

from collections.abc import Callable
from math import cos, sin
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import EngineConfig
from paceline.target.eager.rope import RopeTable, frequencies, rotate
from paceline.target.eager.target import TorchTarget
from paceline.target.weights.model_config import Rope
from paceline.target.weights.reader import load
from paceline.types import Draft, Feed, Seq
from support.models import CONFIG, FAMILIES, open_with, rows_one_by_one, save_reference, some_tokens

TINY_BOUND = 1e-5
REAL_BOUND = 1e-5
LENGTH = 80  # five windows of the tiny gemma


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TorchTarget, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    reference = save_reference(request.param, folder)
    return TorchTarget(load(folder, torch.float32), CONFIG), reference


def all_rows(target: TorchTarget, tokens: list[int]) -> Tensor:
    """Logits after every token, in one pass."""
    target.open(Seq("all", tokens, 1, tenant="nobody else"))
    logits = target.forward([Feed("all", tokens[:1], Draft(tuple(tokens[1:])))]).logits
    target.keep("all", 0)
    target.close("all")
    return logits


def reference_logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def test_whole_sequence_equals_transformers(pair: tuple[TorchTarget, Any]) -> None:
    target, reference = pair
    tokens = some_tokens(LENGTH)
    assert relative_error(all_rows(target, tokens), reference_logits(reference, tokens)) < TINY_BOUND


@pytest.mark.parametrize("chunk", [7, 32])
def test_prefill_then_decode_equals_transformers(pair: tuple[TorchTarget, Any], chunk: int) -> None:
    target, reference = pair
    tokens = some_tokens(LENGTH, seed=chunk)
    open_with(target, "s", tokens[:40], chunk)
    ours = rows_one_by_one(target, "s", 40, tokens[40:])
    target.close("s")
    assert relative_error(ours, reference_logits(reference, tokens)[40:]) < TINY_BOUND


def test_taps_are_the_outputs_of_layers(pair: tuple[TorchTarget, Any]) -> None:
    target, reference = pair
    tokens = some_tokens(44)
    with torch.inference_mode():
        theirs = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    target.open(Seq("taps", tokens, 1, tenant="taps"))
    scores = target.forward([Feed("taps", tokens[:40], Draft(tuple(tokens[40:])))], taps=(0, 1))
    target.close("taps")
    assert set(scores.hidden) == {0, 1}
    for layer, rows in scores.hidden.items():
        assert relative_error(rows, theirs[layer + 1][0]) < TINY_BOUND


def test_longrope_within_the_original_context(tmp_path: Path) -> None:
    """Transformers takes the divisors of short texts up to 32 tokens, paceline where none may be longer."""
    reference = save_reference("phi4_mini", tmp_path)
    target = TorchTarget(load(tmp_path), EngineConfig(device="cpu", cache_mb=16, max_model_len=32))
    tokens = some_tokens(32)
    assert relative_error(all_rows(target, tokens), reference_logits(reference, tokens)) < TINY_BOUND
    longer = TorchTarget(load(tmp_path), EngineConfig(device="cpu", cache_mb=16, max_model_len=33))
    assert relative_error(all_rows(longer, tokens), reference_logits(reference, tokens)) > 0.01


def test_bfloat16_stays_near(tmp_path: Path) -> None:
    reference = save_reference("llama", tmp_path)
    target = TorchTarget(load(tmp_path, torch.bfloat16), EngineConfig(device="cpu", cache_mb=16))
    tokens = some_tokens(LENGTH)
    ours = all_rows(target, tokens)
    assert ours.dtype == torch.float32
    assert relative_error(ours, reference_logits(reference, tokens)) < 0.05


def test_rope_scaling() -> None:
    plain = frequencies(Rope(10000.0), 16)
    assert torch.equal(frequencies(Rope(10000.0, "linear", factor=4.0), 16), plain / 4)
    divisors = tuple(float(i) for i in range(1, 9))
    assert torch.equal(frequencies(Rope(10000.0, divisors=divisors), 16), plain / torch.tensor(divisors))


def test_rope_table_keeps_its_rows_when_it_grows() -> None:
    table = RopeTable(Rope(10000.0), 8, torch.device("cpu"))
    positions = torch.tensor([0, 5, 1000])
    before = table.rows(positions, 1001)
    table.rows(torch.tensor([5000]), 5001)
    assert all(torch.equal(a, b) for a, b in zip(before, table.rows(positions, 1001), strict=True))
    turned = rotate(torch.ones(1, 3, 8), *before)
    assert torch.equal(turned[:, 0], torch.ones(1, 8))
    assert turned[0, 2, 0].item() == pytest.approx(cos(1000) - sin(1000), abs=1e-6)


@pytest.fixture
def gguf_error(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int, int], float]:
    """The error over the last tokens of a sequence, decoded one by one after a prefill."""
    import transformers

    # It asks for accelerate before it reads a GGUF file, and then does not use it.
    monkeypatch.setattr("transformers.modeling_utils.is_accelerate_available", lambda: True)

    def error(path: Path, prefilled: int, decoded: int) -> float:
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
        tokens = some_tokens(prefilled + decoded, vocab=reference.config.vocab_size)
        theirs = reference_logits(reference, tokens)[prefilled:]
        del reference
        target = TorchTarget(load(path, torch.float32), EngineConfig(device="cpu", cache_mb=64))
        open_with(target, "s", tokens[:prefilled])
        return relative_error(rows_one_by_one(target, "s", prefilled, tokens[prefilled:]), theirs)

    return error


@pytest.mark.model
def test_smollm2_equals_transformers(smollm2_path: Path, gguf_error: Callable[..., float]) -> None:
    assert gguf_error(smollm2_path, 300, 6) < REAL_BOUND


@pytest.mark.large
def test_qwen_equals_transformers(qwen_path: Path, gguf_error: Callable[..., float]) -> None:
    assert gguf_error(qwen_path, 40, 3) < REAL_BOUND


@pytest.mark.gemma
def test_gemma_equals_transformers(gemma_path: Path, gguf_error: Callable[..., float]) -> None:
    assert gguf_error(gemma_path, 700, 4) < REAL_BOUND  # longer than its window of 512
