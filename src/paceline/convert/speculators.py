"""The speculators format: names, sizes and config that DSpark and EAGLE-3 heads share."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import Tensor

from paceline.convert.foreign_checkpoint import ARCHITECTURES, METADATA, SourceCheckpoint, TargetModel
from paceline.errors import UnknownArchitecture
from paceline.heads.block import BlockConfig
from paceline.heads.eagle import EagleConfig
from paceline.heads.head_checkpoint import Card
from paceline.target.weights.checkpoint import Fields

PARTS: Final = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
UNUSED: Final = ("t2d", "rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
_THETA: Final = 1e9  # largest value
VERSION: Final = "0.9.0"  # of the speculators format


def layer_config(shape: BlockConfig | EagleConfig, target: TargetModel, kind: str) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": shape.width,
        "intermediate_size": shape.ff_width,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": target.shape.max_context,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "tie_word_embeddings": False,
    }


def speculators_config(algorithm: str, card: Card, target: TargetModel, verifier: str) -> dict[str, Any]:
    """The common part of config.json, and paceline's own metadata."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": card.shape.block,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    calibration = card.calibration
    return {
        "speculators_model_type": algorithm,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": verifier,
                "architectures": [ARCHITECTURES[target.shape.architecture]],
            },
        },
        "draft_vocab_size": card.shape.draft_vocab,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        METADATA: {
            "target": card.target,
            "calibration": calibration and {"scale": calibration.scale, "shift": calibration.shift},
            "acceptance": card.acceptance,
            "tokens_per_pass": card.tokens_per_pass,
        },
    }


def decoder_shape(source: SourceCheckpoint, layer: Fields) -> dict[str, Any]:
    """Common fields of block and eagle configs; an error for what neither can compute."""
    act = layer.raw("hidden_act") or "silu"
    if act != "silu":
        raise unusable(source, f"the activation {str(act)[:40]!r}", "silu")
    rope = Fields(layer.source, {**layer.fields("rope_parameters").values, **_scaling(layer)})
    kind = rope.raw("rope_type") or rope.raw("type") or "default"
    if kind != "default" or (layer.raw("partial_rotary_factor") or 1) != 1:
        raise unusable(source, f"rotary positions of type {str(kind)[:40]!r}", "default")
    width, heads = layer.integer("hidden_size"), layer.integer("num_attention_heads")
    kv_heads, head_dim = (
        layer.integer("num_key_value_heads", heads),
        layer.integer("head_dim", width // heads),
    )
    if heads % kv_heads:
        raise layer.unusable("num_key_value_heads", kv_heads, f"a part of {heads}, num_attention_heads")
    if head_dim % 2:
        raise layer.unusable("head_dim", head_dim, "an even number")
    return {
        "width": width,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ff_width": layer.integer("intermediate_size"),
        "norm_eps": layer.number("rms_norm_eps", 1e-6, 1.0),
        "theta": rope.number("rope_theta", layer.number("rope_theta", 1e4, _THETA), _THETA),
    }


def decoder_sizes(shape: BlockConfig | EagleConfig, reads: int) -> dict[str, tuple[int, ...]]:
    """Sizes of the common parts, by our names. reads: width of the input of attention."""
    width, queries, keys = shape.width, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "fc": (width, len(shape.taps) * width),
        "norm": (width,),
        "q": (queries, reads),
        "k": (keys, reads),
        "v": (keys, reads),
        "o": (width, queries),
        "q_norm": (shape.head_dim,),
        "k_norm": (shape.head_dim,),
        "ffn_norm": (width,),
        "gate": (shape.ff_width, width),
        "up": (shape.ff_width, width),
        "down": (width, shape.ff_width),
    }


def parts_of(
    source: SourceCheckpoint,
    names: Mapping[str, str],
    sizes: Mapping[str, tuple[int, ...]],
    others: Iterable[str],
) -> dict[str, Tensor]:
    """Weights by our names. names: ours -> the checkpoint's. others: further tensors that are allowed."""
    known = {*names.values(), *others}
    surplus = [name for name in sorted(source.tensors) if name not in known and not name.endswith(UNUSED)]
    if surplus:
        raise unusable(source, f"a tensor {surplus[0][:80]}", "the parts of such a head")
    weights = {}
    for ours, theirs in names.items():
        part, _, leaf = ours.rpartition(".")
        size = sizes[part.rpartition(".")[2] or ours]
        weights[ours] = source.weight(theirs, *(size[:1] if leaf == "bias" else size))
    return weights


def speculative_tokens(source: SourceCheckpoint, default: int) -> int:
    """Tokens of a draft that it was made for."""
    methods = source.config.fields("speculators_config").raw("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else {}
    return Fields(source.config.source, first if isinstance(first, Mapping) else {}).integer(
        "speculative_tokens", default, 1000
    )


def unusable(source: SourceCheckpoint, what: str, expected: str) -> UnknownArchitecture:
    return UnknownArchitecture(
        f"{source.name} has {what}, which no head of paceline's computes (expected {expected}): "
        "use another checkpoint"
    )


def _scaling(layer: Fields) -> Mapping[str, object]:
    return layer.fields("rope_scaling").values
