"""GGUF files of every family against Transformers: tensors named and reordered as the converter does it."""

from math import sqrt
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

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
    # Rows of whole blocks; the limit and the slope of its activation are not in a file.
    "gpt_oss": ("gpt-oss", {"hidden_size": 64, "intermediate_size": 96, "swiglu_limit": 7.0}),
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
        if family == "gpt_oss" and ".experts." in name:
            tensors |= gpt_oss_stacks(name, values)
            continue
        if name.endswith("experts.gate_up_proj"):  # stacked in memory, three tensors in a file
            ff, stack = values.shape[1] // 2, name.removesuffix("gate_up_proj")
            parts = {f"{stack}gate_proj.weight": values[:, :ff], f"{stack}up_proj.weight": values[:, ff:]}
        else:
            parts = {name if name.endswith((".weight", ".bias")) else f"{name}.weight": values}
        for part, matrix in parts.items():
            stored = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert stored is not None, part
            tensors[stored] = np.ascontiguousarray(matrix)
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            tensors[f"rope_factors_{kind}.weight"] = np.array(rope[f"{kind}_factor"], np.float32)
    return tensors


def gpt_oss_stacks(name: str, values: Floats) -> dict[str, Floats]:
    """Gate and up lie in turns in memory, and matrices inputs first; a file has neither."""
    layer, kind = name.split(".")[2], "bias" if name.endswith("_bias") else "weight"
    parts = {"gate": values[..., ::2], "up": values[..., 1::2]} if "gate_up" in name else {"down": values}
    return {
        f"blk.{layer}.ffn_{part}_exps.{kind}": np.ascontiguousarray(
            stack.swapaxes(1, 2) if kind == "weight" else stack
        )
        for part, stack in parts.items()
    }


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
    if family in ("yarn", "gpt_oss"):
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
    if family == "gpt_oss":
        facts["attention.sliding_window"] = config.sliding_window
        facts["expert_feed_forward_length"] = config.intermediate_size
    if family in ("qwen3_moe", "mixtral", "gpt_oss"):
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


def all_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    target = TorchTarget(load(path), CONFIG)
    target.open(Seq("s", tokens, 1))
    return target.forward([Feed("s", tokens[:1], Draft(tuple(tokens[1:])))]).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_file_equal_transformers(tmp_path: Path, family: str) -> None:
    path, model = write(family, tmp_path)
    tokens = some_tokens(60)
    ours = all_logits(path, tokens)
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0]
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < BOUND


def test_gpt_oss_in_mxfp4_equals_transformers(tmp_path: Path) -> None:
    """As published: experts in MXFP4, beside their scales in a folder, in blocks in a file."""
    path, model = write("gpt_oss", tmp_path)
    state, stored, kinds = model.state_dict(), {}, {}
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks = tiny_gguf.encoded(state[name].transpose(1, 2).contiguous().numpy(), "MXFP4")
        blocks = blocks.reshape(*blocks.shape[:2], -1, 17)  # [experts, outputs, groups, scale and 16 pairs]
        values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4)
        state[name].copy_(torch.from_numpy(values).flatten(2).transpose(1, 2))
        codes = np.concatenate((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), -1)
        stored[f"{name}_blocks"] = torch.from_numpy(codes[..., ::2] | codes[..., 1::2] << 4)
        stored[f"{name}_scales"] = torch.from_numpy(blocks[..., 0].copy())
        for part in ("gate", "up", "down"):
            kinds[f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight"] = "MXFP4"
    rest = {name: tensor for name, tensor in state.items() if f"{name}_blocks" not in stored}
    save_file(stored | rest, tmp_path / "reference" / "model.safetensors")
    kinds |= {name: "F32" for name in converted("gpt_oss", model) if name not in kinds}
    facts = settings("gpt_oss", model.config)
    tiny_gguf.write(path, "gpt-oss", converted("gpt_oss", model), kinds, settings=facts)
    tokens = some_tokens(60)
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0]
    folder, file = (all_logits(source, tokens) for source in (tmp_path / "reference", path))
    assert float((folder - theirs).abs().max() / theirs.abs().max()) < BOUND
    assert torch.equal(folder, file)


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
