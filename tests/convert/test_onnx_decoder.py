"""The ONNX graph in onnxruntime against the decoder in torch, on the same weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.convert.onnx_decoder import (
    ENCODED,
    OnnxDtype,
    empty_cache,
    export_onnx,
    next_cache,
    output_names,
)
from paceline.errors import UnknownArchitecture, UsageError
from paceline.target.eager.target import TorchTarget
from paceline.target.weights.model_config import ModelConfig
from paceline.target.weights.reader import load
from paceline.types import Draft, Feed, Seq
from support.models import CONFIG, FAMILIES, save_reference, some_tokens
from support.native_targets import tiny_model

onnxruntime = pytest.importorskip("onnxruntime", reason="pip install onnx onnxruntime: the extra onnx")
BOUND = 1e-4
LENGTH = 40  # more than two windows of the tiny gemma


class OnnxDecoder:
    """A sequence in onnxruntime."""

    def __init__(self, file: Path, shape: ModelConfig) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._runs = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self._names = output_names(shape)
        self.cache, self.length = empty_cache(shape), 0

    def forward(self, tokens: list[int], logits: int) -> NDArray[np.float32]:
        ids = np.array([tokens], np.int64)
        numbers = {"num_logits": logits, "past_length": self.length}
        given: dict[str, Any] = {name: np.array([number], np.int64) for name, number in numbers.items()}
        given |= {"input_ids": ids, **self.cache}
        outputs = dict(zip(self._names, self._runs.run(self._names, given), strict=True))
        self.cache, self.length = next_cache(outputs), self.length + len(tokens)
        assert outputs["present.0.key"].shape[2] == self.length
        rows: NDArray[np.float32] = outputs["logits"][0]
        assert outputs["token"][0].tolist() == rows.argmax(-1).tolist()
        return rows


def torch_logits(model: Path, tokens: list[int]) -> NDArray[np.float32]:
    target = TorchTarget(load(model, torch.float32), CONFIG)
    target.open(Seq("all", tokens, 1))
    return target.forward([Feed("all", tokens[:1], Draft(tuple(tokens[1:])))]).logits.numpy()


def exported(model: Path, folder: Path, dtype: OnnxDtype = "float32") -> OnnxDecoder:
    file = export_onnx(model, folder / "model.onnx", dtype=dtype, context=512)
    return OnnxDecoder(file, load(model).shape)


EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in EXPERTS])
def test_every_family_computes_as_in_torch(family: str, tmp_path: Path) -> None:
    save_reference(family, tmp_path / "model")
    tokens = some_tokens(LENGTH)
    expected = torch_logits(tmp_path / "model", tokens)
    ours = exported(tmp_path / "model", tmp_path)
    assert np.abs(ours.forward(tokens, LENGTH) - expected).max() < BOUND


def test_pieces_rollback_and_single_tokens_give_the_same_rows(tmp_path: Path) -> None:
    save_reference("qwen3", tmp_path / "model")
    tokens = some_tokens(LENGTH)
    expected = torch_logits(tmp_path / "model", tokens)
    ours = exported(tmp_path / "model", tmp_path)
    ours.forward(tokens[:11], 1)
    ours.forward(some_tokens(7, seed=3), 1)  # a draft that is rejected
    ours.length = 11
    rows = [ours.forward(tokens[11:20], 2)]
    rows += [ours.forward([token], 1) for token in tokens[20:24]]
    assert np.abs(np.concatenate(rows) - expected[18:24]).max() < BOUND


@pytest.mark.parametrize("kind", ENCODED)
def test_blocks_of_a_gguf_file_are_kept_exactly(kind: str, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny.gguf", kind=kind)
    tokens = some_tokens(LENGTH)
    ours = exported(model, tmp_path, "gguf")
    assert np.abs(ours.forward(tokens, LENGTH) - torch_logits(model, tokens)).max() < BOUND
    assert (tmp_path / "model.onnx").stat().st_size < 0.6 * 4 * sum(
        t.numel() for t in load(model).tensors.values()
    )


def test_halves_are_near(tmp_path: Path) -> None:
    save_reference("llama", tmp_path / "model")
    tokens = some_tokens(LENGTH)
    expected = torch_logits(tmp_path / "model", tokens)
    found = exported(tmp_path / "model", tmp_path, "float16").forward(tokens, LENGTH)
    assert np.abs(found - expected).max() < 1e-2 * np.abs(expected).max()


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    save_reference("mixtral", tmp_path / "model")
    with pytest.raises(UnknownArchitecture, match="mixture of experts"):
        exported(tmp_path / "model", tmp_path)


def test_a_file_is_not_overwritten_and_a_folder_has_no_blocks(tmp_path: Path) -> None:
    save_reference("llama", tmp_path / "model")
    (tmp_path / "model.onnx").write_text("mine")
    with pytest.raises(UsageError, match="there already"):
        exported(tmp_path / "model", tmp_path)
    assert (tmp_path / "model.onnx").read_text() == "mine"
    with pytest.raises(UsageError, match="no matrix in Q4_0"):
        export_onnx(tmp_path / "model", tmp_path / "other.onnx", dtype="gguf")
    assert not (tmp_path / "other.onnx").exists()


@pytest.mark.model
def test_the_real_model_computes_as_in_torch(smollm2_path: Path, tmp_path: Path) -> None:
    tokens = some_tokens(24, vocab=49_000)
    ours = exported(smollm2_path, tmp_path, "gguf")
    expected = torch_logits(smollm2_path, tokens)
    assert np.abs(ours.forward(tokens, 24) - expected).max() < BOUND * np.abs(expected).max()
