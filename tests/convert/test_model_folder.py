"""Transformers and paceline load a written folder with the same logits and the same tokens."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.convert import export_model
from paceline.convert.foreign_checkpoint import ARCHITECTURES
from paceline.convert.hf_model import config_of, write_model
from paceline.errors import UnknownArchitecture, UsageError
from paceline.target.weights.model_config import Rope, Weights
from paceline.target.weights.reader import load
from paceline.text import Tokenizer
from paceline.train.train_decoder import TrainDecoder
from support.models import WRITTEN, random_weights, save_reference, some_tokens

pytestmark = pytest.mark.slow

hf = pytest.importorskip("transformers")

BOUND = 1e-5  # of the largest logit
TEXT = 'Hello café 123\n<|im_start|>user<|im_end|> {"a": [1, null]}'


def logits(weights: Weights, tokens: list[int]) -> Tensor:
    model = TrainDecoder(weights, "cpu", torch.float32)
    return model.logits(model.features(torch.tensor([tokens]))[1])[0]


def theirs(folder: Path, tokens: list[int]) -> Tensor:
    model: Any = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        found: Tensor = model(torch.tensor([tokens])).logits[0]
    return found


def close(ours: Tensor, others: Tensor) -> bool:
    return float((ours - others).abs().max()) < BOUND * float(others.abs().max())


def moved(weights: Weights) -> Weights:
    """As if it had been trained."""
    generator = torch.Generator().manual_seed(3)
    changed = {
        name: tensor + 0.05 * tensor.abs().mean() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in weights.tensors.items()
    }
    return replace(weights, tensors=changed)


@pytest.mark.parametrize("described", ["as it was", "anew"])
@pytest.mark.parametrize("family", WRITTEN)
def test_transformers_reads_what_was_trained(tmp_path: Path, family: str, described: str) -> None:
    save_reference(family, tmp_path / "first")
    trained, tokens = moved(load(tmp_path / "first")), some_tokens(50)
    write_model(tmp_path / "made", tmp_path / "first", trained.shape, trained.tensors, torch.float32)
    if described == "anew":
        made = config_of(trained.shape, trained.tensors, "float32", {})
        (tmp_path / "made" / "config.json").write_text(json.dumps(made))
    again = load(tmp_path / "made")
    assert again.shape == trained.shape
    ours = logits(trained, tokens)
    assert not close(ours, theirs(tmp_path / "first", tokens))
    assert close(ours, theirs(tmp_path / "made", tokens))
    assert close(ours, logits(again, tokens))


def test_families_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    save_reference("phi3", tmp_path / "first")
    weights = load(tmp_path / "first")
    with pytest.raises(UnknownArchitecture, match=r"phi3 family cannot be written.*known: llama"):
        write_model(tmp_path / "made", tmp_path / "first", weights.shape, weights.tensors)
    assert not (tmp_path / "made").exists()


def test_weights_are_stored_in_half_as_many_bytes(tmp_path: Path) -> None:
    save_reference("qwen2", tmp_path / "first")
    weights = load(tmp_path / "first")
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "model.safetensors.0123.new").touch()  # of a writer that was killed
    write_model(tmp_path / "made", tmp_path / "first", weights.shape, weights.tensors)
    assert list((tmp_path / "made").glob("*.new")) == []
    assert json.loads((tmp_path / "made" / "config.json").read_text())["dtype"] == "bfloat16"
    modes = {path.stat().st_mode for path in (tmp_path / "made").iterdir()}
    assert len(modes) == 1  # who may read one file may read all
    for name, tensor in load(tmp_path / "made").tensors.items():
        assert torch.equal(tensor, weights.tensors[name].bfloat16().float())


def check_real(path: Path, folder: Path) -> None:
    export_model(path, folder)
    weights, now, tokens = load(path), load(folder), some_tokens(20, vocab=30_000)
    assert now.shape == weights.shape
    assert set(now.tensors) == set(weights.tensors)
    for name, tensor in weights.tensors.items():
        if name.endswith("norm"):  # gemma's are stored less 1, which rounds
            assert torch.allclose(now.tensors[name], tensor, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(now.tensors[name], tensor), name
    assert close(logits(weights, tokens), theirs(folder, tokens))
    ours, again, other = (
        Tokenizer.load(path),
        Tokenizer.load(folder),
        hf.AutoTokenizer.from_pretrained(folder),
    )
    assert ours.encode(TEXT) == again.encode(TEXT) == other(TEXT).input_ids
    for about in (
        "fingerprint",
        "eos_ids",
        "control",
        "added",
        "bos_id",
        "adds_bos",
        "vocab_size",
        "templates",
    ):
        assert getattr(ours, about) == getattr(again, about)
    assert other.eos_token_id in ours.eos_ids


@pytest.mark.model
def test_a_gguf_file_becomes_a_folder(smollm2_path: Path, tmp_path: Path) -> None:
    check_real(smollm2_path, tmp_path)
    with pytest.raises(UsageError, match="is there already"):
        export_model(smollm2_path, tmp_path)
    with pytest.raises(UsageError, match="is a folder already"):
        export_model(tmp_path, tmp_path / "again")
    chat = [{"role": "user", "content": "Hi"}]
    other = hf.AutoTokenizer.from_pretrained(tmp_path)
    shown = other.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert shown == Tokenizer.load(smollm2_path).render(chat)


@pytest.mark.gemma
def test_a_gguf_file_of_another_family_becomes_a_folder(
    gemma_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    check_real(gemma_path, tmp_path)
    assert "incorrect tokenization" not in caplog.text


def test_a_model_is_not_written_over_itself(tmp_path: Path) -> None:
    save_reference("llama", tmp_path)
    weights = load(tmp_path)
    with pytest.raises(UsageError, match="is the model itself"):
        write_model(tmp_path, tmp_path, weights.shape, weights.tensors)


def test_positions_that_no_config_can_tell_are_refused() -> None:
    weights = random_weights()
    shape = replace(weights.shape, rope=Rope(1e4, divisors=(1.0, 2.0)))
    with pytest.raises(UnknownArchitecture, match="start from the model's own folder"):
        config_of(shape, weights.tensors, "float32", {})


def test_what_a_config_says_of_windows_and_positions() -> None:
    weights = random_weights()

    def told(**other: Any) -> dict[str, Any]:
        return config_of(replace(weights.shape, **other), weights.tensors, "float32", {})

    local = (True,) * weights.shape.layers
    with pytest.raises(UnknownArchitecture, match="a window only"):
        told(architecture="llama", window=8, local_layers=local)
    assert told(architecture="qwen3", window=8, local_layers=local)["sliding_window"] == 8
    assert told(architecture="mistral")["sliding_window"] is None
    assert told(rope=Rope(1e4, "linear", 2.0))["rope_scaling"]["factor"] == 2.0
    assert told(rope=Rope(1e4, "llama3", 8.0))["rope_scaling"]["original_max_position_embeddings"] == 8192


def test_every_family_has_a_class() -> None:
    assert all(hasattr(hf, architecture) for architecture in ARCHITECTURES.values())
