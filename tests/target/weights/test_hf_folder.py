import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from paceline.errors import CorruptModel, ModelError, UnknownArchitecture
from paceline.target.weights.hf_folder import open_folder
from paceline.target.weights.model_config import Rope
from paceline.target.weights.reader import load

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "gemma3": transformers.Gemma3TextConfig,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def save(folder: Path, family: str, shards: bool = False, **settings: Any) -> Any:
    """Writes a random model and returns it."""
    head_dim = {"head_dim": 16} if family in ("qwen3", "gemma3") else {}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[family](**{**SMALL, **head_dim, **settings})
    )
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, which start as ones and zeros
            parameter.normal_()
    model.save_pretrained(folder, max_shard_size="10KB" if shards else "1GB")
    return model


def edit(folder: Path, **settings: Any) -> None:
    """Sets keys of config.json; ... removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **settings}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("family", CONFIGS)
def test_tensors_are_those_of_the_model(tmp_path: Path, family: str, shards: bool) -> None:
    model = save(tmp_path, family, shards)
    assert (tmp_path / "model.safetensors.index.json").exists() == shards
    weights = load(tmp_path)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    names = {stored.name: name for name, stored in open_folder(tmp_path).tensors.items()}
    assert {name for name in names if name != "lm_head.weight"} == set(state)
    for name, tensor in state.items():
        shifted = tensor + 1 if family == "gemma3" and name.endswith("norm.weight") else tensor
        assert torch.equal(weights.tensors[names[name]], shifted), name
    if family == "gemma3":
        assert "head" not in weights.tensors
    else:
        assert torch.equal(weights.tensors["head"], model.state_dict()["lm_head.weight"])


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("llama", ""),
        ("mistral", ""),
        ("qwen2", "q_bias k_bias v_bias"),
        ("qwen3", "q_norm k_norm"),
        ("gemma3", "q_norm k_norm post_attn_norm post_ffn_norm"),
    ],
)
def test_families_have_their_own_parts(tmp_path: Path, family: str, parts: str) -> None:
    save(tmp_path, family)
    common = {"attn_norm", "q", "k", "v", "o", "ffn_norm", "gate", "up", "down"}
    found = {
        name.removeprefix("layers.1.") for name in load(tmp_path).tensors if name.startswith("layers.1.")
    }
    assert found == common | set(parts.split())


@pytest.mark.parametrize("family", CONFIGS)
def test_shape_is_what_the_config_says(tmp_path: Path, family: str) -> None:
    model = save(tmp_path, family, rms_norm_eps=1e-5)
    shape = load(tmp_path).shape
    assert (shape.architecture, shape.layers, shape.width, shape.heads, shape.kv_heads) == (
        family,
        2,
        32,
        4,
        2,
    )
    assert (shape.ff_width, shape.vocab_size, shape.max_context, shape.norm_eps) == (48, 64, 128, 1e-5)
    assert shape.head_dim == (16 if family in ("qwen3", "gemma3") else 8)
    if family != "gemma3":
        assert shape.rope == Rope(model.config.rope_parameters["rope_theta"])
        assert (shape.activation, shape.embed_scale, shape.attn_scale) == ("silu", 1.0, 0.0)


def test_every_bias_of_a_llama_is_loaded(tmp_path: Path) -> None:
    model = save(tmp_path, "llama", attention_bias=True)
    tensors = load(tmp_path).tensors
    for part in "qkvo":
        expected = model.state_dict()[f"model.layers.0.self_attn.{part}_proj.bias"]
        assert torch.equal(tensors[f"layers.0.{part}_bias"], expected)


def test_tied_head_is_left_out_even_if_stored(tmp_path: Path) -> None:
    save(tmp_path, "qwen2", tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    assert "head" not in load(tmp_path).tensors
    save_file({**load_file(file), "lm_head.weight": torch.zeros(64, 32)}, file)
    assert "head" not in load(tmp_path).tensors


def test_gemma3_shape(tmp_path: Path) -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "rope_theta": 2e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
    }
    settings: dict[str, Any] = {"sliding_window": 24, "query_pre_attn_scalar": 144, "rope_parameters": rope}
    save(tmp_path, "gemma3", num_hidden_layers=7, **settings)
    shape = load(tmp_path).shape
    assert (shape.rope, shape.local_rope) == (Rope(2e6, "linear", 8.0), Rope(3e4))
    assert (shape.window, shape.local_layers) == (24, (True, True, True, True, True, False, True))
    assert (shape.activation, shape.attn_scale) == ("gelu_tanh", 144**-0.5)
    assert shape.embed_scale == torch.tensor(32.0).sqrt().item()


def test_embedding_scale_is_rounded_as_the_reference_rounds_it(tmp_path: Path) -> None:
    model = save(tmp_path, "gemma3").bfloat16()
    weights = load(tmp_path, torch.bfloat16)
    ids = torch.arange(64)
    ours = weights.tensors["embed"][ids] * weights.shape.embed_scale
    assert torch.equal(ours, model.model.embed_tokens(ids))


def test_gemma3_config_in_the_older_form(tmp_path: Path) -> None:
    save(tmp_path, "gemma3")
    edit(
        tmp_path,
        rope_parameters=...,
        layer_types=...,
        _sliding_window_pattern=...,
        sliding_window_pattern=2,
        rope_theta=2e6,
        rope_local_base_freq=3e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    shape = load(tmp_path).shape
    assert (shape.rope, shape.local_rope) == (Rope(2e6, "linear", 8.0), Rope(3e4))
    assert shape.local_layers == (True, False)


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_gemma3_beside_a_vision_tower(tmp_path: Path, prefix: str) -> None:
    save(tmp_path, "gemma3")
    alone = load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config}))
    inner = "model." if prefix == "language_model." else ""
    file = tmp_path / "model.safetensors"
    tensors = {prefix + inner + name.removeprefix("model."): t for name, t in load_file(file).items()}
    save_file({**tensors, "vision_tower.patch": torch.zeros(4, dtype=torch.int64)}, file)
    beside = load(tmp_path)
    assert beside.shape == alone.shape
    assert beside.tensors.keys() == alone.tensors.keys()


def test_llama3_rope_in_both_forms(tmp_path: Path) -> None:
    save(tmp_path, "llama", rope_parameters=LLAMA3)
    expected = Rope(500_000.0, "llama3", 32.0, 1.0, 4.0, 64)
    assert load(tmp_path).shape.rope == expected
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    edit(tmp_path, rope_parameters=..., rope_theta=500_000.0, rope_scaling=scaling)
    assert load(tmp_path).shape.rope == expected


def test_old_linear_scaling_and_silent_config(tmp_path: Path) -> None:
    save(tmp_path, "llama", num_key_value_heads=4)
    edit(
        tmp_path,
        rope_parameters=...,
        rope_scaling={"type": "linear", "factor": 2.0},
        num_key_value_heads=None,
    )
    edit(tmp_path, max_position_embeddings=..., rms_norm_eps=..., head_dim=...)
    shape = load(tmp_path).shape
    assert (shape.rope, shape.kv_heads, shape.head_dim) == (Rope(1e4, "linear", 2.0), 4, 8)
    assert (shape.max_context, shape.norm_eps) == (2048, 1e-6)


@pytest.mark.parametrize(("window", "expected"), [(None, (0, ())), (16, (16, (True, True)))])
def test_mistral_window(tmp_path: Path, window: int | None, expected: tuple[int, tuple[bool, ...]]) -> None:
    save(tmp_path, "mistral", sliding_window=window)
    shape = load(tmp_path).shape
    assert (shape.window, shape.local_layers if shape.window else ()) == expected


def test_qwen_windows_only_where_switched_on(tmp_path: Path) -> None:
    save(tmp_path / "off", "qwen2", sliding_window=16)
    save(tmp_path / "on", "qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=1)
    off, on = load(tmp_path / "off").shape, load(tmp_path / "on").shape
    assert (off.window, on.window, on.local_layers) == (0, 16, (False, True))
    edit(tmp_path / "on", layer_types=...)
    assert load(tmp_path / "on").shape == on


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "bert"}, "'bert'.*llama, mistral, mixtral, qwen2.*gemma3"),
        ({"model_type": ...}, "'None'.*llama"),
        ({"hidden_act": "relu"}, "relu"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "RoPE on a part"),
        ({"num_hidden_layers": 1}, r"layers\.1\."),
    ],
)
def test_what_cannot_run_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    save(tmp_path, "llama")
    edit(tmp_path, **settings)
    with pytest.raises(UnknownArchitecture, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"num_attention_heads": "four"}, "num_attention_heads is 'four', expected a whole number"),
        ({"num_key_value_heads": 3}, "KV heads"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"rope_parameters": 5}, "rope_parameters"),
        ({"vocab_size": 65}, r"embed_tokens\.weight has shape \[64, 32\], expected \[65, 32\]"),
        ({"num_hidden_layers": 3}, r"no tensor for layers\.2\."),
    ],
)
def test_contradictions_are_named(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    save(tmp_path, "llama")
    edit(tmp_path, **settings)
    with pytest.raises(CorruptModel, match=message):
        load(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    save(tmp_path / "m", "llama", shards=True)
    shard = min((tmp_path / "m").glob("*.safetensors"))
    shard.rename(tmp_path / "away")
    with pytest.raises(CorruptModel, match=f"m has no {shard.name}"):
        load(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors.index.json").unlink()
    with pytest.raises(CorruptModel, match=r"neither model\.safetensors nor"):
        load(tmp_path / "m")
    (tmp_path / "m" / "config.json").unlink()
    with pytest.raises(CorruptModel, match=r"m has no config\.json"):
        load(tmp_path / "m")


def test_missing_head_and_foreign_encodings_are_named(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors.pop("lm_head.weight")
    save_file(tensors, file)
    with pytest.raises(CorruptModel, match="no tensor for head"):
        load(tmp_path)
    save_file({**tensors, "lm_head.weight": head.to(torch.float8_e4m3fn)}, file)
    with pytest.raises(ModelError, match=r"lm_head\.weight is stored as F8_E4M3"):
        load(tmp_path)


def test_impossible_header_length(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    file.write_bytes((2**63).to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(
        CorruptModel, match=r"model\.safetensors is truncated: expected \d+ bytes for its header"
    ):
        load(tmp_path)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_damaged_json(tmp_path: Path, text: bytes) -> None:
    save(tmp_path, "llama")
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CorruptModel, match=r"config\.json is damaged"):
        load(tmp_path)
