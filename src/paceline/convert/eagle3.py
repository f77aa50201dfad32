"""EAGLE-3 checkpoints (arXiv 2503.01840): in the speculators format, and as their authors publish them."""

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from paceline.convert.foreign_checkpoint import (
    WHOLE_TEXT,
    ImportedHead,
    OutputCheckpoint,
    SourceCheckpoint,
    TargetModel,
    draft_order,
    equals_target,
    require_target,
    taps_of,
    vocab_maps,
)
from paceline.convert.speculators import (
    PARTS,
    decoder_shape,
    decoder_sizes,
    layer_config,
    parts_of,
    speculative_tokens,
    speculators_config,
    unusable,
)
from paceline.heads.eagle import EagleConfig, EagleHead, TapNorm
from paceline.heads.head_checkpoint import Card
from paceline.target.weights.checkpoint import Fields

OUTER: Final = {
    "fc.weight": "fc.weight",
    "norm.weight": "norm.weight",
    "head.weight": "lm_head.weight",
    "embed": "embed_tokens.weight",
}
LAYER: Final = {
    "embed_norm": "input_layernorm",
    "hidden_norm": "hidden_norm",
    **{ours: theirs for ours, theirs in PARTS.items() if ours not in ("q_norm", "k_norm")},
}
BIASED: Final = ("q", "k", "v", "o")
DRAFT_TOKENS: Final = 5  # where a checkpoint does not say how many


def to_checkpoint(net: EagleHead, card: Card, target: TargetModel, verifier: str) -> OutputCheckpoint:
    shape, own = net.shape, net.state_dict()
    tensors = {theirs: own[ours] for ours, theirs in _names(shape).items()}
    parts = len(shape.taps) if shape.tap_norm == "all" else 1
    tensors |= {name: torch.ones(parts * shape.width) for name in _norms(shape)}
    if not shape.own_embed and target.embeddings.embed_scale != 1:
        tensors[OUTER["embed"]] = target.embed
    layer = {
        **layer_config(shape, target, "llama"),
        "num_hidden_layers": 1,
        "vocab_size": shape.vocab,
        "attention_bias": shape.biased,
        "mlp_bias": False,
        "num_aux_hidden_states": len(shape.taps),
    }
    if shape.window < target.shape.max_context:
        layer |= {"layer_types": ["sliding_attention"], "sliding_window": shape.window}
    config = {
        "architectures": ["Eagle3Speculator"],
        **speculators_config("eagle3", card, target, verifier),
        "transformer_layer_config": layer,
        "norm_before_residual": shape.normed_residual,
        "norm_before_fc": shape.tap_norm == "all",
        "fc_norm": shape.tap_norm == "each",
        "norm_output": shape.feeds_normed,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in shape.taps],
    }
    return OutputCheckpoint(config, tensors | vocab_maps(net.draft_ids.cpu(), shape.vocab))


def from_checkpoint(source: SourceCheckpoint, target: TargetModel) -> ImportedHead:
    """From either format, exactly; an error where that is impossible."""
    layer = source.config.fields("transformer_layer_config")
    published = not layer.values
    layer = source.config if published else layer
    _require_known(source, layer)
    vocab, biased = layer.integer("vocab_size"), layer.flag("attention_bias", False)
    common = decoder_shape(source, layer)
    tensors = {_plain(name): tensor for name, tensor in source.tensors.items()}
    if biased:  # some have none on o
        tensors.setdefault(f"layers.0.{LAYER['o']}.bias", torch.zeros(common["width"]))
    source = replace(source, tensors=tensors)
    require_target(source, target, common["width"], vocab)
    ids, rows = draft_order(source, target)
    embed = source.tensors.get(OUTER["embed"])
    shape = EagleConfig(
        **common,
        vocab=vocab,
        draft_vocab=len(ids),
        taps=taps_of(source, _layers_read(source.config, target), target),
        block=speculative_tokens(source, DRAFT_TOKENS),
        window=layer.integer("sliding_window") if _slides(layer) else WHOLE_TEXT,
        tap_norm=_tap_norm(source.config),
        normed_residual=source.config.flag("norm_before_residual", not published),
        feeds_normed=source.config.flag("norm_output", False),
        biased=biased,
        own_embed=embed is not None and not equals_target(embed, target.embed),
    )
    return ImportedHead("eagle", shape, ids, _weights(source, shape, rows))


def _plain(theirs: str) -> str:
    return theirs.removeprefix("model.").replace("midlayer.", "layers.0.")


def _require_known(source: SourceCheckpoint, layer: Fields) -> None:
    kind, layers = layer.raw("model_type") or "llama", layer.integer("num_hidden_layers", 1)
    if kind != "llama":
        raise unusable(source, f"a layer of type {str(kind)[:40]!r}", "llama")
    if layers != 1:
        raise unusable(source, f"{layers} layers", "1")
    if not source.config.fields("eagle_config").flag("use_aux_hidden_state", True):
        raise unusable(source, "the target's last layer alone as its input", "several layers")
    other = source.config.raw("target_hidden_size")
    if other not in (None, layer.raw("hidden_size")):
        raise unusable(source, f"rows of {layer.raw('hidden_size')} for a target's of {other}", "the same")


def _layers_read(config: Fields, target: TargetModel) -> object:
    """From the config, or the default of the authors' code."""
    key, layers = "eagle_aux_hidden_state_layer_ids", target.shape.layers
    taps = config.raw(key) or config.fields("eagle_config").raw(key)
    return taps or (2, layers // 2, layers - 3)


def _slides(layer: Fields) -> bool:
    return layer.raw("layer_types") == ["sliding_attention"]


def _tap_norm(config: Fields) -> TapNorm:
    if config.flag("fc_norm", False):
        return "each"
    nested = config.fields("eagle_config").flag("norm_before_fc", False)
    return "all" if config.flag("norm_before_fc", nested) else "none"


def _weights(source: SourceCheckpoint, shape: EagleConfig, rows: Tensor) -> dict[str, Tensor]:
    """Under our names; the weights of the norms before fc are merged into fc."""
    names, norms, width = _names(shape), _norms(shape), shape.width
    sizes = decoder_sizes(shape, 2 * width) | {
        "embed": (shape.vocab, width),
        "embed_norm": (width,),
        "hidden_norm": (width,),
        "head": (shape.draft_vocab, width),
    }
    weights = parts_of(source, names, sizes, (*norms, "d2t", OUTER["embed"]))
    weights["head.weight"] = weights["head.weight"][rows]
    if norms:
        across = len(shape.taps) * width // len(norms)
        weights["fc.weight"] = weights["fc.weight"] * torch.cat([source.weight(n, across) for n in norms])
    return weights


def _names(shape: EagleConfig) -> dict[str, str]:
    """Names of all weights: ours -> theirs."""
    outer = {ours: theirs for ours, theirs in OUTER.items() if ours != "embed" or shape.own_embed}
    leaves = [(part, "weight") for part in LAYER] + [(part, "bias") for part in BIASED if shape.biased]
    return outer | {f"{part}.{leaf}": f"layers.0.{LAYER[part]}.{leaf}" for part, leaf in leaves}


def _norms(shape: EagleConfig) -> list[str]:
    """Names of the norms before fc."""
    if shape.tap_norm == "each":
        return [f"fc_norm.{i}.weight" for i in range(len(shape.taps))]
    return ["input_norm.weight"] if shape.tap_norm == "all" else []
