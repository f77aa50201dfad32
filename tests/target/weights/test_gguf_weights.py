from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.errors import CorruptModel, ModelError, UnknownArchitecture, UnknownModel
from paceline.target.weights.dequant import ENCODINGS
from paceline.target.weights.gguf import open_gguf
from paceline.target.weights.model_config import Rope
from paceline.target.weights.reader import load
from support import tiny_gguf
from support.tiny_gguf import HEAD_DIM, HEADS, KV_HEADS, LAYERS, VOCAB, WIDTH

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")


def interleaved(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """The converter's permutation of q and k of the llama family."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def test_alignment_is_the_one_the_file_states(tmp_path: Path) -> None:
    weights = tiny_gguf.tensors("qwen2")
    path = tiny_gguf.write(tmp_path / "m.gguf", "qwen2", weights, alignment=512)
    assert all(stored.offset % 512 == 0 for stored in open_gguf(path).tensors.values())
    assert torch.equal(load(path).tensors["norm"], torch.from_numpy(weights["output_norm.weight"]))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ENCODINGS)
def test_every_encoding_loads_as_the_gguf_package_decodes_it(tmp_path: Path, kind: str) -> None:
    weights = tiny_gguf.tensors("qwen2")
    loaded = load(tiny_gguf.write(tmp_path / "m.gguf", "qwen2", weights, kind)).tensors
    for name, ours in (("token_embd.weight", "embed"), ("blk.1.ffn_down.weight", "layers.1.down")):
        stored = tiny_gguf.encoded(weights[name], kind)
        expected = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind])
        np.testing.assert_array_equal(loaded[ours].numpy(), np.asarray(expected).reshape(weights[name].shape))


def test_large_tensors_are_read_chunk_by_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", "qwen2", kind="Q6_K")
    whole = load(path).tensors
    monkeypatch.setattr("paceline.target.weights.tensors.CHUNK", 768)
    pieces = load(path).tensors
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)


def test_llama_rows_return_to_the_half_rotation(tmp_path: Path) -> None:
    weights = tiny_gguf.tensors("llama") | {
        "blk.0.attn_q.bias": np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    }
    weights["blk.1.attn_q.bias"] = weights["blk.0.attn_q.bias"]
    heads = {"attn_q.weight": HEADS, "attn_q.bias": HEADS, "attn_k.weight": KV_HEADS}
    converted = {
        name: interleaved(rows, heads[part]) if (part := name.split(".", 2)[-1]) in heads else rows
        for name, rows in weights.items()
    }
    loaded = load(tiny_gguf.write(tmp_path / "m.gguf", "llama", converted)).tensors
    for part, ours in (("attn_q.weight", "q"), ("attn_q.bias", "q_bias"), ("attn_k.weight", "k")):
        np.testing.assert_array_equal(loaded[f"layers.1.{ours}"].numpy(), weights[f"blk.1.{part}"])
    np.testing.assert_array_equal(loaded["layers.1.v"].numpy(), weights["blk.1.attn_v.weight"])
    assert all(tensor.is_contiguous() for tensor in loaded.values())


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
def test_other_families_and_their_norms_load_as_stored(tmp_path: Path, family: str) -> None:
    weights = tiny_gguf.tensors(family)
    checkpoint = open_gguf(tiny_gguf.write(tmp_path / "m.gguf", family, weights))
    loaded = load(tmp_path / "m.gguf").tensors
    assert len(loaded) == len(weights)
    for ours, stored in checkpoint.tensors.items():
        np.testing.assert_array_equal(loaded[ours].numpy(), weights[stored.name])


@pytest.mark.parametrize("family", FAMILIES)
def test_shape_is_what_the_metadata_says(tmp_path: Path, family: str) -> None:
    shape = open_gguf(tiny_gguf.write(tmp_path / "m.gguf", family)).shape
    assert (shape.architecture, shape.layers, shape.width, shape.vocab_size) == (family, LAYERS, WIDTH, VOCAB)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (shape.ff_width, shape.max_context, shape.rope) == (tiny_gguf.FF, 128, Rope(50_000.0))
    assert shape.norm_eps == pytest.approx(1e-5)


def test_gemma3_gets_what_its_files_leave_out(tmp_path: Path) -> None:
    settings = {"block_count": 12, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    shape = open_gguf(tiny_gguf.write(tmp_path / "m.gguf", "gemma3", settings=settings)).shape
    assert shape.local_layers == (True, True, True, True, True, False) * 2
    assert (shape.window, shape.local_rope) == (16, Rope(10_000.0))
    assert shape.rope == Rope(50_000.0, "linear", 8.0)
    assert (shape.activation, shape.embed_scale) == ("gelu_tanh", WIDTH**0.5)
    assert shape.attn_scale == HEAD_DIM**-0.5


def test_gemma3_of_27b_scales_by_width_over_heads(tmp_path: Path) -> None:
    settings = {"block_count": 62, "attention.head_count": 8}
    shape = open_gguf(tiny_gguf.write(tmp_path / "m.gguf", "gemma3", settings=settings)).shape
    assert shape.attn_scale == (WIDTH / 8) ** -0.5


def test_gemma3_pattern_may_be_listed_by_layer(tmp_path: Path) -> None:
    settings = {"attention.sliding_window_pattern": [True, False], "rope.freq_base_swa": 20_000.0}
    shape = open_gguf(tiny_gguf.write(tmp_path / "m.gguf", "gemma3", settings=settings)).shape
    assert (shape.local_layers, shape.local_rope) == ((True, False), Rope(20_000.0))


def test_llama3_frequencies_come_from_the_file(tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    weights = tiny_gguf.tensors("llama") | {"rope_freqs.weight": divisors}
    weights_loaded = load(tiny_gguf.write(tmp_path / "m.gguf", "llama", weights))
    assert weights_loaded.shape.rope.divisors == tuple(divisors.tolist())
    assert not any("rope" in name for name in weights_loaded.tensors)


def test_a_head_of_its_own_is_loaded(tmp_path: Path) -> None:
    head = np.ones((VOCAB, WIDTH), np.float32)
    tied = load(tiny_gguf.write(tmp_path / "tied.gguf", "qwen2"))
    weights = tiny_gguf.tensors("qwen2") | {"output.weight": head}
    loaded = load(tiny_gguf.write(tmp_path / "m.gguf", "qwen2", weights))
    assert "head" not in tied.tensors
    np.testing.assert_array_equal(loaded.tensors["head"].numpy(), head)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention.key_length": 32}, "value_length"),
        ({"rope.scaling.type": "dynamic"}, "dynamic"),
        ({"rope.dimension_count": 32}, "dimension_count"),
    ],
)
def test_what_cannot_run_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", "qwen3", settings=settings)
    with pytest.raises(UnknownArchitecture, match=message):
        load(path)


@pytest.mark.parametrize("part_tensors", [1, 7])
def test_a_split_model_is_the_model_it_was_split_from(tmp_path: Path, part_tensors: int) -> None:
    whole = load(tiny_gguf.write(tmp_path / "m.gguf", "llama", kind="Q8_0"))
    first = tiny_gguf.write(tmp_path / "s.gguf", "llama", kind="Q8_0", part_tensors=part_tensors)
    assert len(list(tmp_path.glob("s-*.gguf"))) == -(-len(tiny_gguf.tensors("llama")) // part_tensors)
    split = load(first)
    assert split.shape == whole.shape
    assert split.tensors.keys() == whole.tensors.keys()
    assert all(torch.equal(split.tensors[name], whole.tensors[name]) for name in whole.tensors)


def test_the_faults_of_a_split_model_are_named(tmp_path: Path) -> None:
    first = tiny_gguf.write(tmp_path / "m.gguf", "llama", part_tensors=10)
    second = tmp_path / "m-00002-of-00002.gguf"
    with pytest.raises(ModelError, match=r"is a part of a model: give the first, m-00001-of-00002\.gguf"):
        load(second)
    renamed = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelError, match=r"one of 2 parts .*name it renamed-00001-of-00002\.gguf"):
        load(renamed)
    renamed.rename(first)
    content = second.read_bytes()
    second.write_bytes(first.read_bytes())
    with pytest.raises(CorruptModel, match="as another part has"):
        load(first)
    second.write_bytes(content[:-100])
    with pytest.raises(CorruptModel, match=r"m-00002-of-00002\.gguf is truncated"):
        load(first)
    second.unlink()
    with pytest.raises(UnknownModel, match=r"there is no m-00002-of-00002\.gguf"):
        load(first)


def test_unknown_architecture_names_it_and_the_known(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", "mamba", tiny_gguf.tensors("llama"))
    with pytest.raises(UnknownArchitecture, match=r"m\.gguf.*'mamba'.*llama, qwen2, qwen3.*gemma3"):
        load(path)


def test_tensors_that_no_layer_has_are_refused(tmp_path: Path) -> None:
    weights = tiny_gguf.tensors("llama") | {"blk.0.ffn_gate_inp.weight": np.zeros((4, WIDTH), np.float32)}
    with pytest.raises(UnknownArchitecture, match=r"blk\.0\.ffn_gate_inp\.weight"):
        load(tiny_gguf.write(tmp_path / "m.gguf", "llama", weights))


def test_unreadable_encoding_is_named(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", kind="IQ4_XS")
    with pytest.raises(ModelError, match=r"m\.gguf: token_embd\.weight is stored as IQ4_XS.*Q4_K"):
        load(path)


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    weights = tiny_gguf.tensors("llama")
    misshapen = weights | {"blk.1.attn_k.weight": np.zeros((HEAD_DIM, WIDTH), np.float32)}
    del weights["blk.1.ffn_up.weight"]
    with pytest.raises(CorruptModel, match=r"m\.gguf.*layers\.1\.up"):
        load(tiny_gguf.write(tmp_path / "m.gguf", "llama", weights))
    with pytest.raises(
        CorruptModel, match=r"blk\.1\.attn_k\.weight has shape \[64, 256\], expected \[128, 256\]"
    ):
        load(tiny_gguf.write(tmp_path / "n.gguf", "llama", misshapen))


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "attention.layer_norm_rms_epsilon"])
@pytest.mark.parametrize("value", [None, 0, "many"])
def test_unusable_settings_are_named(tmp_path: Path, key: str, value: object) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", "qwen2", settings={key: value})
    with pytest.raises(CorruptModel, match=rf"m\.gguf: qwen2\.{key} is"):
        load(path)
