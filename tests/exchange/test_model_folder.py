"""A model written as a Hugging Face folder is the model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.errors import SettingError, UnknownArchitecture
from paceline.exchange import export_model
from paceline.exchange.model import _config, _rope
from paceline.target.load import load
from paceline.target.shape import Rope
from paceline.text import Tokenizer

TEXT = "<|im_start|>user\nHow many 12's are in 1234? élan 日本<|im_end|>\n"


def same_model(path: Path, out: Path) -> None:
    export_model(path, out)
    was, now = load(path), load(out)
    assert now.shape == was.shape
    assert set(now.tensors) == set(was.tensors)
    for name, tensor in was.tensors.items():
        if name.endswith("norm"):  # gemma's are stored less 1, which rounds
            assert torch.allclose(now.tensors[name], tensor, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(now.tensors[name], tensor), name
    before, after = Tokenizer.load(path), Tokenizer.load(out)
    assert after.encode(TEXT) == before.encode(TEXT)
    assert (after.bos_id, after.adds_bos, after.eos_ids) == (before.bos_id, before.adds_bos, before.eos_ids)


@pytest.mark.model
def test_smollm2(smollm2_path: Path, tmp_path: Path) -> None:
    same_model(smollm2_path, tmp_path / "out")
    asked = [{"role": "user", "content": "Hello"}]
    was, now = (Tokenizer.load(path).render(asked) for path in (smollm2_path, tmp_path / "out"))
    assert now == was
    with pytest.raises(SettingError, match="is there already"):
        export_model(smollm2_path, tmp_path / "out")
    with pytest.raises(SettingError, match="is a folder already"):
        export_model(tmp_path / "out", tmp_path / "again")


@pytest.mark.gemma
def test_gemma(gemma_path: Path, tmp_path: Path) -> None:
    same_model(gemma_path, tmp_path / "out")


@pytest.mark.model
def test_half_of_the_room(smollm2_path: Path, tmp_path: Path) -> None:
    out = export_model(smollm2_path, tmp_path / "out", dtype="bfloat16")
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    was = load(smollm2_path).tensors["layers.3.q"]
    assert torch.equal(load(out).tensors["layers.3.q"], was.bfloat16().float())


def test_what_a_folder_cannot_say_is_named() -> None:
    from tiny_heads import tiny_model

    shape = tiny_model().shape
    with pytest.raises(UnknownArchitecture, match="one by one"):
        _rope(Rope(1e4, divisors=(1.0, 2.0)))
    with pytest.raises(UnknownArchitecture, match="a window only"):
        _config(replace(shape, window=8, local_layers=(True,) * shape.layers), tied=True, biased=False)
    mistral = replace(shape, architecture="mistral")
    assert _config(mistral, tied=True, biased=False)["sliding_window"] is None
    assert _rope(Rope(1e4, "linear", 2.0))["factor"] == 2.0
    assert _rope(Rope(1e4, "llama3", 8.0))["original_max_position_embeddings"] == 8192
