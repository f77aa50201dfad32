import io
import os
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import EngineConfig
from paceline.errors import CorruptModel, ModelError, PacelineError, UnknownModel
from paceline.target.load import load_target
from paceline.target.weights.checkpoint import Checkpoint
from paceline.target.weights.gguf import open_gguf
from paceline.target.weights.model_config import ModelConfig, Rope
from paceline.target.weights.reader import load, load_embeddings, rotation_order
from support import examples, tiny_gguf


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "m.gguf"
    return tiny_gguf.write(path, "gemma3", kind="Q4_0").read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folder")
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def damaged(tmp_path_factory: pytest.TempPathFactory, name: str, data: bytes) -> Path:
    path = tmp_path_factory.mktemp("damaged") / name
    path.write_bytes(data)
    return path


def complaint(path: Path) -> str:
    """The message of the error that loading the file raises, if it is one of ours."""
    try:
        load(path)
    except PacelineError as error:
        return str(error)
    return ""


@given(data=st.data())
@settings(max_examples=examples(60))
def test_a_cut_gguf_file_is_always_reported(
    gguf_bytes: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(gguf_bytes) - 1) | st.integers(0, 5000))
    with pytest.raises(CorruptModel, match=r"^m\.gguf [^\n]*$"):
        load(damaged(tmp_path_factory, "m.gguf", gguf_bytes[:cut]))


@given(data=st.data())
@settings(max_examples=examples(60))
def test_a_changed_gguf_header_never_surprises(
    gguf_bytes: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    changed = bytearray(gguf_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, 4000))] = data.draw(st.integers(0, 255))
    path = damaged(tmp_path_factory, "m.gguf", bytes(changed))
    assert "\n" not in complaint(path)


@given(data=st.data())
@settings(max_examples=examples(60))
def test_a_cut_safetensors_file_is_always_reported(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    path = damaged(tmp_path_factory, "model.safetensors", whole[:cut])
    (path.parent / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(CorruptModel, match=r"^model\.safetensors is (truncated|damaged)"):
        load(path.parent)


@given(data=st.data())
@settings(max_examples=examples(60))
def test_a_changed_safetensors_header_never_surprises(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    changed = bytearray((folder / "model.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, 1000))] = data.draw(st.integers(0, 255))
    path = damaged(tmp_path_factory, "model.safetensors", bytes(changed))
    (path.parent / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert "\n" not in complaint(path.parent)


def test_a_cut_file_says_how_much_is_missing(gguf_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes[:-1000])
    expected, found = len(gguf_bytes), len(gguf_bytes) - 1000
    with pytest.raises(CorruptModel, match=rf"expected {expected} bytes, found {found}, so blk\.1\.\S+ is"):
        load(path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_smaller_dtypes_are_rounded_from_float32(
    gguf_bytes: bytes, tmp_path: Path, dtype: torch.dtype
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes)
    full, small = load(path), load(path, dtype)
    for name, tensor in full.tensors.items():
        assert torch.equal(small.tensors[name], tensor.to(dtype)), name
    assert small.fingerprint == full.fingerprint


def test_progress_counts_up_to_the_whole(gguf_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes)
    seen: list[tuple[int, int]] = []
    load(path, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == sum(t.nbytes for t in open_gguf(path).tensors.values())


def test_fingerprint_tells_weights_and_metadata_apart(tmp_path: Path) -> None:
    def fingerprint(name: str, seed: int = 0, theta: float = 1e4) -> str:
        weights = tiny_gguf.tensors("qwen2", seed)
        path = tiny_gguf.write(tmp_path / name, "qwen2", weights, settings={"rope.freq_base": theta})
        return load(path).fingerprint

    same = fingerprint("a.gguf")
    assert same == fingerprint("b.gguf")
    assert len({same, fingerprint("c.gguf", seed=1), fingerprint("d.gguf", theta=2e4)}) == 3


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_nothing_of_the_file_stays_open(gguf_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "held.gguf"
    path.write_bytes(gguf_bytes)
    weights = load(path)
    assert weights.tensors
    assert path.name not in Path("/proc/self/maps").read_text()
    assert str(path) not in [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]


def of_heads(heads: int, head_dim: int, dims: int = 0, interleaved: bool = False) -> Checkpoint:
    shape = ModelConfig("llama", 1, 8, heads, 1, head_dim, 8, 8, 64, 1e-5, Rope(1e4, dims=dims))
    return Checkpoint("m", shape, {}, (), True, interleaved, 0.0, b"")


@given(heads=st.integers(1, 4), half=st.integers(1, 8), width=st.integers(1, 5))
def test_rotation_order_undoes_the_converter(heads: int, half: int, width: int) -> None:
    rows = torch.randn(heads * 2 * half, width, generator=torch.Generator().manual_seed(0))
    interleaved = rows.view(heads, 2, half, width).transpose(1, 2).reshape(rows.shape)
    order = rotation_order(of_heads(heads, 2 * half, interleaved=True), "layers.0.q")
    assert order is not None
    assert torch.equal(interleaved[order], rows)


@given(heads=st.integers(1, 3), rotated=st.integers(1, 4), fixed=st.integers(1, 4))
def test_rotated_dimensions_of_a_part_lie_half_a_head_apart(heads: int, rotated: int, fixed: int) -> None:
    size, half = 2 * (rotated + fixed), rotated + fixed
    checkpoint = of_heads(heads, size, dims=2 * rotated)
    order = rotation_order(checkpoint, "layers.0.q")
    assert order is not None
    assert sorted(order.tolist()) == list(range(heads * size))
    for head, dim in product(range(heads), range(rotated)):
        at = order.tolist()[head * size :]
        assert (at[dim], at[half + dim]) == (head * size + dim, head * size + rotated + dim)
    assert rotation_order(checkpoint, "layers.0.v") is None
    assert rotation_order(of_heads(heads, size), "layers.0.q") is None


def test_no_such_path(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="there is no absent"):
        load(tmp_path / "absent")


def test_unreadable_file_is_a_model_error(
    gguf_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes)
    monkeypatch.setattr(np, "fromfile", fail)
    with pytest.raises(ModelError, match=r"m\.gguf cannot be read: Permission denied"):
        load(path)


@pytest.mark.parametrize("target", [False, True])
@pytest.mark.parametrize("name", ["m.gguf", "config.json", "model.safetensors"])
def test_a_file_that_may_not_be_read_is_named_in_one_line(
    gguf_bytes: bytes, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, target: bool
) -> None:
    """No permission bits: the superuser may read everything."""
    path = tmp_path / name if name == "m.gguf" else folder
    if name == "m.gguf":
        path.write_bytes(gguf_bytes)
    real = io.open

    def refuse(file: Any, *others: Any, **named: Any) -> Any:
        if isinstance(file, str | Path) and Path(file).name == name:
            raise PermissionError(13, "Permission denied", str(file))
        return real(file, *others, **named)

    monkeypatch.setattr(io, "open", refuse)
    with pytest.raises(ModelError) as caught:
        load_target(path, EngineConfig(device="cpu", cache_mb=16)) if target else load_embeddings(path)
    assert str(caught.value) == f"{name} cannot be read: Permission denied"


@pytest.mark.model
def test_smollm2(smollm2_path: Path) -> None:
    weights = load(smollm2_path)
    shape = weights.shape
    assert (shape.architecture, shape.layers, shape.width, shape.ff_width) == ("llama", 30, 576, 1536)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.vocab_size) == (9, 3, 64, 49152)
    assert (shape.rope, shape.max_context) == (Rope(100_000.0), 8192)
    assert sum(tensor.numel() for tensor in weights.tensors.values()) == 134_515_008
    stored = next(t for t in gguf.GGUFReader(smollm2_path).tensors if t.name == "blk.7.ffn_up.weight")
    expected = gguf.quants.dequantize(stored.data, stored.tensor_type)
    np.testing.assert_array_equal(weights.tensors["layers.7.up"].numpy(), expected)


@pytest.mark.large
def test_qwen(qwen_path: Path) -> None:
    checkpoint = open_gguf(qwen_path)
    shape = checkpoint.shape
    assert (shape.architecture, shape.layers, shape.width, shape.ff_width) == ("qwen2", 28, 1536, 8960)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.vocab_size) == (12, 2, 128, 151_936)
    assert (shape.rope, shape.max_context, shape.window) == (Rope(1e6), 32_768, 0)
    assert not checkpoint.tied
    assert checkpoint.tensors["layers.27.k_bias"].shape == (256,)


@pytest.mark.gemma
def test_gemma(gemma_path: Path) -> None:
    weights = load(gemma_path, torch.bfloat16)
    shape = weights.shape
    assert (shape.architecture, shape.layers, shape.width, shape.ff_width) == ("gemma3", 18, 640, 2048)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.vocab_size) == (4, 1, 256, 262_144)
    assert (shape.rope, shape.local_rope, shape.window) == (Rope(1e6), Rope(1e4), 512)
    assert shape.local_layers == (True, True, True, True, True, False) * 3
    assert (shape.embed_scale, shape.attn_scale) == (25.25, 256**-0.5)
