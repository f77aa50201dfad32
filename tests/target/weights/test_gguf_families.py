"""GGUF files of every family against Transformers: tensors named and reordered as the converter does it."""

from math import sqrt
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.errors import CorruptModel
from paceline.target.eager.target import TorchTarget
from paceline.target.weights.gguf import open_gguf
from paceline.target.weights.model_config import Experts
from paceline.target.weights.reader import load
from paceline.types import Draft, Feed, Seq
from support import tiny_gguf
from support.models import CONFIG, save_reference, some_tokens

Floats = NDArray[np.float32]
BOUND = 1e-5  # relative to the largest logit
# family in support.models, architecture of the file, settings in place of the usual ones
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": ("qwen3", {}),
    "phi3": ("phi3", {}),
    "phi4_mini": ("phi3", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16, "num_hidden_layers": 4}),
    "qwen3_moe": ("qwen3moe", {"mlp_only_layers": [], "norm_topk_prob": True}),
    "mixtral": ("llama", {}),
}


def converted(family: str, model: Any) -> dict[str, Floats]:
    """The model's tensors as the file holds them."""
    config, architecture = model.config, FAMILIES[family][0]
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors: dict[str, Floats] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if family == "gemma2" and name.endswith("norm.weight"):
            values = values + 1
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            halves = values.reshape(-1, 2, config.head_dim // 2, values.shape[1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if name.endswith("experts.gate_up_proj"):  # stacked in memory, three tensors in a file
            ff, stack = values.shape[1] // 2, name.removesuffix("gate_up_proj")
            parts = {f"{stack}gate_proj.weight": values[:, :ff], f"{stack}up_proj.weight": values[:, ff:]}
        else:
            parts = {name if name.endswith(".weight") else f"{name}.weight": values}
        for part, matrix in parts.items():
            stored = names.get_name(part, try_suffixes=(".weight",))
            assert stored is not None, part
            tensors[stored] = np.ascontiguousarray(matrix)
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            tensors[f"rope_factors_{kind}.weight"] = np.array(rope[f"{kind}_factor"], np.float32)
    return tensors


def settings(family: str, config: Any) -> dict[str, Any]:
    """Metadata as the converter writes it."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    facts: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.dimension_count": int(head_dim * (config.rope_parameters.get("partial_rotary_factor") or 1)),
    }
    if family not in ("phi3", "phi4_mini"):
        facts |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if family == "yarn":
        rope = config.rope_parameters
        facts |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"])}
        facts["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if family in ("phi3", "phi4_mini"):
        facts["attention.sliding_window"] = config.sliding_window or 0
    if family == "phi4_mini":
        original = config.rope_parameters["original_max_position_embeddings"]
        facts["rope.scaling.original_context_length"] = original
        ratio = np.log(config.max_position_embeddings / original) / np.log(original)
        facts["rope.scaling.attn_factor"] = sqrt(1 + ratio)
    if family == "gemma2":
        facts["attention.sliding_window"] = config.sliding_window
        facts["attn_logit_softcapping"] = config.attn_logit_softcapping
        facts["final_logit_softcapping"] = config.final_logit_softcapping
    if family in ("qwen3_moe", "mixtral"):
        facts["expert_count"] = config.num_local_experts
        facts["expert_used_count"] = config.num_experts_per_tok
    if family == "qwen3_moe":
        facts["expert_feed_forward_length"] = config.moe_intermediate_size
    return facts


def write(family: str, folder: Path) -> tuple[Path, Any]:
    architecture, other = FAMILIES[family]
    model = save_reference(family, folder / "reference", **other)
    path = folder / "m.gguf"
    tiny_gguf.write(path, architecture, converted(family, model), settings=settings(family, model.config))
    return path, model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_file_equal_transformers(tmp_path: Path, family: str) -> None:
    path, model = write(family, tmp_path)
    tokens = some_tokens(60)
    target = TorchTarget(load(path), CONFIG)
    target.open(Seq("s", tokens, 1))
    ours = target.forward([Feed("s", tokens[:1], Draft(tuple(tokens[1:])))]).logits
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0]
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < BOUND


def test_experts_are_cut_out_of_their_stacks(tmp_path: Path) -> None:
    path, model = write("mixtral", tmp_path)
    shape = open_gguf(path).shape
    assert (shape.architecture, shape.experts) == ("mixtral", Experts(5, 2, 108, (True,) * 3, True))
    down = model.state_dict()["model.layers.1.mlp.experts.down_proj"]
    assert torch.equal(load(path).tensors["layers.1.experts.3.down"], down[3])


@pytest.mark.parametrize("part", ["attn_qkv", "ffn_up"])
def test_joined_matrices_of_another_size_are_named(tmp_path: Path, part: str) -> None:
    path, model = write("phi3", tmp_path)
    tensors = converted("phi3", model)
    tensors[f"blk.2.{part}.weight"] = tensors[f"blk.2.{part}.weight"][:-1]
    tiny_gguf.write(path, "phi3", tensors, settings=settings("phi3", model.config))
    with pytest.raises(CorruptModel, match=rf"blk\.2\.{part}\.weight has shape .*, expected \["):
        load(path)
